"""The clock of what waits: a host's own time, or that of a stream, which nobody waits for. Its events here are those of
a device with a time of its own."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from meshwright.runtime.comm.timers import WaitTimer


class Device:
    """Does in order what it is told, when its time has come: `told` is how long all of it takes, `now` how far it
    is."""

    def __init__(self) -> None:
        self.told = self.now = 0.0
        self.made = 0


class Event:
    """As torch.cuda.Event with timing."""

    def __init__(self, device: Device) -> None:
        self.device = device
        device.made += 1

    def record(self) -> None:
        self.at = self.device.told

    def query(self) -> bool:
        return self.at <= self.device.now

    def elapsed_time(self, end_event: Event) -> float:
        assert self.query() and end_event.query(), "torch raises here"
        return 1e3 * (end_event.at - self.at)


def test_a_host_waits_for_as_long_as_its_clock_says() -> None:
    clock, began = WaitTimer(), time.perf_counter()
    with clock, clock:
        time.sleep(0.05)
    assert 0.05 <= clock.read() <= time.perf_counter() - began and clock.read() == 0.0


def test_a_stream_wait_lasts_as_its_events_say_whatever_the_host_does() -> None:
    device = Device()
    clock = WaitTimer(partial(Event, device))
    for compute, wait in ((1.0, 0.25), (2.0, 0.5)):
        device.told += compute
        with clock:
            device.told += wait
    device.now = device.told
    assert clock.read() == pytest.approx(0.75) and clock.read() == 0.0


def test_unfinished_waits_are_left_for_the_next_reading_without_blocking() -> None:
    device = Device()
    clock = WaitTimer(partial(Event, device))
    with clock:
        device.told += 0.25
    device.now = device.told  # the sums of the step have come to the host
    with clock:
        device.told += 0.5  # behind the update
    assert clock.read() == pytest.approx(0.25)
    device.now = device.told
    assert clock.read() == pytest.approx(0.5)


@pytest.mark.parametrize("over", [True, False])
def test_waits_since_the_last_reading_can_be_dropped_and_unfinished_ones_stay(over: bool) -> None:
    """An evaluation between two steps is no part of either; the end of the first one is part of the second, over or not
    when that begins."""
    device = Device()
    clock = WaitTimer(partial(Event, device))
    with clock:
        device.told += 0.25
    assert clock.read() == 0.0
    with clock:
        device.told += 4.0
    device.now = device.told if over else 0.0
    clock.discard()
    with clock:
        device.told += 0.5
    device.now = device.told
    assert clock.read() == pytest.approx(0.75)


def test_a_host_forgets_what_came_since_the_last_reading() -> None:
    clock = WaitTimer()
    with clock:
        time.sleep(0.02)
    clock.discard()
    assert clock.read() == 0.0


def test_a_wait_within_another_counts_once() -> None:
    device = Device()
    clock = WaitTimer(partial(Event, device))
    with clock:
        device.told += 1.0
        with clock:
            device.told += 2.0
    device.now = device.told
    assert clock.read() == pytest.approx(3.0) and device.made == 2


def test_a_wait_that_fails_leaves_the_clock_right() -> None:
    device = Device()
    clock = WaitTimer(partial(Event, device))
    with pytest.raises(ConnectionError), clock:
        device.told += 5.0
        raise ConnectionError
    with clock:
        device.told += 1.0
    device.now = device.told
    assert clock.read() == pytest.approx(1.0)


def test_events_are_used_again_as_the_stream_comes_by_them() -> None:
    """A step has thousands of waits; the host is never far ahead."""
    device = Device()
    clock = WaitTimer(partial(Event, device))
    for _ in range(1000):
        with clock:
            device.told += 0.001
        device.now = device.told - 0.0015
    device.now = device.told
    assert clock.read() == pytest.approx(1.0) and device.made <= 6


def test_only_what_waits_on_an_accelerator_has_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    for kind, made in (("cpu", 0), ("cuda", 2)):
        with WaitTimer.of(torch.device(kind)):
            pass
        assert device.made == made
