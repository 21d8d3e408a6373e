"""Ranks whose device is slow while a file of the run's folder says so: slow-2 makes the device of slot 2 compute
longer, whichever rank has it (slow-b2: of the node that SLOWED_NODE calls b), until it was measured. Each rank writes
the step, how many ranks there are, its slot and whether it is slow into devices.

Nothing here is a number of seconds that a slow machine could turn around: what sleeps, sleeps several times what this
rank needs for a step, or a product, and ranks that have left a device out wait before step LATE until it is back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from fault_injection import read_once

import meshwright.train.loop as loop
from meshwright.core.ipc import Heartbeat, HeartbeatField, RankPhase
from meshwright.runtime.build.passes import analyze
from meshwright.train import measured_runs
from meshwright.train.rank_main import RankControl

TIMES, LEAST, WAIT = 4.0, 0.1, 600.0
"""How many times its step a slow device sleeps besides, the seconds of that at least, and those after which nobody
waits any more."""

PRODUCTS = 30.0
LATE = 115
FOLDER: list[Path] = []
WORLD: list[int] = []


def is_slow() -> bool:
    return (FOLDER[0] / f"slow-{os.environ.get('SLOWED_NODE', '')}{os.environ['LOCAL_RANK']}").exists()


class Slowed(Heartbeat):
    """Sleeps where backward begins, which counts as computing."""

    def at(self, phase: RankPhase, step: int | None = None) -> None:
        super().at(phase, step)
        if phase is not RankPhase.backward:
            return
        now = time.monotonic()
        steps = self.__dict__.setdefault("steps", [])
        if "woke" in self.__dict__:
            steps.append(now - self.woke)
        slow = is_slow()
        with open(FOLDER[0] / "devices", "a") as file:
            file.write(f"{self.read(HeartbeatField.step)} {WORLD[0]} {os.environ['LOCAL_RANK']} {slow:d}\n")
        if slow:
            time.sleep(max(LEAST, TIMES * median(steps[-8:] or [0.0])))
        while self.read(HeartbeatField.step) >= LATE and WORLD[0] < 4 and time.monotonic() < now + WAIT:
            super().at(phase)
            time.sleep(0.01)
        self.woke = time.monotonic()


def train(channel: RankControl, payload: dict[str, Any]) -> int:
    FOLDER[:], WORLD[:] = [Path(payload["run"]["folder"])], [channel.world if channel.world > 1 else 4]
    loop.Heartbeat = Slowed  # type: ignore[misc]
    analyze.analyze_model = read_once
    return loop.train(channel, payload)


def speed(channel: RankControl, payload: dict[str, Any]) -> int:
    """As slow as the device: each product sleeps too."""
    FOLDER[:] = [Path(payload["launch"]["run"]["folder"])]
    measured_runs.MATMUL_REPEATS, multiply = 3, measured_runs.torch.mm

    def product(*factors: Any) -> Any:
        began, found = time.monotonic(), multiply(*factors)
        if is_slow():
            time.sleep(PRODUCTS * (time.monotonic() - began))
        return found

    measured_runs.torch.mm = product  # type: ignore[assignment]
    status = measured_runs.speed(channel, payload)
    for sick in FOLDER[0].glob("slow-*"):
        sick.unlink()
    return status
