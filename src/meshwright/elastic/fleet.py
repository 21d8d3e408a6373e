"""The ranks of several machines as one nursery, on the leader's side: those of this machine, and those of nodes that have come (node.py).

Promises: ranks are given out in order, those of this machine first; a node whose connection ends, or that is silent for SILENCE seconds, is gone, and so
are its ranks: each is told of once, with the node's name; a node may come or leave at any time, and `places` says how many ranks there is room for.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.lines import Message
from meshwright.base.link import TOKEN, Door, Link, line_of
from meshwright.base.store import prefix_of
from meshwright.elastic.holdings import Holdings
from meshwright.elastic.homes import Homes, places, ranks_at
from meshwright.elastic.lending import Lender
from meshwright.elastic.mirror import Mirror
from meshwright.elastic.mirrors import Mirrors
from meshwright.elastic.node import ALIVE, SILENCE
from meshwright.elastic.nursery import Nursery
from meshwright.elastic.refusals import Refusals
from meshwright.elastic.seats import Seats, holder
from meshwright.elastic.signs import Signs

THINKING = 300.0
"""Seconds that a leader may plan, in which it hears nobody."""


@dataclass
class _Node:
    name: str
    link: Link
    devices: int
    heard: float
    first: int
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
        super().__init__(logs / "zygote.log", warm, {"MESHWRIGHT_ADDRESS": host, TOKEN: token}, before)
        self.devices, self.host = devices, host
        self.nodes: list[_Node] = []
        self._seats = Seats(devices)
        self.name_of = self._seats.name_of
        self._at: list[_Node | None] = []
        """The node of each rank; None: this machine."""
        self._port, self._secret = 0, ""
        self._came: queue.SimpleQueue[tuple[socket.socket | None, Message]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._shared: dict[str, Holdings] = {}
        self._signs: dict[int, Signs] = {}
        self._looked = time.monotonic()
        self._over = threading.Event()
        self._lender = Lender(host, token, self._file)
        self._homes = Homes()
        mirror = Mirror(token, lambda *how: self._wake(dict(zip(("number", "whole", "seconds"), how, strict=True), event="mirrored")))
        self._mirrors = Mirrors(self._lender.address, self._homes, mirror, self._tell)
        refusals = Refusals(lambda line: self._wake({"event": "refusal", "line": line}))
        self._door = Door(host, port, token, {"logs": str(logs), "warm": list(warm)}, lambda end, hello: self._wake(hello, end), refusals)
        self.port = self._door.port
        threading.Thread(target=_speak, args=(self,), name="alive", daemon=True).start()

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
            node = _Node(
                name,
                Link(end, hello),
                devices,
                time.monotonic(),
                self._seats.first_of(name, devices, (other.first for other in self.nodes)),
            )
            self.nodes.append(node)
            self.nodes.sort(key=lambda node: node.link.hello["order"])
            events.append({"event": "came", "name": node.name, "devices": node.devices})
        return events

    def _lose(self, node: _Node, why: str) -> list[Message]:
        self.nodes.remove(node)
        node.is_lost = True
        node.link.close()
        self._mirrors.lost()
        words = f"its node {node.name} {why}"
        lost = [
            {"event": "ended", "rank": rank, "generation": number, "status": -signal.SIGKILL, "words": words}
            for rank, number in node.ranks.items()
        ]
        return [*lost, {"event": "lost", "name": node.name, "why": why}]

    def _node_of(self, rank: int) -> _Node | None:
        node = self._at[rank] if 0 <= rank < len(self._at) else None
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
        runs = self._homes.start(lenders, {here, *(node.lender for node in self.nodes)}, holdings.key, source.key)
        self._at = [node for node, _ in homes]
        settled = line_of({"do": "sources", "key": holdings.key, "source": source.key, "runs": runs})
        more: Message = {**what, "key": holdings.key, "store": [self.host, self._port, prefix_of(self._secret, number)]}
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
        with selectors.DefaultSelector() as waiting:
            for handle in (*(() if self.ended else (self.handle,)), self._woken.fileno(), *(node.link.handle for node in self.nodes)):
                waiting.register(handle, selectors.EVENT_READ)
            waiting.select(timeout)
        events = [*super().events(0), *self._admit()]
        for event in events:
            if event["event"] == "ready":
                self._port, self._secret = event["port"], event["secret"]
            elif event["event"] == "said" and (event["message"]["kind"] == "spike" or event["message"].get("source") in ("", "disk")):
                self._mirrors.forget()
        now = self._looked = time.monotonic()
        self._mirrors.look(self.nodes, self._at.count(None))
        for node in list(self.nodes):
            messages, ended = node.link.read()
            node.heard = now if messages else node.heard
            for message in messages:
                events.extend(self._hear(node, message))
            if ended or now > node.heard + SILENCE:
                events.extend(self._lose(node, "is gone" if ended else f"has been silent for {SILENCE:.0f} s"))
        return events

    def _hear(self, node: _Node, event: Message) -> list[Message]:
        if event["event"] == "lends":
            node.lender = event["address"]
            return []
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
            self._signs |= {_number(int(rank)): Signs(*signs) for rank, signs in event["signs"].items()}
        return [event | {"name": node.name}]

    def signs(self, process: int) -> Signs:
        return self._signs.get(process, Signs()) if process < 0 else super().signs(process)

    @property
    def is_blind(self) -> bool:
        """A node says a word every ALIVE seconds at least. Sooner than the least patience, which else blames ranks for a link that is down."""
        return any(time.monotonic() > node.heard + 1.5 * ALIVE for node in self.nodes)

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
        self._woken.close()
        self._waker.close()


def _speak(fleet: Fleet) -> None:
    """In a thread of its own: nodes hear that the leader lives while it plans, though not for ever."""
    while not fleet._over.wait(ALIVE):
        for node in list(fleet.nodes) if time.monotonic() < fleet._looked + THINKING else ():
            with contextlib.suppress(ValueError):  # its connection was closed in this moment
                fleet._tell(node, do="alive")


def _number(rank: int) -> int:
    """In the place of a process of another machine."""
    return -rank - 2
