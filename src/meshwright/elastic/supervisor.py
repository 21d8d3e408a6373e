"""Runs one job on the ranks of this machine, from start to verdict.

Promises: the world that was asked for is the world that runs; the first failing rank is named and the others are ended; Ctrl-C and SIGTERM
end the run at a step boundary with everything saved, within `grace` seconds, and a second one ends it at once; whatever happens no
process is left behind. A generation is one set of ranks that share a store prefix: whoever restarts ranks counts it up.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.errors import Interrupted
from meshwright.base.lines import Message
from meshwright.elastic.failure import Failure, RankFailed, last_lines, verdict
from meshwright.elastic.nursery import Nursery

TICK = 0.1  # seconds between looks at the clock
SETTLE = 1.0  # seconds that ranks get to tell what they know once one has failed
STOPPED = Interrupted.exit_code


@dataclass(frozen=True)
class Work:
    """What every rank does: `target` is `module:function` of the running wing, called with its channel and `payload`."""

    target: str
    world: int
    payload: Message
    folder: Path
    warm: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"


@dataclass
class Supervisor:
    """`run` returns when every rank is done. `hear` gets what ranks say, `note` what the supervisor has to tell a person."""

    work: Work
    hear: Callable[[int, Message], None]
    note: Callable[[str], None] = lambda _: None
    grace: float = 30.0
    tick: Callable[[], None] = lambda: None
    generation: int = 0
    _asked: list[str] = field(default_factory=list)
    _deadline: float | None = None
    _living: dict[int, int] = field(default_factory=dict)
    _failures: dict[int, Failure] = field(default_factory=dict)
    _stopped: set[int] = field(default_factory=set)
    _killed: bool = False
    _begun: bool = False

    def run(self) -> None:
        """Raises what failed: InputError, RankFailed, or Interrupted when the run was asked to stop."""
        self.work.logs.mkdir(parents=True, exist_ok=True)
        with _signals(self._on_signal), Nursery(self.work.logs / "zygote.log", self.work.warm, self.work.environment) as nursery:
            self._await_ready(nursery)
            self._start(nursery)
            told = 0
            while self._living and not self._killed:
                for event in nursery.events(TICK):
                    self._heed(event)
                if nursery.ended:
                    self._zygote_gone(nursery)
                if len(self._asked) > told:
                    told = len(self._asked)
                    self._ask(nursery)
                self._watch_clock()
                self.tick()
        self._conclude()

    def _on_signal(self, number: int, _: Any) -> None:
        self._asked.append(signal.Signals(number).name)

    def _await_ready(self, nursery: Nursery) -> None:
        while not self._asked:
            for event in nursery.events(TICK):
                if event["event"] == "ready":
                    return
            if nursery.ended:
                self._zygote_gone(nursery)
            self.tick()
        raise Interrupted("stopped before the first step; the same command starts again")

    def _start(self, nursery: Nursery) -> None:
        work = self.work
        for rank in range(work.world):
            self._living[rank] = 0
            nursery.command(
                "start",
                rank,
                world=work.world,
                generation=self.generation,
                target=work.target,
                payload=work.payload,
                log=str(work.log(rank)),
            )

    def _heed(self, event: Message) -> None:
        if event["event"] == "ready":
            return
        rank, now = event["rank"], time.monotonic()
        if event["event"] == "started":
            self._living[rank] = event["pid"]
        elif event["event"] == "said" and event["message"]["kind"] == "failed":
            said = event["message"]
            self._failures[rank] = Failure(rank, now, said["code"], said["error"], said["message"], said["place"], said["known"])
        elif event["event"] == "said":
            self._begun = self._begun or event["message"]["kind"] == "begin"
            self.hear(rank, event["message"])
        elif event["event"] == "ended":
            del self._living[rank]
            if event["status"] == STOPPED and rank not in self._failures:
                self._stopped.add(rank)
            elif event["status"] != 0:
                self._failures.setdefault(rank, Failure(rank, now, event["status"]))

    def _zygote_gone(self, nursery: Nursery) -> None:
        if not self._living and self._failures:
            return
        status = nursery.status()
        how = f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
        said = last_lines(nursery.log, 1)
        raise RankFailed(
            "\n".join([f"the process that starts ranks died ({how}); every rank ended with it", *(f"  | {line}" for line in said)])
            + f"\n  log: {nursery.log}"
        )

    def _ask(self, nursery: Nursery) -> None:
        """A first request lets the step end; a second one does not wait, nor does one before a rank said `begin`: there is no step to save."""
        reason = self._asked[0]
        if len(self._asked) > 1 or not self._begun:
            self._killed = True
            return
        self._deadline = time.monotonic() + self.grace
        self.note(f"{reason}: the step ends, then everything is saved (at most {self.grace:.0f} s); once more to stop at once")
        for rank in self._living:
            nursery.command("tell", rank, message={"stop": reason})

    def _watch_clock(self) -> None:
        now = time.monotonic()
        if self._failures and now > min(failure.at for failure in self._failures.values()) + SETTLE:
            self._killed = True
        if self._deadline is not None and now > self._deadline:
            self._killed = True

    def _conclude(self) -> None:
        if self._failures and len(self._asked) < 2:
            raise verdict(list(self._failures.values()), self.work.world, self.work.log)
        if self._asked:
            saved = len(self._stopped) == self.work.world
            how = "everything is saved" if saved else "the step in progress was given up" if self._begun else "no step had begun"
            raise Interrupted(f"stopped by {self._asked[0]}: {how}; the same command goes on where this one stopped")


@contextmanager
def _signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """SIGINT and SIGTERM go to `handler` meanwhile. Outside the main thread nothing can be heard and nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
