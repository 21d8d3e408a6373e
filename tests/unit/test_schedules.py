"""Pipeline orders: bubbles, micro-batches in flight, messages and deadlocks against the published formulas and torch's
own tables."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import InputError
from meshwright.planner.inputs.plans import parse_pins
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.schedules import schedule as schedule_module
from meshwright.spec.schedules.action import (
    Action,
    ActionKind,
    Receive,
    ScheduleTimeline,
    action_dependencies,
    check_orders,
    max_in_flight,
    parse_action,
    rank_programs,
    simulate_orders,
    stage_ranks,
)
from meshwright.spec.schedules.custom import parse_table, table_shape
from meshwright.spec.schedules.schedule import (
    find_schedule,
    offered_schedules,
    schedule_names,
    schedule_orders,
    stage_to_rank,
)


def actions(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


V_SHAPED = ("zbv", "dualpipev")
NAMED = tuple(rules.name for rules in offered_schedules())
shapes = st.tuples(st.sampled_from(NAMED), st.integers(1, 6), st.integers(2, 4), st.integers(1, 5)).map(
    lambda it: (
        it[0],
        it[1],
        it[2] if it[0] == "interleaved" else 2 if it[0] in V_SHAPED else 1,
        it[1] * (max(it[3], 2) if it[0] == "dualpipev" else it[3]),
    )
)


def test_every_schedule_of_a_plan_has_an_order() -> None:
    first = ["1f1b", "gpipe", "interleaved", "zbh1", "zbv", "dualpipev"]
    assert [name for name in schedule_names() if name in first] == first
    assert {*schedule_names()} - {*NAMED} == {"actions"}
    for name in NAMED:
        rules = find_schedule(name)
        assert rules.orders(2, rules.stages_per_rank, 4) == schedule_orders(name, 2, rules.stages_per_rank, 4)


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_every_order_is_complete_and_never_deadlocks(shape: tuple[str, int, int, int]) -> None:
    schedule, pp, virtual, micro_batches = shape
    table = schedule_orders(schedule, pp, virtual, micro_batches)
    check_orders(table, pp * virtual, micro_batches)
    place = (lambda stage: min(stage, 2 * pp - 1 - stage)) if schedule in V_SHAPED else (lambda stage: stage % pp)
    assert stage_ranks(table) == {stage: place(stage) for stage in range(pp * virtual)}


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_stage_gradients_are_summed_in_micro_batch_order_under_every_schedule(
    shape: tuple[str, int, int, int],
) -> None:
    schedule, pp, virtual, micro_batches = shape
    for order in schedule_orders(schedule, pp, virtual, micro_batches):
        for stage in {action.stage for action in order}:
            backwards = [
                action.micro_batch for action in order if action.kind is ActionKind.B and action.stage == stage
            ]
            assert backwards == list(range(micro_batches))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 16), (3, 5), (8, 8), (4, 2), (1, 3)])
def test_the_bubble_of_equal_stages_is_p_minus_1_over_m_plus_p_minus_1(schedule: str, p: int, m: int) -> None:
    played = simulate_orders(schedule_orders(schedule, p, 1, m), [1.0] * p, [2.0] * p)
    assert played.makespan == pytest.approx(3.0 * (m + p - 1))
    assert played.idle == pytest.approx([(p - 1) / (m + p - 1)] * p)
    assert played.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 16), (4, 3, 8), (3, 4, 3), (8, 2, 8)])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(p: int, v: int, m: int) -> None:
    played = simulate_orders(schedule_orders("interleaved", p, v, m), [1.0] * (p * v), [2.0] * (p * v))
    assert played.bubble == pytest.approx((p - 1) / (v * m + p - 1))


def thirds(schedule: str, p: int, m: int, f: float = 1.0, b: float = 1.0, w: float = 1.0) -> ScheduleTimeline:
    """Forward, gradient of the input, gradient of the weights of a rank's whole share."""
    virtual = 2 if schedule in V_SHAPED else 1
    forward, backward, weight = ([part / virtual] * (p * virtual) for part in (f, b, w))
    return simulate_orders(schedule_orders(schedule, p, virtual, m), forward, backward, 0.0, weight)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 64)])
@pytest.mark.parametrize(("schedule", "over"), [("zbh1", 1.0), ("zbv", 0.5), ("dualpipev", 0.5)])
def test_zero_bubble_schedules_idle_as_their_formulas_say_and_less_than_half_of_1f1b(
    schedule: str, over: float, p: int, m: int
) -> None:
    played = thirds(schedule, p, m)
    assert played.makespan == pytest.approx(3.0 * m + (p - 1) * over)
    assert played.idle == pytest.approx([(p - 1) * over / played.makespan] * p)
    assert played.bubble < 0.5 * (p - 1) / (m + p - 1)


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.2, 0.8), (1.0, 1.5, 0.5), (1.3, 1.4, 1.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
def test_zb_h1_idles_p_minus_1_times_f_plus_b_minus_w(p: int, m: int, f: float, b: float, w: float) -> None:
    assert thirds("zbh1", p, m, f, b, w).makespan == pytest.approx(m * (f + b + w) + (p - 1) * (f + b - w))


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.2, 0.8), (1.0, 0.9, 1.1), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize(("p", "m"), [(4, 32), (8, 64)])
def test_dualpipe_v_idles_as_published_within_three_points(p: int, m: int, f: float, b: float, w: float) -> None:
    """(p - 1) (F&B + B - 3 W) for the halves that a rank's two stages are, forward and backward one after the other."""
    published = (p - 1) * ((f + b + w) + (b + w) - 3 * w) / 2
    share = published / (m * (f + b + w) + published)
    assert share - 0.03 < thirds("dualpipev", p, m, f, b, w).bubble <= share


@given(st.integers(1, 8), st.integers(1, 24))
def test_zero_bubble_schedules_hold_no_more_than_the_first_rank_of_1f1b(p: int, m: int) -> None:
    assert [max_in_flight(order) for order in schedule_orders("zbh1", p, 1, m)] == [min(m, p)] * p
    assert all(held <= min(m, p) for held in map(max_in_flight, schedule_orders("zbv", p, 2, m)))
    if m > 2 * p:
        assert [max_in_flight(order) for order in schedule_orders("dualpipev", p, 2, m)] == [p + 0.5] * p


def test_zero_bubble_counts_in_flight_are_those_of_torchs_own_tables_at_p_4_and_m_16() -> None:
    """Counted from the tables of torch 2.13's ScheduleZBVZeroBubble and ScheduleDualPipeV until BACKWARD_WEIGHT frees
    them."""
    assert [max_in_flight(order) for order in schedule_orders("zbv", 4, 2, 16)] == [4, 4, 4, 4]
    assert [max_in_flight(order) for order in schedule_orders("dualpipev", 4, 2, 16)] == [4.5, 4.5, 4.5, 4.5]


@pytest.mark.parametrize(
    ("schedule", "virtual", "m", "words"),
    [
        ("zbh1", 2, 4, "zbh1 needs 1 stage per pipeline rank, the plan has 2"),
        ("zbv", 1, 4, "zbv needs 2 stages per pipeline rank, the plan has 1"),
        ("dualpipev", 2, 5, r"at least 2 \* pp\(4\) = 8 micro-batches, the batch gives 5; use schedule zbv"),
    ],
)
def test_what_a_zero_bubble_schedule_cannot_order_is_said(schedule: str, virtual: int, m: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        schedule_orders(schedule, 4, virtual, m)


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_holds_min_m_and_p_minus_r_micro_batches_and_gpipe_all(p: int, m: int) -> None:
    assert [max_in_flight(order) for order in schedule_orders("1f1b", p, 1, m)] == [
        min(m, p - rank) for rank in range(p)
    ]
    assert [max_in_flight(order) for order in schedule_orders("gpipe", p, 1, m)] == [m] * p


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 6))
def test_interleaved_holds_what_its_warm_up_counts(p: int, v: int, rounds: int) -> None:
    m = rounds * p
    expected = [min(m, (2 * (p - rank - 1) + (v - 1) * p + 1) / v) for rank in range(p)]
    assert [max_in_flight(order) for order in schedule_orders("interleaved", p, v, m)] == pytest.approx(expected)


def test_counts_in_flight_are_those_of_torchs_own_tables_at_p_4_and_m_16() -> None:
    """Counted from the tables of torch 2.13's ScheduleGPipe, Schedule1F1B and ScheduleInterleaved1F1B."""
    assert [max_in_flight(order) for order in schedule_orders("gpipe", 4, 1, 16)] == [16, 16, 16, 16]
    assert [max_in_flight(order) for order in schedule_orders("1f1b", 4, 1, 16)] == [4, 3, 2, 1]
    assert [max_in_flight(order) for order in schedule_orders("interleaved", 4, 2, 16)] == [5.5, 4.5, 3.5, 2.5]


def test_the_peak_weighs_each_stage_by_what_it_holds() -> None:
    first, last = schedule_orders("1f1b", 2, 1, 4)
    assert max_in_flight(first, sizes=[10.0, 3.0]) == 20.0
    assert max_in_flight(last, sizes=[10.0, 3.0]) == 3.0


def test_weights_gradients_free_the_micro_batch_where_they_are_separate() -> None:
    assert max_in_flight(actions("0F0 0F1 0B0 0F2 0B1 0B2 0W0 0W1 0W2")) == 3
    assert max_in_flight(actions("0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2")) == 2


@pytest.mark.parametrize("m", [6, 7, 3])
def test_interleaving_an_indivisible_count_is_one_error_that_names_the_nearest(m: int) -> None:
    with pytest.raises(InputError, match=r"multiples of pp\(4\)") as caught:
        schedule_orders("interleaved", 4, 2, m)
    assert "\n" not in str(caught.value)
    assert ("choices are 4," if m == 3 else "choices are 4 and 8,") in str(caught.value)


def test_a_misspelt_schedule_is_named_with_the_nearest() -> None:
    with pytest.raises(
        InputError,
        match=f"'1f1d' is not one of {', '.join(schedule_names())}; did you mean '1f1b'\\?",
    ):
        schedule_orders("1f1d", 2, 1, 2)


def test_virtual_stages_without_interleaving_are_refused() -> None:
    with pytest.raises(InputError, match="needs 1 stage per pipeline rank"):
        schedule_orders("gpipe", 2, 2, 2)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1"], "1B1 is missing"),
        (["0F0 0F0 0B0", "1F0 1B0"], "0F0 occurs 2 times"),
        (["0F0 1F0 0B0", "1B0"], "stage 1 is on pipeline ranks 0 and 1"),
        (["0F0 0B0", "1F0 1B0 2F0 2B0"], "2F0 is outside 2 stages"),
        (["0F0 0B0 0W0", "1F0 1B0 1F1 1B1"], "1F1 is outside"),
        (
            ["0B0 0F0", "1F0 1B0"],
            "0B0 on pipeline rank 0 can never run; it needs 0F0, which comes later on the same rank",
        ),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            "0B0 on pipeline rank 0 can never run; it needs 1B0, which pipeline rank 1 cannot reach: it waits at 1F1",
        ),
    ],
)
def test_a_wrong_order_is_named_by_its_first_action(table: list[str], words: str) -> None:
    micro_batches = 2 if any("F1" in line for line in table[:1]) else 1
    with pytest.raises(InputError) as caught:
        check_orders([actions(line) for line in table], stages=2, micro_batches=micro_batches)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


TORCHS = "0F0,,,0B0\n1F0,1I0,1W0,\n"


def test_a_table_as_torch_writes_it_and_the_same_as_json_are_one_order() -> None:
    rows = parse_table(TORCHS, "here")
    assert rows == ("0F0 0B0", "1F0 1B0 1W0") == parse_table('["0F0 0B0", ["1F0", "1B0", "1W0"]]', "here")
    assert table_shape(rows) == (2, 1)
    assert schedule_orders("actions", 2, 1, 1, rows) == [actions("0F0 0B0"), actions("1F0 1B0 1W0")]


@given(shapes)
@settings(max_examples=30, deadline=None)
def test_every_schedule_written_as_actions_is_itself(shape: tuple[str, int, int, int]) -> None:
    schedule, pp, virtual, micro_batches = shape
    table = schedule_orders(schedule, pp, virtual, micro_batches)
    rows = parse_table("\n".join(",".join(map(str, order)) for order in table), "here")
    assert schedule_orders("actions", pp, virtual, micro_batches, rows) == table
    assert pp == 1 or find_schedule("actions", rows).v_shape == (schedule in V_SHAPED)
    assert all(stage_to_rank(stage, pp, schedule in V_SHAPED) == rank for stage, rank in stage_ranks(table).items())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "0F0,0B0\n1F0,1X0",
            "pipeline rank 1: action '1X0' must be a stage, then F, B, I or W, then a micro-batch; example: '2F5'",
        ),
        ("", "here: no actions found; write a row for each pipeline rank"),
        ("[1]", "here: a schedule is a list of rows, one for each pipeline rank"),
        ('["0F0"', "here: line 1: Expecting ',' delimiter"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_line_with_the_place(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_table(text, "here")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0F0 0B0", "1F0"), "1B0 is missing on pipeline rank 1"),
        (("0F0 0B0 0F0", "1F0 1B0"), "0F0 occurs 2 times (pipeline rank 0, place 1 of 3)"),
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "0F1 is outside 2 stages and 1 micro-batches (pipeline rank 0, place 3 of 4)"),
        (
            ("1F0 1B0", "0F0 0B0"),
            "stage 0 is on pipeline rank 1; assign stages to ranks in a loop (this one to rank 0), or in a V",
        ),
        (
            ("0B0 0F0", "1F0 1B0"),
            "0B0 on pipeline rank 0 can never run; it needs 0F0, which comes later on the same rank",
        ),
    ],
)
def test_actions_that_are_wrong_are_named_with_their_place(rows: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError) as caught:
        schedule_orders("actions", 2, 1, 1, rows)
    assert words in str(caught.value)


def test_a_stage_separates_the_gradient_of_its_weights_for_all_micro_batches_or_none() -> None:
    check_orders([actions("0F0 0F1 0B0 0W0 0B1 0W1")], stages=1, micro_batches=2)
    with pytest.raises(InputError, match="0W1 is missing"):
        check_orders([actions("0F0 0F1 0B0 0W0 0B1")], stages=1, micro_batches=2)


def received(programs: Sequence[Sequence[Action | Receive]]) -> list[list[Receive]]:
    return [[each for each in program if isinstance(each, Receive)] for program in programs]


def test_receives_are_launched_one_action_ahead_where_the_sender_does_not_wait_for_it() -> None:
    programs = rank_programs(schedule_orders("1f1b", 2, 1, 3))
    assert [
        " ".join(f"<{each.action}" if isinstance(each, Receive) else str(each) for each in row) for row in programs
    ] == ["0F0 0F1 <1B0 0B0 <1B1 0F2 <1B2 0B1 0B2", "<0F0 1F0 <0F1 1B0 1F1 1B1 <0F2 1F2 1B2"]


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_each_boundary_between_ranks_carries_each_micro_batch_once_each_way(shape: tuple[str, int, int, int]) -> None:
    schedule, pp, virtual, micro_batches = shape
    table = schedule_orders(schedule, pp, virtual, micro_batches)
    sent = [each.action for line in received(rank_programs(table)) for each in line]
    boundaries = 0 if pp == 1 else 2 * pp - 2 if schedule in V_SHAPED else pp * virtual - 1
    assert len(sent) == len(set(sent)) == 2 * boundaries * micro_batches


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_the_programs_of_all_ranks_are_parts_of_one_order_of_actions_and_messages(
    shape: tuple[str, int, int, int],
) -> None:
    schedule, pp, virtual, micro_batches = shape
    table = schedule_orders(schedule, pp, virtual, micro_batches)
    programs = [list(program) for program in rank_programs(table)]
    assert [[each for each in program if isinstance(each, Action)] for program in programs] == [*map(list, table)]
    receiver = {each: rank for rank, program in enumerate(programs) for each in program if isinstance(each, Receive)}
    done: set[Action] = set()

    def may_run(rank: int) -> bool:
        """Whether a rank's next item is an action whose inputs are present, and whose receiver waits for nothing
        else."""
        action = programs[rank][0] if programs[rank] else None
        if not isinstance(action, Action) or not done.issuperset(action_dependencies(action, pp * virtual)):
            return False
        message = Receive(rank, action)
        return message not in receiver or programs[receiver[message]][0] == message

    while any(programs):
        rank = next(filter(may_run, range(pp)))
        action = programs[rank].pop(0)
        assert isinstance(action, Action)
        done.add(action)
        if (message := Receive(rank, action)) in receiver:
            programs[receiver[message]].pop(0)


def test_interleaving_on_two_ranks_sends_activations_and_gradients_on_one_channel() -> None:
    line = received(rank_programs(schedule_orders("interleaved", 2, 2, 2)))[0]
    assert {each.action.kind for each in line} == {ActionKind.F, ActionKind.B}
    assert " ".join(str(each.action) for each in line) == "1F0 1F1 3B0 3B1 1B0 1B1"


def test_a_transfer_delays_the_receiver_and_not_the_sender() -> None:
    played = simulate_orders(schedule_orders("gpipe", 2, 1, 1), [1.0, 1.0], [2.0, 2.0], transfer=0.5)
    assert [[(str(span.action), span.start, span.end) for span in line] for line in played.spans] == [
        [("0F0", 0.0, 1.0), ("0B0", 5.0, 7.0)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5)],
    ]
    assert played.makespan == 7.0


def test_the_slowest_stage_paces_the_pipeline() -> None:
    even = simulate_orders(schedule_orders("1f1b", 4, 1, 16), [1.0] * 4, [2.0] * 4)
    uneven = simulate_orders(schedule_orders("1f1b", 4, 1, 16), [1.0, 1.5, 1.0, 1.0], [2.0, 3.0, 2.0, 2.0])
    assert uneven.makespan > even.makespan
    assert uneven.idle[1] == min(uneven.idle)


def test_a_table_of_four_thousand_actions_keeps_the_formula_of_the_bubble() -> None:
    table = schedule_orders("1f1b", 16, 1, 128)
    assert sum(len(order) for order in table) == 2 * 16 * 128
    assert simulate_orders(table, [1.0] * 16, [2.0] * 16).bubble == pytest.approx(15 / 143)


def test_a_schedule_file_pins_schedule_and_stages_and_a_wrong_one_is_one_line(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.csv", tmp_path / "wrong.csv"
    right.write_text("\n".join(",".join(map(str, order)) for order in schedule_orders("zbv", 2, 2, 4)))
    wrong.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0")
    pins = parse_pins(f"schedule={right}")
    assert (pins["schedule"], pins["pp"], pins["virtual_stages"]) == ("actions", 2, 2)
    plan = Plan(**pins)
    assert plan.name.startswith("pp2.csv-")
    assert [plan.stage_to_rank(stage) for stage in range(4)] == [0, 1, 1, 0]
    with pytest.raises(InputError, match=r"wrong.csv: pipeline action 1B1 is missing on pipeline rank 1"):
        parse_pins(f"schedule={wrong}")
    with pytest.raises(InputError, match="the actions of 'csv-1a2b3c4d' are in a plan file"):
        parse_plan("pp2.csv-1a2b3c4d")


TOY = '''
from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.schedule import InFlight, Schedule, elementwise_min


class Pairs(Schedule):
    """One forward and one backward at a time: a pipeline without overlap, which takes micro-batches in pairs."""

    name = "pairs"
    preference = 9

    def multiple_of(self, pp):
        return 2

    def order(self, rank, pp, virtual_stages, micro_batches):
        kinds = (ActionKind.F, ActionKind.B)
        return [Action(kind, rank, micro_batch) for micro_batch in range(micro_batches) for kind in kinds]

    def bubble(self, f, b, w, virtual_stages):
        return 4.0 * (f + b + w)

    def in_flight(self, rank, pp, virtual_stages, micro_batches):
        return [InFlight(0, (elementwise_min(micro_batches, 1),))]
'''

USE_TOY = """
import sys
import meshwright.spec.schedules as schedules
schedules.__path__.append(sys.argv[1])
import meshwright as mw
from meshwright.planner.cost.rank_contents import peak_moments
from meshwright.spec.constraints import batch_violations
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.schedules.action import check_orders
from meshwright.spec.schedules.schedule import offered_schedules
from meshwright.cli.main import main

plan = parse_plan("pp2.pairs")
assert plan == Plan(pp=2, schedule="pairs") and plan.name == "pp2.pairs"
check_orders(plan.schedule_rules.orders(2, 1, 4), stages=2, micro_batches=4)
assert [violation.message for violation in batch_violations(plan, 3)] == [
    "pairs: 3 micro-batches are not a multiple of 2; use a batch of 2 sequences or a multiple of it"
]
assert "pairs" in [rules.name for rules in offered_schedules()]
sys.exit(main(["plan", "--cluster", "1x4:cpu", "--pin", "pp=2,schedule=pairs", "--json"]))
"""


def test_a_new_schedule_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "pairs.py").write_text(TOY)
    done = subprocess.run([sys.executable, "-c", USE_TOY, str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pairs" in json.loads(done.stdout)["chosen"]["name"].split(".")


def test_no_file_outside_the_schedules_compares_with_the_name_of_one() -> None:
    source = Path(schedule_module.__file__).parents[2]
    wrong = []
    for path in sorted(source.rglob("*.py")):
        if path.parent == source / "spec" / "schedules":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and "schedule" in ast.unparse(node):
                named = {item.value for item in ast.walk(node) if isinstance(item, ast.Constant)} & set(
                    schedule_names()
                )
                wrong += [f"{path.relative_to(source)}:{node.lineno} {name}" for name in sorted(named)]
    assert wrong == []
