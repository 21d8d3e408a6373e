"""The control plane against its model: every interleaving of three nodes with a fault, in the soak with two, and the
real leader and nodes on paths through all of them."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from protocol_cluster import REJOIN, Protocol, expected
from protocol_model import FAULTS, FIRST, NODES, STEPS, Action, State, actions, after

Graph = dict[State, dict[Action, State]]
FAULT_VERBS = ("crash", "kill")
PARTS = 2
"""The soak performs every transition in this number of tests, which may run side by side."""


@pytest.fixture(
    scope="module", params=[1, pytest.param(FAULTS, marks=pytest.mark.soak)], ids="{} faults at most".format
)
def graph(request: pytest.FixtureRequest) -> Graph:
    """Returns all states that are reachable with at most this number of faults, in breadth-first order, with the
    successors of each."""
    found: Graph = {}
    waiting = deque([FIRST])
    while waiting:
        state = waiting.popleft()
        if state not in found:
            following = (each for each in actions(state) if each[0] not in FAULT_VERBS or state.faults < request.param)
            found[state] = {action: after(state, action) for action in following}
            waiting.extend(found[state].values())
    return found


def edges(graph: Graph) -> Iterator[tuple[State, Action, State]]:
    return ((state, action, later) for state, following in graph.items() for action, later in following.items())


def test_from_every_state_ranks_can_train_to_the_end(graph: Graph) -> None:
    before: dict[State, list[State]] = {}
    for state, _, later in edges(graph):
        before.setdefault(later, []).append(state)
    ends = [state for state in graph if state.phase == "run" and state.done == STEPS]
    reached, waiting = set(ends), deque(ends)
    while waiting:
        for state in before.get(waiting.popleft(), ()):
            if state not in reached:
                reached.add(state)
                waiting.append(state)
    assert len(reached) == len(graph)


def test_generations_only_rise_and_one_leader_starts_each_of_them(graph: Graph) -> None:
    for state, _, later in edges(graph):
        if later.term != state.term:
            assert later.term == state.term + 1 and state.phase == "lost", "nobody follows a leader that lives"
        elif later.phase != "lost":
            assert later.generation >= state.generation
        if (later.term, later.generation) == (state.term, state.generation) and {state.phase, later.phase} <= {
            "join",
            "run",
        }:
            assert later.seats == state.seats, "each generation is started once"


def test_no_step_is_counted_by_ranks_that_are_not_all_of_the_generation_of_now(graph: Graph) -> None:
    for state, action, later in edges(graph):
        if action[0] == "step":
            assert state.phase == "run" and state.is_intact and not {*state.members} & state.dead
        else:
            assert later.done <= state.done or action[0] == "begin"


def test_ranks_resume_from_a_complete_step_and_lose_no_more_than_documented(graph: Graph) -> None:
    """With a rank nothing is lost; with a node, also the leader, the steps since a step was last whole on two nodes;
    with a node and the one that mirrors it those since the checkpoint."""
    for state, action, later in edges(graph):
        if action[0] == "begin":
            assert later.done in (state.common(state.source), state.disk)
            assert later.done >= state.promised


def kind_of(state: State, action: Action, later: State) -> tuple[Any, ...]:
    """What tells transitions apart that the control plane treats alike: who it happens to and when, but not with which
    numbers."""
    verb, which = action
    who = which == state.lead, which in state.orphans
    when = state.phase, min(state.term, 1), len(state.unheard), len(state.open), len(state.seats), state.old >= 0
    source = verb == "begin" and (later.done - state.done, state.source == state.key)
    return verb, who, when, state.whole > 0, state.round is not None, source, later.phase


def paths(graph: Graph, kinds: bool) -> Iterator[list[Action]]:
    """Paths that together have every transition, or one of every kind: the shortest way to one that is left, then on
    through others as long as there are any."""
    way: dict[State, tuple[State, Action] | None] = {FIRST: None}
    for state, action, later in edges(graph):
        way.setdefault(later, (state, action))
    done: set[Any] = set()

    def named(state: State, action: Action, later: State) -> Any:
        return kind_of(state, action, later) if kinds else (state, action)

    for state, action, later in edges(graph):
        if named(state, action, later) in done:
            continue
        path, at = [action], state
        while (before := way[at]) is not None:
            at = before[0]
            path.append(before[1])
        path.reverse()
        at = FIRST
        for each in path:
            done.add(named(at, each, graph[at][each]))
            at = graph[at][each]
        while left := [each for each in graph[at].items() if named(at, *each) not in done]:
            done.add(named(at, *left[0]))
            path.append(left[0][0])
            at = left[0][1]
        yield path


def follow(path: list[Action], folder: Path) -> None:
    """The real leader and nodes do after each action of `path` what the model says."""
    states = [FIRST]
    for action in path:
        states.append(after(states[-1], action))
    at = iter(enumerate(states))

    def check(seen: dict[str, Any]) -> None:
        number, state = next(at)
        assert seen == expected(state), f"after {path[:number]}: {state}"

    folder.mkdir()
    Protocol(folder, NODES, 1).follow(path, check)
    assert next(at, None) is None


ROUND = ["mirror 0", "mirror 1", "mirror 2"]
MIRRORED = ["begin", "step", *ROUND]
FOUND = {
    "a rank dies before one on a node that came back has a snapshot": (
        [*MIRRORED, "step", *ROUND, "crash 2", "hear 2", "come 2", "begin", "kill 1", "begin"],
        2,
    ),
    "a node is lost before the ranks of another plan have mirrors": (
        [
            *MIRRORED,
            "crash 2",
            "hear 2",
            "expire",
            "begin",
            "step",
            *ROUND[:2],
            "come 2",
            "begin",
            "step",
            "crash 1",
            "hear 1",
            "come 1",
            "begin",
        ],
        2,
    ),
    "a node comes back before the ranks of a smaller plan have mirrors": (
        [*MIRRORED, "crash 2", "hear 2", "expire", "begin", "step", "come 2", "begin"],
        2,
    ),
    "a rank dies before those of a new leader have joined": (
        ["begin", "step", "crash 0", "lead 1", "come 0", "kill 0", "begin"],
        1,
    ),
    "no step is ordered of mirrors that ranks have not made again": (
        ["begin", "step", "crash 1", "hear 1", "expire", "begin", "step", "kill 0", "begin", "step", *ROUND[::2]],
        3,
    ),
    "ranks of a plan with lost snapshots resume from the plan before and are too few again": (
        [
            *("begin", "step", "crash 0", "start 0", "lead 1", "expire", "begin", "step", "come 2", "begin", "step"),
            *("crash 2", "hear 1", "come 0", "come 2", "begin", "begin"),
        ],
        2,
    ),
    "the leader is lost": ([*MIRRORED, "step", *ROUND, "crash 0", "lead 1", "come 2", "begin"], 2),
    "the leader is lost and leads again": (
        [*MIRRORED, "step", *ROUND, "crash 0", "start 0", "lead 0", "come 1", "come 2", "begin"],
        2,
    ),
    "the leader is lost in the middle of a round": (
        [*MIRRORED, "step", *ROUND, "step", "mirror 0", "mirror 1", "crash 0", "lead 1", "come 2", "begin"],
        3,
    ),
    "two leaders are lost one after the other": (
        [
            *(*MIRRORED, "step", *ROUND, "crash 0", "lead 1", "come 2", "begin", "step", *ROUND[1:]),
            *("crash 1", "lead 2", "expire", "begin"),
        ],
        3,
    ),
    "the leader is lost and a node does not come to the next one": (
        [*MIRRORED, "step", *ROUND, "crash 0", "lead 1", "expire", "begin"],
        1,
    ),
    "the leader is lost with the node that mirrors it": (
        [*MIRRORED, "step", *ROUND, "crash 0", "crash 1", "lead 2", "expire", "begin"],
        1,
    ),
}
"""Faults that this test found: what happened, and the step that is done then."""


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start again at once, leaders wait a short time for nodes, disks answer at once, and
    nobody requests another number of ranks."""
    monkeypatch.setattr("meshwright.cli.leader_role.JOIN_SECONDS", REJOIN)
    monkeypatch.setattr("meshwright.elastic.restart_policy.RETRY_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("meshwright.core.background_thread.BackgroundCall.call", lambda _, work, end=None: work())
    monkeypatch.setattr("meshwright.elastic.replan.RankCountRequest.__call__", lambda *_: None)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("found", FOUND)
def test_what_was_lost_once_is_not_lost_again(found: str, tmp_path: Path) -> None:
    words, done = FOUND[found]
    path = [(verb, int(which or -1)) for verb, _, which in (word.partition(" ") for word in words)]
    state = FIRST
    for action in path:
        assert action in actions(state), action
        state = after(state, action)
    assert state.phase == "run" and state.done == done
    follow(path, tmp_path / "run")


@pytest.mark.usefixtures("short_waits")
def test_the_real_leader_and_nodes_do_what_the_model_does(graph: Graph, tmp_path: Path) -> None:
    """One transition of every kind."""
    for number, path in enumerate(paths(graph, kinds=True)):
        follow(path, tmp_path / str(number))


@pytest.mark.soak
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("part", range(PARTS))
def test_the_real_leader_and_nodes_do_what_the_model_does_in_every_transition(
    graph: Graph, part: int, tmp_path: Path
) -> None:
    """With two faults 168,000 paths with 2.9 million actions, which take half an hour of CPU time."""
    for number, path in islice(enumerate(paths(graph, kinds=False)), part, None, PARTS):
        follow(path, tmp_path / str(number))
        shutil.rmtree(tmp_path / str(number))
