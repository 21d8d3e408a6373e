"""The ranks of several machines as one nursery, on the leader's side: those of this machine, and those of nodes that have come (node.py).

Promises: ranks are given out in order, those of this machine first; a node whose connection ends, or that is silent for SILENCE seconds, is gone, and so
are its ranks: each is told of once, with the node's name; a node may come or leave at any time, and `places` says how many ranks there is room for.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.limits import check_files
from meshwright.base.lines import Message
from meshwright.base.link import TOKEN, Link, line_of
from meshwright.base.store import prefix_of
from meshwright.elastic.holdings import Holdings
from meshwright.elastic.homes import Homes, places, ranks_at
from meshwright.elastic.mirrors import Mirrors
from meshwright.elastic.node import ALIVE, SILENCE, TICK
from meshwright.elastic.nursery import Nursery
from meshwright.elastic.refusals import Refusals
from meshwright.elastic.seats import Seats, holder
from meshwright.elastic.signs import Signs

THINKING = 300.0
"""Seconds that a leader may plan, in which it hears nobody."""

PULSES = 800.0
"""Messages a second in which signs of life of all nodes come, at most: of more than 40 nodes each one says them less often than every TICK."""

MANY, LINGER = 100, 0.02
"""Of more nodes than so many there is always one that says something: what the others say within so many seconds is heard with it."""

SPEAKS = SILENCE / 5
"""Seconds between two words to each node in any case."""


@dataclass(eq=False)
class _Node:
    name: str
    link: Link
    devices: int
    heard: float
    first: int = -1
    """Its first slot: devices of all machines are counted on, and a node that comes back has the numbers that it had."""
    lender: str = ""
    ranks: dict[int, int] = field(default_factory=dict)
    """Living ranks here and their generation."""
    leaving: bool = False
    is_lost: bool = False


class Fleet(Nursery):
    """`devices`: of this machine. `token` admits the nodes, at the door that this opens at `host` and `port`."""

    def __init__(
        self, logs: Path, warm: Sequence[str], host: str, port: int, token: str, devices: int, before: Nursery | None = None
    ) -> None:
        check_files(devices)
        super().__init__(logs / "zygote.log", warm, {"MESHWRIGHT_ADDRESS": host, TOKEN: token}, before)
        outside = self.outside
        self.devices, self.host = devices, host
        self.nodes: list[_Node] = []
        self._seats = Seats(devices)
        self.name_of = self._seats.name_of
        self._at: dict[int, _Node] = {}
        """The node of each rank that is not of this machine."""
        self._store: tuple[int, str] = (0, "")
        """Port and secret of that of the ranks."""
        self._came: queue.SimpleQueue[tuple[socket.socket | None, Message]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._ends = outside.waiting()
        self._ends.add(self._woken.fileno(), None)
        self._shared: dict[str, Holdings] = {}
        self._signs: dict[int, Signs] = {}
        self._looked = outside.clock()
        self._over = threading.Event()
        self._lender = outside.lender(host, token, self._file)
        self.homes: Homes = Homes()
        self.homes.alive.add(self._lender.address)
        mirror = outside.mirror(
            token, lambda *how: self._wake(dict(zip(("number", "whole", "seconds"), how, strict=True), event="mirrored"))
        )
        self._mirrors = Mirrors(self._lender.address, self.homes, mirror, self._tell, outside.clock)
        refusals = Refusals(lambda line: self._wake({"event": "refusal", "line": line}))
        self._door = outside.door(
            host, port, token, {"logs": str(logs), "warm": list(warm)}, lambda end, hello: self._wake(hello, end), refusals
        )
        self.port = self._door.port
        outside.repeat(lambda: _speak(self), SPEAKS, self._over)

    # --- who is there ---------------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._seats.all_of([node for node in self.nodes if not node.leaving])

    def _wake(self, message: Message, end: socket.socket | None = None) -> None:
        """From the threads of the door, with the end of a node that has come or a line about one that was refused, and of the mirror."""
        self._came.put((end, message))
        self._waker.send(b"1")

    def _admit(self) -> list[Message]:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        events: list[Message] = []
        while not self._came.empty():
            end, hello = self._came.get()
            if end is None:
                if hello["event"] == "refusal":
                    events.append(hello)
                else:
                    self._mirrors.heard(hello)
                continue
            try:
                name, devices, _ = str(hello["name"]), int(hello["devices"]), hello["order"] + 0
            except (KeyError, TypeError, ValueError):  # it has the token and is no node, such as one that is looking for copies
                end.close()
                continue
            node = _Node(name, self.outside.link(end, hello), devices, self.outside.clock())
            self._ends.add(node.link.handle, node)
        return events

    def _lose(self, node: _Node, why: str) -> list[Message]:
        self._ends.remove(node.link.handle)
        node.link.close()
        if node not in self.nodes:
            return []
        self.nodes.remove(node)
        node.is_lost = True
        self.homes.alive.discard(node.lender)
        self._mirrors.lost()
        words = f"its node {node.name} {why}"
        lost = [
            {"event": "ended", "rank": rank, "generation": number, "status": -signal.SIGKILL, "words": words}
            for rank, number in node.ranks.items()
        ]
        return [*lost, {"event": "lost", "name": node.name, "why": why}]

    def _node_of(self, rank: int) -> _Node | None:
        node = self._at.get(rank)
        return node if node is not None and not node.is_lost and rank in node.ranks else None

    # --- as a nursery ---------------------------------------------------------------------------------------------------------

    def command(self, do: str, rank: int, **more: Any) -> None:
        node = self._node_of(rank)
        if do == "start" and "slot" in more["payload"]:  # it is to measure this device
            node = holder(self.nodes, slot := more["payload"]["slot"])
            more["local"] = [slot - (node.first if node else 0), 1]
        if node is None:
            super().command(do, rank, **more)
        else:
            self._tell(node, do=do, rank=rank, **more)

    def start(self, what: Message, logs: Sequence[str], slots: Sequence[int], holdings: Holdings, source: Holdings) -> None:
        """One message for each node, which says of its own ranks alone how they start; and the same line for all of them, where the copies of `source` lie."""
        here, nodes, number = self._lender.address, {id(node): node for node in self.nodes}, what["generation"]
        homes = self._seats.seated(len(logs), slots, self.nodes)
        ranks: dict[int, list[tuple[int, int, str]]] = {place: [] for place in (id(None), *nodes)}
        for rank, (node, device) in enumerate(homes):
            ranks[id(node)].append((rank, device, logs[rank]))
        lenders = [node.lender if node else here for node, _ in homes]
        runs = self.homes.start(lenders, holdings.key, source.key)
        self._at = {rank: node for rank, (node, _) in enumerate(homes) if node}
        settled = line_of({"do": "sources", "key": holdings.key, "source": source.key, "runs": runs})
        (port, secret), every = self._store, max(TICK, len(self.nodes) / PULSES)
        more: Message = {**what, "every": every, "key": holdings.key, "store": [self.host, port, prefix_of(secret, number)]}
        for place, node in nodes.items():
            if ranks[place]:
                node.ranks |= {rank: number for rank, *_ in ranks[place]}
                self._write(node, settled)
                self._tell(node, do="start", **more, ranks=ranks[place], here=min(len(ranks[place]), node.devices))
        if holdings is source:
            holdings.release({*ranks_at(runs, here), *self._mirrors.ranks})
        table = holdings.table(places(runs, source.key, here, source.source))
        most = min(len(ranks[id(None)]), self.devices)
        for rank, device, log in ranks[id(None)]:
            memory = {"sources": table, "beside": False, **holdings.places(rank)}
            super().command("start", rank, **what, log=log, local=[device, most], memory=memory)

    def hold(self, holdings: Holdings) -> None:
        """What of this machine may be lent."""
        self._shared = {key: held for key, held in self._shared.items() if held.is_open} | {holdings.key: holdings}
        self._mirrors.begin(holdings)

    def released(self) -> None:
        for node in [node for node in self.nodes if node.leaving and not node.ranks]:
            self._tell(node, do="end", code=75, line="this node left; the others go on")

    def _file(self, key: str, rank: int) -> int | None:
        with contextlib.suppress(KeyError, OSError):  # of ranks that are no more
            return self._shared[key].lend(rank)
        return None

    def events(self, timeout: float) -> list[Message]:
        linger = LINGER if len(self.nodes) > MANY else 0.0
        ready = self._ends.wait(timeout, linger, *(() if self.ended else (self.handle,)))
        events = [*super().events(0), *self._admit()]
        for event in events:
            if event["event"] == "ready":
                self._store = event["port"], event["secret"]
            elif event["event"] == "said" and (event["message"]["kind"] == "spike" or event["message"].get("source") in ("", "disk")):
                self._mirrors.forget()
        now, before = self.outside.clock(), self._looked
        self._looked = now
        self._mirrors.look(self.nodes, len(self._at))
        for node in filter(None, ready):
            messages, ended = node.link.read()
            node.heard = now if messages else node.heard
            for message in messages:
                events.extend(self._hear(node, message))
            if ended:
                events.extend(self._lose(node, "is gone"))
        is_due = int(10 * now) != int(10 * before)  # ten times a second, however often a node says something
        for node in [node for node in self.nodes if now > node.heard + SILENCE] if is_due else ():
            events.extend(self._lose(node, f"has been silent for {SILENCE:.0f} s"))
        return events

    def _hear(self, node: _Node, event: Message) -> list[Message]:
        if event["event"] == "lends":
            # not before this a node is there: ranks that it is given sooner would have copies that nobody finds
            node.lender, node.first = event["address"], self._seats.first_of(node.name, node.devices, [other.first for other in self.nodes])
            self.nodes.append(node)
            self.homes.alive.add(node.lender)
            self.nodes.sort(key=lambda node: node.link.hello["order"])
            return [{"event": "came", "name": node.name, "devices": node.devices}]
        if event["event"] == "mirrored":
            self._mirrors.heard(event)
            return []
        if event["event"] == "ready":
            return []  # what it is told meanwhile waits in its pipe
        if event["event"] == "leaving":
            node.leaving = True
        elif event["event"] == "started":
            event["pid"] = _number(event["rank"])
        elif event["event"] == "ended" and node.ranks.get(event["rank"]) == event["generation"]:  # else another one has its place by now
            del node.ranks[event["rank"]]
        elif event["event"] == "pulse":
            self._signs |= {_number(rank): Signs(*signs) for rank, *signs in event["signs"]}
        return [event | {"name": node.name}]

    def signs(self, process: int) -> Signs:
        return self._signs.get(process, Signs()) if process < 0 else super().signs(process)

    @property
    def is_blind(self) -> bool:
        """A node says a word every ALIVE seconds at least. Sooner than the least patience, which else blames ranks for a link that is down."""
        heard = self.outside.clock() - 1.5 * max(ALIVE, len(self.nodes) / PULSES)
        return any(node.heard < heard for node in self.nodes)

    def again(self) -> None:
        super().again()
        for node in self.nodes:
            self._tell(node, do="again")

    def _tell(self, node: _Node, **message: Any) -> None:
        self._write(node, line_of(message))

    def _write(self, node: _Node, line: bytes) -> None:
        with contextlib.suppress(OSError):  # one that is gone is noticed by `events`
            node.link.write(line)

    def end(self, code: int, line: str) -> None:
        """The run is over: nodes end as it did."""
        for node in self.nodes:
            self._tell(node, do="end", code=code, line=line)

    def dissolve(self) -> None:
        self._over.set()
        self._door.close()
        self._lender.close()
        self._mirrors.close()
        for node in self.nodes:
            node.link.close()
        self.close()
        self._ends.close()
        self._woken.close()
        self._waker.close()


def _speak(fleet: Fleet) -> None:
    """From a thread of its own: nodes hear that the leader lives while it plans, though not for ever."""
    line = line_of({"do": "alive"})
    for node in list(fleet.nodes) if fleet.outside.clock() < fleet._looked + THINKING else ():
        with contextlib.suppress(ValueError):  # its connection was closed in this moment
            fleet._write(node, line)


def _number(rank: int) -> int:
    """In the place of a process of another machine."""
    return -rank - 2
