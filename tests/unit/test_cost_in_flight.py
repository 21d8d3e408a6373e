"""What is in flight, and what messages cost, equal the schedules that run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.cost.pipeline import (
    PassSplit,
    bubble_seconds,
    critical_path_messages,
    interleaving_imbalance,
    slowest_rank_and_bubble,
)
from meshwright.planner.cost.plan_grid import ScheduleChoice
from meshwright.planner.cost.rank_contents import RankClass, peak_moments
from meshwright.planner.search.choices import even_split
from meshwright.spec.schedules.action import max_in_flight, simulate_orders
from meshwright.spec.schedules.schedule import schedule_orders, stage_to_rank

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    *(("interleaved", turns) for turns in (2, 3, 5)),
]
APART = [("zbh1", 1), ("zbv", 2), ("dualpipev", 2)]


def fullest(schedule: str, turns: int, pp: int, rank: int, count: int, held: list[int]) -> float:
    """Layers kept at the fullest moment, when virtual stage k of the rank has `held[k]` equal layers."""
    order = ScheduleChoice(schedule, turns, (1,) * (pp * turns))
    kind = RankClass(rank, 1, np.array(held)[:, None], ())
    _, kept, late = peak_moments(order, pp, kind, np.array([count]))
    layers = kept + late
    return float(layers[0, :, 0].max())


@pytest.mark.parametrize(("schedule", "turns"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
@pytest.mark.covering(30)
def test_in_flight_is_what_the_order_holds(schedule: str, turns: int, pp: int, rounds: int) -> None:
    count = rounds * pp
    for rank, order in enumerate(schedule_orders(schedule, pp, turns, count)):
        assert fullest(schedule, turns, pp, rank, count, [1] * turns) == max_in_flight(order) * turns


@pytest.mark.parametrize(("schedule", "turns"), APART)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 17])
@pytest.mark.parametrize("held", [[1, 1], [3, 2], [2, 3]])
@pytest.mark.covering(60)
def test_where_w_is_apart_what_is_kept_until_w_is_what_the_order_holds(
    schedule: str, turns: int, pp: int, count: int, held: list[int]
) -> None:
    if schedule == "dualpipev" and count < 2 * pp:
        return
    for rank, order in enumerate(schedule_orders(schedule, pp, turns, count)):
        stages = sorted({action.stage for action in order})
        exact = max_in_flight(order, dict(zip(stages, held, strict=False)))
        assert fullest(schedule, turns, pp, rank, count, held[:turns]) == exact
        rows = tuple(" ".join(map(str, row)) for row in schedule_orders(schedule, pp, turns, count))
        listed = ScheduleChoice("actions", turns, (1,) * (pp * turns), True, rows)
        _, layers, _ = peak_moments(
            listed, pp, RankClass(rank, 1, np.array(held[:turns])[:, None], ()), np.array([count])
        )
        assert layers.max() <= exact <= layers.max() + max(held)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(2, 5), st.integers(1, 4), st.integers(0, 4), st.data())
def test_uneven_stages_of_interleaving_are_counted_as_they_run(
    pp: int, turns: int, rounds: int, larger: int, data
) -> None:
    held = [3 if turn < larger else 2 for turn in range(turns)]
    rank = data.draw(st.integers(0, pp - 1))
    order = schedule_orders("interleaved", pp, turns, rounds * pp)[rank]
    exact = max_in_flight(order, {turn * pp + rank: size for turn, size in enumerate(held)})
    assert fullest("interleaved", turns, pp, rank, rounds * pp, held) == exact


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 16, 24])
def test_messages_of_plain_schedules_cost_what_playing_them_costs(pp: int, count: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        table = schedule_orders(schedule, pp, 1, count)
        extra = (
            simulate_orders(table, [1.0] * pp, [2.0] * pp, transfer=0.01).makespan
            - simulate_orders(table, [1.0] * pp, [2.0] * pp).makespan
        )
        assert critical_path_messages(ScheduleChoice(schedule, 1, (1,) * pp), pp, np.array([count]))[
            0
        ] == pytest.approx(extra / 0.01)


@pytest.mark.parametrize(("pp", "turns", "rounds"), [(2, 2, 1), (4, 2, 4), (4, 4, 3), (8, 3, 2)])
def test_messages_of_interleaving_cost_what_playing_it_costs(pp: int, turns: int, rounds: int) -> None:
    stages, count = pp * turns, rounds * pp
    table = schedule_orders("interleaved", pp, turns, count)
    extra = (
        simulate_orders(table, [1.0] * stages, [2.0] * stages, transfer=0.1).makespan
        - simulate_orders(table, [1.0] * stages, [2.0] * stages).makespan
    )
    assert critical_path_messages(ScheduleChoice("interleaved", turns, (1,) * stages), pp, np.array([count]))[
        0
    ] == pytest.approx(extra / 0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 12))
def test_the_bubble_of_uneven_stages_is_that_of_simulated_gpipe(seconds: list[int], count: int) -> None:
    times = np.array(seconds, dtype=float)
    longest, waiting = slowest_rank_and_bubble(times, np.ones(len(times)), np.array(1))
    gpipe, plain = (
        simulate_orders(
            schedule_orders(name, len(times), 1, count), (times / 3).tolist(), (times * 2 / 3).tolist()
        ).makespan
        for name in ("gpipe", "1f1b")
    )
    assert count * longest + waiting == pytest.approx(gpipe)
    assert plain <= gpipe * (1 + 1e-12)


@pytest.mark.parametrize(("pp", "count"), [(4, 16), (8, 8), (2, 1)])
def test_the_bubble_of_1f1b_is_p_minus_1_of_m_plus_p_minus_1(pp: int, count: int) -> None:
    longest, waiting = slowest_rank_and_bubble(np.ones(pp), np.ones(pp), np.array(1))
    assert waiting / (count * longest + waiting) == pytest.approx((pp - 1) / (count + pp - 1))


@pytest.mark.parametrize(("pp", "turns", "rounds"), [(4, 2, 4), (8, 3, 2), (2, 4, 5)])
def test_the_bubble_of_interleaving_is_a_turn_th_of_it(pp: int, turns: int, rounds: int) -> None:
    longest, waiting = slowest_rank_and_bubble(np.ones(pp), np.ones(pp), np.array(turns))
    played = simulate_orders(
        schedule_orders("interleaved", pp, turns, rounds * pp),
        [1 / 3 / turns] * (pp * turns),
        [2 / 3 / turns] * (pp * turns),
    )
    assert rounds * pp * longest + waiting == pytest.approx(played.makespan)


def played(schedule: str, count: int, seconds: list[tuple[float, float, float]]) -> float:
    """Makespan of stages that take (forward, gradient of input, gradient of weights)."""
    turns = dict(APART)[schedule]
    forward, backward, weights = zip(*seconds, strict=True)
    return simulate_orders(
        schedule_orders(schedule, len(seconds) // turns, turns, count), forward, backward, 0.0, weights
    ).makespan


def expected(schedule: str, count: int, seconds: list[tuple[float, float, float]]) -> float:
    turns = dict(APART)[schedule]
    pp = len(seconds) // turns
    place = [stage_to_rank(stage, pp, turns == 2) for stage in range(len(seconds))]
    ranks = np.array(
        [
            [sum(part[at] for part, where in zip(seconds, place, strict=True) if where == rank) for rank in range(pp)]
            for at in range(3)
        ]
    )
    order = ScheduleChoice(schedule, turns, (1,) * len(seconds))
    return float(
        count * ranks.sum(axis=0).max()
        + bubble_seconds([order], PassSplit(*ranks[:, :, None]), np.ones((pp, 1))).item()
    )


@pytest.mark.parametrize("schedule", [schedule for schedule, _ in APART])
@pytest.mark.parametrize(("pp", "count"), [(2, 8), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize("one", [(1, 1, 1), (1, 1.2, 0.8), (1, 2, 1), (1, 1.6, 0.95), (1, 1, 0.3), (1, 3, 1)])
@pytest.mark.covering(30)
def test_the_bubble_of_equal_stages_whose_w_is_apart_is_that_of_playing_them(
    schedule: str, pp: int, count: int, one: tuple[float, float, float]
) -> None:
    stages = [one] * (pp * dict(APART)[schedule])
    assert expected(schedule, count, stages) == pytest.approx(played(schedule, count, stages))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(APART),
    st.integers(2, 6),
    st.integers(2, 5),
    st.floats(1.0, 1.6),
    st.floats(0.6, 1.0),
    st.floats(0.0, 3.0),
    st.data(),
)
def test_unequal_stages_whose_w_is_apart_cost_what_playing_them_costs(which, pp, rounds, b, w, head, data) -> None:
    schedule, turns = which
    sizes = data.draw(st.lists(st.integers(3, 4), min_size=pp * turns, max_size=pp * turns))
    stages = [(1.0 * size, b * size, w * size) for size in sizes]
    stages[-1] = (stages[-1][0] + head, stages[-1][1] + 2 * head, stages[-1][2])
    assert expected(schedule, rounds * pp, stages) == pytest.approx(played(schedule, rounds * pp, stages), rel=0.1)


@pytest.mark.parametrize(("schedule", "turns"), APART)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [2, 3, 8, 16, 24])
@pytest.mark.covering(20)
def test_messages_where_w_is_apart_cost_no_more_than_is_counted(schedule: str, turns: int, pp: int, count: int) -> None:
    if schedule == "dualpipev" and count < 2 * pp:
        return
    table, thirds = schedule_orders(schedule, pp, turns, count), [1.0 / turns] * (pp * turns)
    extra = (
        simulate_orders(table, thirds, thirds, 0.001, thirds).makespan
        - simulate_orders(table, thirds, thirds, 0.0, thirds).makespan
    )
    counted = critical_path_messages(ScheduleChoice(schedule, turns, (1,) * (pp * turns)), pp, np.array([count]))[0]
    assert extra / 0.001 <= counted + 1e-6
    assert schedule != "zbh1" or counted == pytest.approx(extra / 0.001)


@pytest.mark.parametrize(
    ("blocks", "pp", "turns", "rounds"),
    [(96, 8, 11, 3), (80, 4, 14, 6), (32, 4, 5, 5), (60, 6, 9, 4), (40, 2, 11, 5), (61, 4, 3, 4)],
)
def test_uneven_interleaved_stages_cost_what_playing_them_costs(blocks: int, pp: int, turns: int, rounds: int) -> None:
    count, stages = rounds * pp, pp * turns
    split = even_split(blocks, stages)
    order = ScheduleChoice("interleaved", turns, split)
    played = simulate_orders(
        schedule_orders("interleaved", pp, turns, count), [1.0 * size for size in split], [2.0 * size for size in split]
    ).makespan
    ranks = np.array([3.0 * sum(split[rank::pp]) for rank in range(pp)])
    longest, waiting = slowest_rank_and_bubble(ranks, np.ones(pp), np.array(turns))
    slack = longest - ranks.mean()
    assert count * longest + waiting + count * max(
        interleaving_imbalance(order, pp) * 2.0 - slack, 0.0
    ) == pytest.approx(played, rel=0.04)
