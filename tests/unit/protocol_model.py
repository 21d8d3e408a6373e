"""A model of the control plane as a small state machine: three nodes of one rank each, whoever leads them, their
generations and snapshots.

It says what is to happen, not how: after a fault, ranks go on from the newest step of which every rank has a snapshot
on a node that lives, or from the checkpoint on disk. Nodes that lose their leader retain their snapshots and mirrors;
the next leader adopts the newest version of which the nodes that have come to it have all ranks. `test_protocol.py`
visits all its states, checks in each of them what docs/en/launch.md promises, and performs its transitions on the real
leader and nodes (`protocol_cluster.py`). An action is a verb and a node:

| step, begin | all ranks of the generation end a step; or have joined each other, and go on from a common step |
| mirror n | node n has copied the snapshots that it was ordered to copy |
| crash n, kill n | faults: node n is gone with all of its memory; the rank of node n is gone |
| hear n | the leader notices that the connection to node n has ended; any other action may come before |
| come n | node n reaches the leader: a new process of a node that crashed, or one that has lost the leader before |
| start n | a node that crashed is started again while nobody leads |
| lead n | node n takes the lease of the run folder, which is free, and leads |
| expire | the time is over that a leader waits for nodes |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

NODES, FAULTS, STEPS, SAVED = 3, 2, 3, 1
"""Nodes; faults and steps at most; the one step after which a checkpoint is written to disk."""

Action = tuple[str, int]


class Snapshot(NamedTuple):
    node: int
    key: int
    rank: int
    step: int
    past: int
    """The generation that made the step: copies of one step of two generations are never read together."""


class State(NamedTuple):
    term: int = 0
    """Leaders before this one."""
    lead: int = 0
    phase: str = "gather"
    """lost: nobody leads; gather: the leader waits for nodes before its first generation; wait: for a node that is
    lost; join: ranks load; run."""
    generation: int = 0
    """Of this leader."""
    seats: tuple[int, ...] = ()
    """The slot of each rank."""
    slots: tuple[int, ...] = (0,)
    """The node of each slot that this leader has given out."""
    open: frozenset[int] = frozenset({0})
    """Slots whose nodes the leader has a connection to."""
    unheard: frozenset[int] = frozenset()
    """Those of them whose node has crashed, which the leader does not know yet."""
    dead: frozenset[int] = frozenset()
    orphans: frozenset[int] = frozenset()
    """Nodes that have had a leader."""
    done: int = 0
    most: int = 0
    """The newest step that was counted since ranks last went on."""
    disk: int = 0
    key: int = 0
    """Of the plan: another number of ranks has snapshots of its own."""
    old: int = -1
    """The plan before, while its snapshots are needed."""
    source: int = 0
    worlds: tuple[int, ...] = (0,)
    """Ranks of each plan."""
    held: frozenset[Snapshot] = frozenset()
    known: frozenset[Snapshot] = frozenset()
    """Those that a leader, before its first generation, has heard of from nodes that retained them."""
    stepped: bool = False
    """Whether this generation has ended a step."""
    whole: int = 0
    """The step of which each rank has a mirror, by the leader's knowledge."""
    heals: bool = False
    """Whether a fault is healed: not before this leader, or the one before it, had ranks that trained."""
    homes: frozenset[tuple[int, int, int]] = frozenset()
    """Key, rank and node of the snapshots that ranks have made themselves."""
    mirrors: frozenset[tuple[int, int, int]] = frozenset()
    """Key, rank and node of each mirror of the last whole round."""
    round: tuple[int, frozenset[tuple[int, int]]] | None = None
    """The step that is being mirrored; which rank's snapshots which node is still to copy."""
    orders: tuple[tuple[int, ...], ...] = ((),) * NODES
    """The ranks whose snapshots each node was last ordered to copy, two at most: it keeps those copies."""
    faults: int = 0
    gone: frozenset[int] = frozenset()
    """What the documentation promises, apart from how it is done: nodes lost since a step was last whole on two nodes;
    which node mirrored which; the step."""
    ring: tuple[tuple[int, int], ...] = ()
    safe: int = 0

    @property
    def promised(self) -> int:
        """The step from which ranks go on at least. With a rank no step is lost; with a node, also the leader, those
        since the last whole round of mirrors; with a node and the one that mirrors it, those since the checkpoint. A
        node that has not come to a new leader in time counts as lost."""
        if not self.gone:
            return self.most
        return max(self.disk, 0 if any({*pair} <= self.gone for pair in self.ring) else self.safe)

    @property
    def members(self) -> list[int]:
        """The node of each rank."""
        return [self.slots[slot] for slot in self.seats]

    @property
    def is_intact(self) -> bool:
        return not self.unheard & {*self.seats}

    @property
    def room(self) -> int:
        return min(NODES, len(self.open))

    def has(self, key: int) -> bool:
        """Whether all ranks have made snapshots under `key`, of which none is lost as far as the leader knows."""
        return len({rank for k, rank, _ in self.homes | self.mirrors if k == key}) == self.worlds[key]

    def common(self, key: int) -> int:
        """The step of the newest version of which every rank has a snapshot where it ran or in a mirror of a whole
        round."""
        if key < 0:
            return 0
        known = self.homes | self.mirrors
        return newest((each for each in self.held if each[:3] in {(at, k, rank) for k, rank, at in known}), key, self)[
            1
        ]


def newest(snapshots: Iterable[Snapshot], key: int, state: State) -> tuple[int, int]:
    """The newest version of which every rank has one of `snapshots`: its generation and its step; 0, 0 without one."""
    versions = [set[tuple[int, int]]() for _ in range(state.worlds[key])]
    for each in snapshots:
        if each.key == key:
            versions[each.rank].add((each.past, each.step))
    return max(set.intersection(*versions), default=(0, 0))


def actions(state: State) -> Iterator[Action]:
    """What may happen next."""
    s, leads = state, state.phase != "lost"
    connected = {s.slots[slot] for slot in s.open - s.unheard} if leads else set()
    if s.phase == "join" and s.is_intact:
        yield "begin", -1
    if s.phase == "run" and s.is_intact and s.done < STEPS:
        yield "step", -1
    if s.phase == "run" and s.round is not None:
        silent = {rank for rank, slot in enumerate(s.seats) if slot in s.unheard}
        for rank, node in sorted(s.round[1]):
            if rank not in silent and s.members.index(node) not in silent:
                yield "mirror", node
    if s.faults < FAULTS and s.heals:
        for node in range(NODES):
            if node not in s.dead:
                yield "crash", node
            if s.phase in ("run", "join") and node in s.members and s.is_intact:
                yield "kill", node
    for slot in sorted(s.unheard):
        yield "hear", slot
    for node in range(NODES):
        if leads and node not in connected:
            yield "come", node
        elif not leads and node in s.dead:
            yield "start", node
        elif not leads and (node in s.orphans or node == 0):
            yield "lead", node
    if s.phase in ("gather", "wait") and s.most:
        yield "expire", -1


def after(state: State, action: Action) -> State:
    """The state that `action` leads to, and what follows from it without any choice."""
    verb, which = action
    return _reduced(_settled(_VERBS[verb](state, which)))


def _begin(s: State, _: int) -> State:
    common, members = s.common(s.source), s.members
    step = max(common, s.disk)
    held = frozenset(
        each for each in s.held if each.key != s.key or each.node != members[each.rank] or each.step <= step
    )
    s = s._replace(phase="run", done=step, most=step, held=held, heals=True)
    return s if common == step > 0 else s._replace(whole=0, mirrors=frozenset())  # mirrors are of another past


def _step(s: State, _: int) -> State:
    done = s.done + 1
    homes = {(s.key, rank, node) for rank, node in enumerate(s.members)}
    held = s.held | {Snapshot(node, key, rank, done, s.generation) for key, rank, node in homes}
    homes |= {each for each in s.homes if each[0] != s.key}
    disk = SAVED if done >= SAVED else s.disk
    return s._replace(done=done, most=done, disk=disk, held=held, homes=frozenset(homes), stepped=True)


def _mirror(s: State, node: int) -> State:
    assert s.round is not None
    step, pending = s.round
    rank = next(rank for rank, at in pending if at == node)
    (past,) = (each.past for each in s.held if each[:4] == (s.members[rank], s.key, rank, step))
    fresh = Snapshot(node, s.key, rank, step, past)
    # this step and later ones are from before the ranks went back to an earlier step
    same = {each for each in s.held if each[:3] == fresh[:3] and each.step >= step}
    others = sorted(each for each in s.held - same if each[:3] == fresh[:3])
    over = (
        [each for each in others if each.step != s.whole][:1] if len(others) >= 2 else []
    )  # it has room for two steps
    held = (s.held - same - {*over}) | {fresh}
    pending -= {(rank, node)}
    if pending:
        return s._replace(held=held, round=(step, pending))
    pairs, lost = _pairs(s), {s.slots[slot] for slot in s.unheard}
    ring = tuple((s.members[rank], at) for rank, at in pairs)
    mirrors = frozenset(each for each in s.mirrors if each[0] != s.key) | {(s.key, rank, at) for rank, at in pairs}
    return s._replace(
        held=held, round=None, whole=step, mirrors=mirrors, old=-1, gone=s.gone & lost, ring=ring, safe=step
    )


def _crash(s: State, node: int) -> State:
    held = frozenset(each for each in s.held if each.node != node)
    s = s._replace(orders=_replaced(s.orders, node, ()))
    s = s._replace(dead=s.dead | {node}, orphans=s.orphans - {node}, faults=s.faults + 1, held=held)
    if s.phase == "lost":
        return s._replace(gone=s.gone | {node})
    if node == s.lead:
        left = {s.slots[slot] for slot in s.open - s.unheard} - {node}
        lost = State(
            phase="lost", lead=-1, term=s.term, slots=(), open=frozenset(), dead=s.dead, orphans=s.orphans | left
        )
        lost = lost._replace(most=s.most, disk=s.disk, heals=True, faults=s.faults, gone=s.gone | {node})
        return lost._replace(held=held, worlds=s.worlds, ring=s.ring, safe=s.safe)
    slots = {slot for slot in s.open - s.unheard if s.slots[slot] == node}
    gone = s.gone | {node} if slots & {*s.seats} or any(node in pair for pair in s.ring) else s.gone
    return s._replace(unheard=s.unheard | slots, gone=gone)


def _kill(s: State, node: int) -> State:
    return _again(s._replace(faults=s.faults + 1))


def _hear(s: State, slot: int) -> State:
    homes, mirrors = (frozenset(each for each in known if each[2] != s.slots[slot]) for known in (s.homes, s.mirrors))
    known = frozenset(each for each in s.known if each.node != s.slots[slot])
    s = s._replace(open=s.open - {slot}, unheard=s.unheard - {slot}, homes=homes, mirrors=mirrors, round=None)
    s = s._replace(known=known)
    return _again(s) if slot in s.seats and s.phase in ("run", "join") else s


def _again(s: State) -> State:
    """Ranks end; they start again as soon as there is room for all of them."""
    return s._replace(phase="wait", round=None, stepped=False)


def _come(s: State, node: int) -> State:
    slot = next((slot for slot, at in enumerate(s.slots) if at == node and slot not in s.open), len(s.slots))
    slots = s.slots if slot < len(s.slots) else (*s.slots, node)
    heals = s.heals or (s.phase == "gather" and node in s.orphans)
    known = s.known | {each for each in s.held if each.node == node} if s.phase == "gather" else s.known
    s = s._replace(orders=_replaced(s.orders, node, ()))
    s = s._replace(slots=slots, open=s.open | {slot}, heals=heals, dead=s.dead - {node}, orphans=s.orphans - {node})
    return s._replace(known=known)


def _start(s: State, node: int) -> State:
    return s._replace(dead=s.dead - {node})


def _lead(s: State, node: int) -> State:
    fresh = State(
        term=s.term + 1, lead=node, slots=(node,), dead=s.dead, orphans=s.orphans - {node}, most=s.most, disk=s.disk
    )
    fresh = fresh._replace(held=s.held, worlds=s.worlds, ring=s.ring, safe=s.safe)
    return fresh._replace(
        faults=s.faults,
        gone=s.gone,
        heals=node in s.orphans,
        generation=-1 if node in s.orphans else 0,
        known=frozenset(each for each in s.held if each.node == node),
    )


def _expire(s: State, _: int) -> State:
    return _begins(s, s.room) if s.phase == "gather" else _resize(s, s.room)


def _begins(s: State, world: int) -> State:
    """The first generation of a leader: it adopts the newest version of which it knows all ranks."""
    seats = tuple(sorted(s.open)[:world])
    found = {key: newest(s.known, key, s) for key in {each.key for each in s.known}}
    whole = {key: version for key, version in found.items() if version[1]}
    old = max(whole, key=lambda key: (whole[key], key), default=-1)
    past, step = whole.get(old, (-1, 0))
    places: list[list[int]] = [[] for _ in range(s.worlds[old] if whole else 0)]
    for each in sorted(s.known, key=lambda each: (each.node != s.lead, each.node)):
        if (each.key, each.past, each.step) == (old, past, step):
            places[each.rank].append(each.node)
    known = [frozenset((old, rank, at[n]) for rank, at in enumerate(places) if len(at) > n) for n in (0, 1)]
    key = len(s.worlds)
    members = {s.slots[slot] for slot in seats}
    held = frozenset(each for each in s.held if each.key == old or each.node not in members)
    s = s._replace(phase="join", generation=past + 1, seats=seats, key=key, old=old, worlds=(*s.worlds, world))
    s = s._replace(homes=known[0], mirrors=known[1], held=held, known=frozenset(), gone=s.gone | s.orphans)
    return _renumbered(s._replace(source=old if whole else key))


def _renumbered(s: State) -> State:
    """Only plans of which there is something have numbers."""
    used = sorted({each.key for each in s.held} | {s.key, s.source, s.old} - {-1})
    if used == [*range(len(s.worlds))]:
        return s
    to = {-1: -1, **{key: number for number, key in enumerate(used)}}
    homes, mirrors = (
        frozenset((to[key], rank, node) for key, rank, node in places if key in to) for places in (s.homes, s.mirrors)
    )
    held = frozenset(each._replace(key=to[each.key]) for each in s.held)
    s = s._replace(key=to[s.key], old=to[s.old], source=to[s.source], worlds=tuple(s.worlds[key] for key in used))
    return s._replace(homes=homes, mirrors=mirrors, held=held)


def _resize(s: State, world: int) -> State:
    """Another plan: its ranks go on from the newest snapshots of the plans before."""
    old = s.key if s.has(s.key) or s.old < 0 else s.old
    if old == s.key and not s.whole and s.worlds[old] > 1:
        s = s._replace(
            safe=0
        )  # a second change of plan before there were mirrors: a lost node now costs the steps since the checkpoint
    s = s._replace(key=s.key + 1, old=old, worlds=(*s.worlds, world), whole=0, round=None, stepped=False)
    return _joins(s, world)


def _joins(s: State, world: int) -> State:
    source = s.key if s.old < 0 or s.has(s.key) else s.old
    old = -1 if source == s.key else s.old
    seats = tuple(sorted(s.open)[:world])
    members = {s.slots[slot] for slot in seats}
    held = frozenset(each for each in s.held if each.key in (s.key, source) or each.node not in members)
    if source == s.key:
        held = frozenset(each for each in held if each.node not in members or _is_kept(s, each))
    s = s._replace(phase="join", generation=s.generation + 1, seats=seats, source=source, old=old, held=held)
    return _renumbered(s)


def _is_kept(s: State, copy: Snapshot) -> bool:
    """Whether its node keeps `copy` as ranks start again with the same plan: ranks read it, or the node still copies
    that rank."""
    homes, mirrors = (
        [node for key, rank, node in places if (key, rank) == copy[1:3]] for places in (s.homes, s.mirrors)
    )
    return copy.key != s.key or copy.node in (homes or mirrors) or copy.rank in s.orders[copy.node]


def _replaced(orders: tuple[tuple[int, ...], ...], node: int, by: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (*orders[:node], by, *orders[node + 1 :])


def _pairs(s: State) -> frozenset[tuple[int, int]]:
    """Which rank's snapshots which node mirrors: the next node of the ring, which begins with the leader."""
    ranks = sorted((node != s.lead, node, rank) for rank, node in enumerate(s.members))
    nodes = [*(node for _, node, _ in ranks[1:]), s.lead]
    return frozenset((rank, node) for (_, _, rank), node in zip(ranks, nodes, strict=True))


def _settled(s: State) -> State:
    if s.phase == "gather" and s.room >= NODES - (s.generation < 0):
        s = _begins(s, s.room)
    if s.phase == "wait" and s.room >= s.worlds[s.key]:
        s = _joins(s, s.worlds[s.key])
    if s.phase == "run" and s.room > len(s.seats):
        s = _resize(s, s.room)
    if s.phase == "run" and s.stepped and len(s.seats) == 1:
        s = s._replace(old=-1, gone=frozenset(), ring=((s.lead, s.lead),), safe=s.done)
    if s.phase == "run" and s.stepped and len(s.seats) > 1 and s.round is None and s.done > s.whole:
        s = s._replace(round=(s.done, _pairs(s)))
        for rank, node in _pairs(s):
            s = s._replace(orders=_replaced(s.orders, node, (*s.orders[node][-1:], rank)))
    return s


def _reduced(s: State) -> State:
    """Without what can have no effect any more: versions of other plans that are not complete, which nobody adds to,
    and a promise that is no more than the checkpoint."""
    current = -1 if s.phase in ("lost", "gather") else s.key
    if s.known or any(each.key != current for each in s.held):
        ranks: dict[tuple[int, ...], set[int]] = {}
        for each in s.held:
            ranks.setdefault((each.key, each.past, each.step), set()).add(each.rank)
        for each in s.known:
            ranks.setdefault((each.key, each.past, each.step), set()).add(each.rank)
        useful = {version for version, of in ranks.items() if version[0] == current or len(of) == s.worlds[version[0]]}
        held, known = (
            frozenset(each for each in copies if (each.key, each.past, each.step) in useful)
            for copies in (s.held, s.known)
        )
        s = s._replace(held=held, known=known)
    if (s.gone and s.safe <= s.disk) or any({*pair} <= s.gone for pair in s.ring):
        s = s._replace(ring=(), safe=0)
    return _renumbered(s) if s.phase in ("join", "run", "wait") else s


FIRST = _begins(State(slots=(0, 1, 2), open=frozenset(range(NODES))), NODES)
"""All nodes have come, and ranks load."""

_VERBS = {
    "begin": _begin,
    "step": _step,
    "mirror": _mirror,
    "crash": _crash,
    "kill": _kill,
    "hear": _hear,
    "come": _come,
    "start": _start,
    "lead": _lead,
    "expire": _expire,
}
