"""One set of ranks that share a store prefix: started together, heard, and ended together. What an older generation says is not heard."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.base.errors import Interrupted
from meshwright.base.limits import memory_kills
from meshwright.base.lines import Message
from meshwright.elastic.failure import Failure
from meshwright.elastic.holdings import Holdings
from meshwright.elastic.nursery import Nursery
from meshwright.elastic.writer import SCRIBE

STOPPED = Interrupted.exit_code
PROBER = -2
"""The same: the process that measures a device that is left out."""
BURIAL = 5.0  # seconds that killed ranks get to be gone


@dataclass(frozen=True)
class Work:
    """What every rank does: `target` is `module:function` of the running wing, called with its channel and `payload`."""

    target: str
    world: int
    payload: Message
    folder: Path
    warm: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    plan: str = ""
    scribe: str = ""
    """What writes a checkpoint beside training, `module:function`."""
    slots: tuple[int, ...] = ()
    """The device of each rank, where ranks do not take them in order (slots.py)."""

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / (f"rank-{rank}.log" if rank >= 0 else "probe.log" if rank == PROBER else "scribe.log")


@dataclass
class Generation:
    """`living` gives the process of each rank, `failures` how each that failed did, `stopped` those that ended as they were asked to."""

    work: Work
    number: int
    hear: Callable[[int, Message], None]
    living: dict[int, int] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    begun: bool = False
    kills: int = field(default_factory=memory_kills)
    """How often the system had killed for want of memory when it began."""
    clock: Callable[[], float] = time.monotonic

    def start(self, nursery: Nursery, holdings: Holdings, source: Holdings) -> None:
        """Ranks that keep their copies in `holdings` and go on from those of `source`."""
        nursery.hold(holdings)
        self.living = dict.fromkeys(range(self.work.world), 0)
        what = {"target": self.work.target, "payload": self.work.payload, "world": self.work.world, "generation": self.number}
        logs = [str(self.work.log(rank)) for rank in self.living]
        nursery.start(what, logs, self.work.slots, holdings, source)

    def write(self, nursery: Nursery, holdings: Holdings, asked: Message) -> None:
        """Starts the process that writes the checkpoint that was `asked` for."""
        assert self.work.scribe, "nobody writes for this work"
        payload = {"launch": self.work.payload, "step": asked["step"]}
        memory = {"sources": holdings.table(map(holdings.source, range(holdings.world)))}
        here = {"world": self.work.world, "generation": self.number, "log": str(self.work.log(SCRIBE)), "memory": memory}
        nursery.command("start", SCRIBE, target=self.work.scribe, payload=payload, **here)

    def probe(self, nursery: Nursery, target: str, slot: int) -> None:
        """Starts the process that measures the device of `slot`."""
        payload = {"launch": self.work.payload, "slot": slot}
        here = {"world": 1, "generation": self.number, "log": str(self.work.log(PROBER)), "memory": {}, "local": (slot, 1)}
        nursery.command("start", PROBER, target=target, payload=payload, **here)

    def heed(self, event: Message) -> None:
        if event.get("generation") != self.number or event.get("rank", SCRIBE) < 0:
            return
        rank, now = event["rank"], self.clock()
        if event["event"] == "started":
            self.living[rank] = event["pid"]
        elif event["event"] == "refused":
            words = f"was not started: process {event['pid']} of an earlier generation still lives in its place"
            self.failures.setdefault(rank, Failure(rank, now, -signal.SIGKILL, words=words))
        elif event["event"] == "said" and event["message"]["kind"] == "failed":
            said = event["message"]
            failure = Failure(
                rank, now, said["code"], said["error"], said["message"], said["place"], said["known"], raised_by=said.get("raised_by")
            )
            self.failures.setdefault(rank, failure)
        elif event["event"] == "said":
            self.begun = self.begun or event["message"]["kind"] == "begin"
            self.hear(rank, event["message"])
        elif event["event"] == "ended":
            del self.living[rank]
            if event["status"] == STOPPED and rank not in self.failures:
                self.stopped.add(rank)
            elif event["status"] != 0:
                kills = event["kills"] if "kills" in event else memory_kills() - self.kills  # another node counts its own
                self.failures.setdefault(rank, Failure(rank, now, event["status"], words=event.get("words", ""), kills=kills))

    def tell(self, nursery: Nursery, message: Message) -> None:
        for rank in self.living:
            nursery.command("tell", rank, message=message)

    def end(self, nursery: Nursery, other: Callable[[Message], None]) -> None:
        """Kills what is left of it and waits until it is gone, so that nothing of it writes any more. Events of others go to `other`."""
        for rank in self.living:
            nursery.command("signal", rank, signal=int(signal.SIGKILL))
        end = self.clock() + BURIAL
        while self.living and not nursery.ended and self.clock() < end:
            for event in nursery.events(0.05):
                other(event)
                if event["event"] == "ended" and event["generation"] == self.number:
                    self.living.pop(event["rank"], None)  # we killed it: no failure of its own

    def waited(self, until: float) -> float:
        """Seconds from the first failure that was heard of, 0 where there is none."""
        return max((until - failure.at for failure in self.failures.values()), default=0.0)

    @property
    def guilty(self) -> bool:
        """Whether a failure is there that no other one explains."""
        return any(not failure.innocent for failure in self.failures.values())
