"""A call of the system that the supervisor's loop makes fails once with an OSError: the run goes on from its copies in
memory, and no step is lost."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import selectors
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_runs import STEPS, events, launch, losses, train

from meshwright.elastic.local_agent import LocalAgent

CALLS = [
    (os, name)
    for name in (
        "read",
        "write",
        "open",
        "close",
        "fstat",
        "ftruncate",
        "pwrite",
        "memfd_create",
        "dup",
        "waitpid",
        "unlink",
    )
]
CALLS += [(selectors.DefaultSelector, "select"), (io, "open")]
LOOP = {"_generate", "_recover"}
KILLED = [{"rank": 1, "step": 6, "phase": "backward", "how": "SIGKILL"}]
Site = tuple[str, ...]


def site(name: str) -> Site | None:
    """The call by its name and the functions of the package that lead to it; None outside of the supervisor's loop."""
    found, frame = [name], sys._getframe(2)
    while frame is not None:
        if "/meshwright/elastic/" in (path := frame.f_code.co_filename) or "/meshwright/core/" in path:
            found.append(f"{Path(path).stem}.{frame.f_code.co_name}")
        if frame.f_code.co_name in LOOP and path.endswith("supervisor.py"):
            return tuple(found)
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Failing:
    """Counts the calls of each site in the main thread, and has the `nth` of one of them fail."""

    def __init__(self, where: Site | None = None, nth: int = 1) -> None:
        self.where, self.nth, self.calls = where, nth, Counter[Site]()

    def replaced(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and (here := site(name)) is not None:
                self.calls[here] += 1
                if here == self.where and self.calls[here] == self.nth:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*given, **named)

        return wrapped

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in CALLS:
                patch.setattr(owner, name, self.replaced(getattr(owner, name), name))
            yield


@pytest.fixture(scope="module")
def whole(
    agent: LocalAgent, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[int, float], dict[Site, int]]:
    """The losses of a run whose rank 1 is killed, and what its supervisor calls."""
    folder, failing = tmp_path_factory.mktemp("whole") / "run", Failing()
    with failing.inside():
        train(agent, launch(text, folder, "dp2"), KILLED)
    return losses(folder), dict(failing.calls)


def check(agent: LocalAgent, text: Path, folder: Path, wanted: dict[int, float], where: Site, nth: int) -> None:
    failing = Failing(where, nth)
    with failing.inside():
        train(agent, launch(text, folder, "dp2"), KILLED)
    assert losses(folder) == wanted and max(wanted) == STEPS, where
    assert all(event.lost == 0 for event in events(folder) if event.kind == "recovery"), where


@pytest.mark.parametrize("call", ["select", "read", "write", "memfd_create"])
@pytest.mark.covering(1)
def test_the_supervisor_survives_a_call_that_fails_once(
    agent: LocalAgent, text: Path, whole: tuple[dict[int, float], dict[Site, int]], tmp_path: Path, call: str
) -> None:
    """`make soak` does so for every place that calls the system."""
    wanted, calls = whole
    where = min(site for site in calls if site[0] == call)
    check(agent, text, tmp_path / "run", wanted, where, min(calls[where], 2))


@pytest.mark.soak
@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_the_supervisor_survives_a_failing_call_at_any_time_of_the_run(
    agent: LocalAgent, text: Path, whole: tuple[dict[int, float], dict[Site, int]], tmp_path: Path, part: float
) -> None:
    wanted, calls = whole
    assert len(calls) > 15
    for number, where in enumerate(sorted(calls)):
        check(agent, text, tmp_path / str(number), wanted, where, 1 + int(part * calls[where]))
