"""The mirrors of all nodes, as the leader orders them: which step is kept twice, and which is read next.

Promise: there is always a step that every rank has a copy of and every node but the first has its mirror of, once there was one: ranks write over it
only when the next one is whole everywhere. A node that is lost costs the steps since then. The first node has no mirror: what follows it goes on from disk.

Rule: the step to read is the newest that rank 0 has; each node's ranks are read by the node behind it, the last one's by the first. After a round whose step
was written over before it was read, steps are ordered one step ahead of time, up to MOST_AHEAD; after CALM whole rounds in a row one step less. Between two
rounds the links rest as long as copying took: waiting for a step loads no link. With `ahead` steps of that and copies that take c steps, a lost node costs
ahead + 3 c steps at most.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from meshwright.base.lines import Message
from meshwright.base.pulse import Word
from meshwright.elastic.holdings import Holdings
from meshwright.elastic.homes import Homes
from meshwright.elastic.mirror import Mirror, Order

MOST_AHEAD, CALM = 64, 8


class Holder(Protocol):
    """A node as it is here."""

    name: str
    lender: str
    ranks: dict[int, int]


class Mirrors:
    """`tell` speaks to a node; `mirror` is that of this one, which lends at `here`."""

    def __init__(
        self, here: str, homes: Homes, mirror: Mirror, tell: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.here, self.homes, self._mirror, self._tell, self._clock = here, homes, mirror, tell, clock
        self._holdings: Holdings | None = None
        self._numbers = itertools.count()
        self._waits: set[int] = set()
        self._where: dict[int, str] = {}
        self._failed = False
        self._whole = self._step = self._ahead = self._calm = 0
        self._seconds = self._next = 0.0

    def begin(self, holdings: Holdings) -> None:
        """A generation begins, with copies in `holdings`."""
        if self._holdings is not holdings:
            self._whole = 0
        self._holdings = holdings
        self._waits.clear()

    def forget(self) -> None:
        """The run went back to before what is mirrored."""
        self.homes.forget()
        self._whole = 0
        self._waits.clear()

    def look(self, nodes: Sequence[Holder], others: int) -> None:
        """Orders the next round, when there is none and all ranks have something new. `others`: ranks that are not of the first node."""
        holdings = self._holdings
        if holdings is None or not holdings.is_open:
            return
        newest = holdings.pulse(0).read(Word.kept)
        if newest and not self.homes.is_settled and holdings.kept:
            self.homes.settle()
        if self._waits or self._clock() < self._next:
            return
        if not newest or newest + self._ahead <= self._whole:
            return
        holders = [node for node in nodes if node.ranks and node.lender]
        if not others or sum(len(node.ranks) for node in holders) != others:
            return
        self._seconds, self._step, self._failed, self._where = 0.0, newest + self._ahead, False, {}
        kept = [self._whole, self._step]
        holdings.keep(kept)
        for node in nodes:
            self._tell(node, do="keep", key=holdings.key, steps=kept)
        for node, behind in zip(holders, [*holders[1:], None], strict=True):
            number, ranks = next(self._numbers), sorted(node.ranks)
            self._waits.add(number)
            self._where |= dict.fromkeys(ranks, behind.lender if behind is not None else self.here)
            message = {"key": holdings.key, "number": number, "step": self._step, "address": node.lender, "ranks": ranks}
            if behind is None:
                self._mirror.order(order(message, holdings))
            else:
                self._tell(behind, do="mirror", **message)

    def heard(self, message: Message) -> None:
        """A mirror is whole, or will not be."""
        if message["number"] not in self._waits:
            return
        self._waits.remove(message["number"])
        self._failed = self._failed or not message["whole"]
        self._seconds = max(self._seconds, float(message["seconds"]))
        if self._waits:
            return
        self._next = self._clock() + self._seconds
        if self._failed:
            self._ahead, self._calm = min(self._ahead + 1, MOST_AHEAD), 0
        elif self._holdings is not None:
            self._calm += 1
            if self._calm == CALM:
                self._ahead, self._calm = max(self._ahead - 1, 0), 0
            self._whole = self._step
            self.homes.mirrored(self._holdings.key, self._where)

    @property
    def ranks(self) -> set[int]:
        """Whose copies this node mirrors."""
        return self._mirror.ranks

    def close(self) -> None:
        self._mirror.close()

    def lost(self) -> None:
        """A node is gone: the round under way is void."""
        self._waits.clear()


def order(message: Message, holdings: Holdings) -> Order:
    """What a mirror is told, with the files of this node."""
    files = {rank: holdings.mirrored(rank) for rank in message["ranks"]}
    return Order(message["number"], message["key"], message["step"], message["address"], files)
