"""A model of the control plane as a small state machine: three nodes of one rank each, whoever leads them, their
generations and snapshots.

It says what is to happen, not how: after a fault, ranks go on from the newest step of which every rank has a snapshot
on a node that lives, or from the
checkpoint on disk. `test_protocol.py` visits all its states, checks in each of them what docs/en/launch.md promises,
and performs its transitions on the
real leader and nodes (`protocol_cluster.py`). An action is a verb and a node:

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

from collections.abc import Iterator
from typing import NamedTuple

NODES, FAULTS, STEPS, SAVED = 3, 2, 3, 1
"""Nodes; faults and steps at most; the one step after which a checkpoint is written to disk."""

Action = tuple[str, int]


class Snapshot(NamedTuple):
    node: int
    key: int
    rank: int
    step: int


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
    stepped: bool = False
    """Whether this generation has ended a step."""
    whole: int = 0
    """The step of which each rank but that of the leader has a mirror, by the leader's knowledge."""
    heals: bool = False
    """Whether a fault is healed: not before this leader, or the one before it, had ranks that trained."""
    homes: frozenset[tuple[int, int, int]] = frozenset()
    """Key, rank and node of the snapshots that ranks have made themselves."""
    mirrors: frozenset[tuple[int, int, int]] = frozenset()
    """Key, rank and node of each mirror of the last whole round."""
    round: tuple[int, frozenset[tuple[int, int]]] | None = None
    """The step that is being mirrored; which rank's snapshots which node is still to copy."""
    faults: int = 0
    gone: frozenset[int] = frozenset()
    """What the documentation promises, apart from how it is done: nodes lost since a step was last whole on two nodes;
    which node mirrored which; the step."""
    ring: tuple[tuple[int, int], ...] = ()
    safe: int = 0

    @property
    def promised(self) -> int:
        """The step from which ranks go on at least. With a rank no step is lost; with a node those since the last whole
        round of mirrors; with the
        leader, or a node and the one that mirrors it, those since the checkpoint."""
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
        """The newest step of which every rank has a snapshot where it ran or in a mirror of a whole round."""
        if key < 0:
            return 0
        steps = [set[int]() for _ in range(self.worlds[key])]
        for node, k, rank, step in self.held:
            if k == key and (key, rank, node) in self.homes | self.mirrors:
                steps[rank].add(step)
        return max(set.intersection(*steps), default=0) if steps else 0


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
    return _settled(_VERBS[verb](state, which))


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
    held = s.held | {Snapshot(node, key, rank, done) for key, rank, node in homes}
    homes |= {each for each in s.homes if each[0] != s.key}
    disk = SAVED if done >= SAVED else s.disk
    return s._replace(done=done, most=done, disk=disk, held=held, homes=frozenset(homes), stepped=True)


def _mirror(s: State, node: int) -> State:
    assert s.round is not None
    step, pending = s.round
    rank = next(rank for rank, at in pending if at == node)
    fresh = Snapshot(node, s.key, rank, step)
    mirrored = sorted(each for each in s.held if each[:3] == fresh[:3] and each.step != step)
    over = (
        [each for each in mirrored if each.step != s.whole][:1] if len(mirrored) >= 2 and fresh not in s.held else []
    )  # a mirror has room for two steps
    held = (s.held - {*over}) | {fresh}
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
    s = s._replace(dead=s.dead | {node}, orphans=s.orphans - {node}, faults=s.faults + 1)
    if s.phase == "lost":
        return s
    if node == s.lead:
        left = {s.slots[slot] for slot in s.open - s.unheard} - {node}
        lost = State(
            phase="lost", lead=-1, term=s.term, slots=(), open=frozenset(), dead=s.dead, orphans=s.orphans | left
        )
        return lost._replace(most=s.most, disk=s.disk, heals=True, faults=s.faults, gone=frozenset({node}))
    slots = {slot for slot in s.open - s.unheard if s.slots[slot] == node}
    held = frozenset(each for each in s.held if each.node != node)
    gone = s.gone | {node} if slots & {*s.seats} or any(node in pair for pair in s.ring) else s.gone
    return s._replace(unheard=s.unheard | slots, held=held, gone=gone)


def _kill(s: State, node: int) -> State:
    return _again(s._replace(faults=s.faults + 1))


def _hear(s: State, slot: int) -> State:
    homes, mirrors = (frozenset(each for each in known if each[2] != s.slots[slot]) for known in (s.homes, s.mirrors))
    s = s._replace(open=s.open - {slot}, unheard=s.unheard - {slot}, homes=homes, mirrors=mirrors, round=None)
    return _again(s) if slot in s.seats and s.phase in ("run", "join") else s


def _again(s: State) -> State:
    """Ranks end; they start again as soon as there is room for all of them."""
    return s._replace(phase="wait", round=None, stepped=False)


def _come(s: State, node: int) -> State:
    slot = next((slot for slot, at in enumerate(s.slots) if at == node and slot not in s.open), len(s.slots))
    slots = s.slots if slot < len(s.slots) else (*s.slots, node)
    heals = s.heals or (s.phase == "gather" and node in s.orphans)
    return s._replace(slots=slots, open=s.open | {slot}, heals=heals, dead=s.dead - {node}, orphans=s.orphans - {node})


def _start(s: State, node: int) -> State:
    return s._replace(dead=s.dead - {node})


def _lead(s: State, node: int) -> State:
    fresh = State(
        term=s.term + 1, lead=node, slots=(node,), dead=s.dead, orphans=s.orphans - {node}, most=s.most, disk=s.disk
    )
    return fresh._replace(
        faults=s.faults, gone=s.gone, heals=node in s.orphans, generation=-1 if node in s.orphans else 0
    )


def _expire(s: State, _: int) -> State:
    return _begins(s, s.room) if s.phase == "gather" else _resize(s, s.room)


def _begins(s: State, world: int) -> State:
    """The first generation of a leader."""
    return s._replace(phase="join", generation=0, seats=tuple(sorted(s.open)[:world]), worlds=(world,))


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
    held = frozenset(each for each in s.held if each.key in (s.key, source))
    seats = tuple(sorted(s.open)[:world])
    return s._replace(phase="join", generation=s.generation + 1, seats=seats, source=source, old=old, held=held)


def _pairs(s: State) -> frozenset[tuple[int, int]]:
    """Which rank's snapshots which node mirrors: the next node by number, or the leader."""
    ranks = sorted((node, rank) for rank, node in enumerate(s.members) if node != s.lead)
    nodes = [*(node for node, _ in ranks[1:]), s.lead]
    return frozenset((rank, node) for (_, rank), node in zip(ranks, nodes, strict=True))


def _settled(s: State) -> State:
    if s.phase == "gather" and s.room >= NODES - (s.generation < 0):
        s = _begins(s, s.room)
    if s.phase == "wait" and s.room >= s.worlds[s.key]:
        s = _joins(s, s.worlds[s.key])
    if s.phase == "run" and s.room > len(s.seats):
        s = _resize(s, s.room)
    if s.phase == "run" and s.stepped and len(s.seats) == 1:
        s = s._replace(old=-1, gone=frozenset(), ring=(), safe=s.done)
    if s.phase == "run" and s.stepped and len(s.seats) > 1 and s.round is None and s.done > s.whole:
        s = s._replace(round=(s.done, _pairs(s)))
    return s


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
