"""A node of a run on several machines, on the node's side: ranks and their copies live here, what they do is decided by the leader's supervisor.

Promises: the ranks of this node end when the leader is gone or silent for SILENCE seconds, so that a part of the machines that was cut off
never goes on alone; a SIGTERM here tells the leader, which goes on with the other nodes and reads the copies of this one meanwhile; no process is left.

| the leader says | this node says |
|---|---|
| sources: key, source, runs: where the copies lie that ranks go on from (homes.py) | |
| start: what ranks do, and of each here its number, device and log | started, said, ended: as a zygote |
| tell, signal: as to a zygote (train/zygote.py) | |
| again: ranks that will not die: all of them end with their zygote | ready: the zygote is there |
| mirror: number, key, step, address, ranks: read their copies (mirror.py) | mirrored: number, whether all of them are whole, and the seconds that copying took |
| keep: key, steps: ranks do not write over their copies of these | |
| alive: now and then | pulse: generation, the rows of signs of life that have changed, what the system says of each rank's process (signs.py) |
| end: code, line | leaving: a signal asks this node to go |
"""

from __future__ import annotations

import contextlib
import selectors
import signal
from pathlib import Path
from typing import Any

from meshwright.base.lent import NOWHERE
from meshwright.base.limits import check_files, memory_kills
from meshwright.base.lines import Message
from meshwright.base.link import Link
from meshwright.base.signals import hearing
from meshwright.elastic.failure import Failure, cause
from meshwright.elastic.holdings import Holdings, packed
from meshwright.elastic.homes import Runs, places, ranks_at
from meshwright.elastic.mirrors import order
from meshwright.elastic.nursery import Nursery
from meshwright.elastic.outside import Outside

TICK = 0.05
SILENCE = 15.0
"""Seconds without a word after which the other side counts as gone. A link may be down for a third of it and nothing is lost."""

ALIVE = 1.0
"""Seconds after which a word is said in any case."""

GONE = (75, "")


class Node:
    """Serves one run as node `number`, reached at `host`. `environment` goes to the ranks; the leader's hello says which modules they need and where logs lie."""

    outside = Outside()

    def __init__(self, link: Link, host: str, token: str, number: int, environment: dict[str, str], warm: Nursery | None = None) -> None:
        """`warm`: that of this node under another leader."""
        check_files(0)
        self.every = TICK
        """Seconds between two messages with signs of life at least."""
        self.link, self.number, self.environment = link, number, environment
        self.logs = Path(link.hello["logs"])
        self.logs.mkdir(parents=True, exist_ok=True)
        self.nursery = self._nursery(warm)
        self.lender = self.outside.lender(host, token, self._file)
        self.mirror = self.outside.mirror(token, self._was_mirrored)
        self.holdings: dict[str, Holdings] = {}
        self.generation, self.key = -1, ""
        self._sources: list[str] = []
        self.processes: dict[int, int] = {}
        self.leaving = ""
        """The signal that asked this node to go, if one has."""
        self._told = False
        self._heard = self._said = self.outside.clock()
        self._rows: dict[int, bytes] = {}
        self._kills = memory_kills()

    def _nursery(self, warm: Nursery | None = None) -> Nursery:
        return Nursery(self.logs / f"zygote-{self.number}.log", self.link.hello["warm"], self.environment, warm)

    def _file(self, key: str, rank: int) -> int | None:
        with contextlib.suppress(KeyError, OSError):  # of ranks that are no more
            return self.holdings[key].lend(rank)
        return None

    def run(self) -> tuple[int, str]:
        """The exit code of the run, and the leader's last line. GONE: the leader is gone; then `nursery` may be as new, and is open."""
        how = (1, "")
        try:
            with hearing(self._on_signal):
                self.begin()
                while (found := self.turn()) is None:
                    self._wait()
                how = found
        except OSError:
            how = GONE
        finally:
            self.end(how)
        return how

    def begin(self) -> None:
        """Says where copies of this node are lent. Raises OSError when the leader is gone, as `turn` does."""
        self._say(event="lends", address=self.lender.address)

    def end(self, how: tuple[int, str]) -> None:
        """Leaves nothing behind but a `nursery` that is as new, where another leader may need it."""
        if how != GONE or self.leaving or not self.nursery.clear():
            self.nursery.close()
        self.lender.close()
        self.mirror.close()
        for holdings in self.holdings.values():
            holdings.close()
        self.link.close()

    def _on_signal(self, number: int, _: Any) -> None:
        """Nothing is said from here: what this interrupts may be in the middle of a line, and hold the link's lock."""
        self.leaving = self.leaving or signal.Signals(number).name

    def _wait(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.link.handle, selectors.EVENT_READ)
            if not self.nursery.ended:
                waiting.register(self.nursery.handle, selectors.EVENT_READ)
            waiting.select(TICK)

    def turn(self) -> tuple[int, str] | None:
        """Does what there is to do now. Returns how the run ended, once it has."""
        for event in self.nursery.events(0):
            self._relay(event)
        if self.nursery.ended:
            self._bury()
        messages, ended = self.link.read()
        for message in messages:
            self._heard = self.outside.clock()
            if message["do"] == "end":
                return int(message["code"]), str(message["line"])
            self._obey(message)
        if ended or self.outside.clock() > self._heard + SILENCE:
            return GONE
        if self.leaving and not self._told:
            self._told = True
            self._say(event="leaving", signal=self.leaving)
        self._show()
        return None

    def _obey(self, message: Message) -> None:
        if message["do"] == "again":
            self.nursery.close()
            self._bury()
        elif message["do"] == "sources":
            self._settle(message["key"], message["source"], message["runs"])
        elif message["do"] == "start" and "ranks" in message:
            self._start(message)  # else it is what measures a device, which keeps no copies
        elif message["do"] == "keep":
            if message["key"] in self.holdings:
                self.holdings[message["key"]].keep(message["steps"])
        elif message["do"] == "mirror":
            with contextlib.suppress(KeyError, OSError):  # of ranks that are no more
                self.mirror.order(order(message, self.holdings[message["key"]]))
        elif message["do"] != "alive":
            self.nursery.command(**message)

    def _settle(self, key: str, source: str, runs: Runs) -> None:
        """What the next ranks go on from. Copies that nobody can be told of any more are closed."""
        here = self.lender.address
        for old in set(self.holdings) - {key, source}:
            self.holdings.pop(old).close()
        found = self.holdings.get(source)
        self._sources = [*places(runs, source, here, found.source if found else lambda rank: NOWHERE)]
        if key == source and found:
            found.release({*ranks_at(runs, here), *self.mirror.ranks})

    def _start(self, message: Message) -> None:
        """Ranks with the memory of this node: rows and copies here, copies elsewhere by address."""
        key, ranks, here = message.pop("key"), message.pop("ranks"), message.pop("here")
        if key not in self.holdings:
            self.holdings[key] = self.outside.holdings(message["world"])
        holdings, self.every = self.holdings[key], message.pop("every")
        self.generation, self.key = message["generation"], key
        holdings.begin(rank for rank, *_ in ranks)
        self._rows.clear()
        memory = {"sources": holdings.table(self._sources), "beside": False}
        for rank, device, log in ranks:
            # from here on, so that the end of a zygote that dies before it obeys is the end of this rank too
            self.processes.setdefault(rank, 0)
            self.nursery.command(**message, rank=rank, log=log, local=[device, here], memory={**memory, **holdings.places(rank)})

    def _was_mirrored(self, number: int, whole: bool, seconds: float) -> None:
        """From the mirror's thread."""
        with contextlib.suppress(OSError):
            self.link.send({"event": "mirrored", "number": number, "whole": whole, "seconds": seconds})

    def _relay(self, event: Message) -> None:
        if event["event"] == "ready":
            event = {"event": "ready"}  # the secret of its store stays here
        elif event["event"] == "started" and event["rank"] >= 0:
            self.processes[event["rank"]] = event["pid"]
        elif event["event"] == "ended":
            self.processes.pop(event["rank"], None)
            before, self._kills = self._kills, memory_kills()
            event["kills"] = self._kills - before
            if event["status"] == -signal.SIGKILL and event["kills"]:
                event["words"] = cause(Failure(event["rank"], 0.0, event["status"], kills=event["kills"]))  # as it is on this node
        self._say(**event)

    def _bury(self) -> None:
        """The zygote is gone, and every rank with it; another one takes its place."""
        for rank in list(self.processes):
            self._relay({"event": "ended", "rank": rank, "generation": self.generation, "status": -signal.SIGKILL})
        self.nursery.again()

    def _show(self) -> None:
        """Signs of life, when there are new ones; and a word in any case after a while."""
        now = self.outside.clock()
        if now < self._said + self.every:
            return
        holdings = self.holdings.get(self.key)
        rows = {rank: holdings.row(rank) for rank in sorted(self.processes)} if holdings else {}
        if rows != self._rows or now > self._said + ALIVE:
            changed = [(rank, row) for rank, row in rows.items() if row != self._rows.get(rank)]
            self._rows = rows
            signs = [(rank, *self.nursery.signs(process).rounded()) for rank, process in self.processes.items()]
            self._say(event="pulse", generation=self.generation, rows=packed(changed), signs=signs)

    def _say(self, **message: Any) -> None:
        self._said = self.outside.clock()
        self.link.send(message)
