"""One step, played: held against the independent timing of schedules, the estimate, the play of every rank, and what
links and slow ranks must do."""

from __future__ import annotations

import gc
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jobs import cluster, decoder, named_job, quickest, small_job

import meshwright as mw
from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.simulate import step
from meshwright.planner.simulate.events import LinkPort, LinkTransfer, SimClock, SimTask
from meshwright.planner.simulate.fleet import RecoveryPolicy
from meshwright.planner.simulate.op_times import EndOfStepTimes, OpTimes, PassSegment, StageOpTimes, compute_op_times
from meshwright.planner.simulate.run import SimulationResult, count_surviving_replicas, simulate
from meshwright.planner.simulate.symmetry import ReplicaClass, coords_of_rank, rank_at_coords, replica_classes
from meshwright.report.simulation import simulation_data, simulation_text
from meshwright.report.trace import chrome_trace
from meshwright.spec.faults import Faults, KilledRank, SlowLink, SlowRank, parse_faults
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.schedules.action import simulate_orders
from meshwright.spec.schedules.schedule import schedule_orders


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    """As the command line plays: without the cyclic garbage collector."""
    gc.disable()
    yield
    gc.enable()


# --- time, links
# ------------------------------------------------------------------------------------------------------------------


def test_work_whose_rate_changes_ends_when_it_is_done() -> None:
    clock, ends = SimClock(), []
    work = SimTask(10.0, lambda: ends.append(clock.now))
    clock.at(work, 1.0)
    clock.after(4.0, lambda: clock.at(work, 0.5))
    clock.after(6.0, lambda: clock.at(work, 0.0))
    clock.after(9.0, lambda: clock.at(work, 2.0))
    clock.run()
    assert ends == [4.0 + 2.0 + 3.0 + 2.5]


def test_what_happens_at_one_time_happens_in_the_order_in_which_it_was_made() -> None:
    clock, seen = SimClock(), []
    for number in range(20):
        clock.after(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]
    clock.run()
    assert seen == list(range(20))


def test_transfers_that_share_a_port_share_its_bandwidth() -> None:
    clock, ends = SimClock(), {}
    out, one, other = LinkPort(), LinkPort(), LinkPort()
    LinkTransfer(clock, (out, one), 2.0, lambda: ends.update(first=clock.now))
    clock.after(1.0, lambda: LinkTransfer(clock, (out, other), 2.0, lambda: ends.update(second=clock.now)) and None)
    clock.run()
    assert ends == {"first": 3.0, "second": 4.0}


def test_a_transfer_goes_as_fast_as_the_weaker_of_its_ports() -> None:
    clock, ends = SimClock(), []
    weak = LinkPort()
    weak.share = 0.25
    LinkTransfer(clock, (LinkPort(), weak), 1.0, lambda: ends.append(clock.now))
    clock.run()
    assert ends == [4.0]


# --- the step against other ways to know it
# -----------------------------------------------------------------------------------------


def bare(
    schedule: str, pp: int, virtual: int, micro_batches: int, seconds: list[tuple[float, float]], latency: float
) -> float:
    """A step of passes and messages alone, as the player plays it."""
    stages = tuple(
        StageOpTimes((PassSegment(forward, 0.0),), (PassSegment(backward, 0.0),), (PassSegment(backward, 0.0),), (), ())
        for forward, backward in seconds
    )
    played = step.StepSimulator(
        step.StepProgram(
            orders=schedule_orders(schedule, pp, virtual, micro_batches),
            durations=OpTimes(stages, tuple(EndOfStepTimes(0.0, 0.0, 0.0, 0.0) for _ in range(pp)), 1.0, 0.0, False),
            lanes=[ReplicaClass(1, 0, tuple(range(pp)), ())],
            lines=[step.LinkSpeed(1e300, latency)],
            hops=[[0] * pp] * pp,
            data=0,
            tensor=0,
            faulty=0,
            zero=0,
            barrier=True,
        )
    ).run()
    return max(cell.finish for cell in played)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.covering(20)
def test_a_step_of_passes_and_messages_takes_what_the_timing_of_its_schedule_says(seed: int) -> None:
    chance = random.Random(seed)
    schedule = chance.choice(["gpipe", "1f1b", "interleaved"])
    pp = chance.randint(2, 5)
    virtual = chance.randint(2, 3) if schedule == "interleaved" else 1
    micro_batches = pp * chance.randint(1, 4) if virtual > 1 else chance.randint(1, 12)
    seconds = [(chance.uniform(0.1, 2.0), chance.uniform(0.1, 4.0)) for _ in range(pp * virtual)]
    latency = chance.choice([0.0, 0.05, 3.0])
    forward, backward = zip(*seconds, strict=True)
    expected = simulate_orders(
        schedule_orders(schedule, pp, virtual, micro_batches), forward, backward, latency
    ).makespan
    assert bare(schedule, pp, virtual, micro_batches, seconds, latency) == pytest.approx(expected, rel=1e-12)


def even_job(pp: int, batch: int) -> Job:
    """Stages that take the same: a model of blocks alone."""
    model = decoder(runs=((4 * pp, 256),))
    return small_job(
        model.but(layers=[layer for layer in model.layers if layer.name == "block"]), cluster(1, pp), batch=batch
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved2", "interleaved4"])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_of_equal_stages_takes_what_the_estimate_says(schedule: str, pp: int) -> None:
    for rounds in (1, 3):
        played = simulate(even_job(pp, rounds * pp), f"pp{pp}.{schedule}")
        assert played.seconds == pytest.approx(played.estimate.time.step, rel=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "dp4.tp2.pp4.ep2.z1",
        "dp16.tp2.ep8.z2",
        "dp32.ep8.z3",
        "dp4.tp2.pp2.cp2.ep8.z1.rc-full8",
        "dp32.z1.off-optimizer",
    ],
)
def test_context_and_expert_ranks_offload_and_partial_recompute_are_in_the_play(name: str) -> None:
    played = simulate(named_job("mixtral-8x7b", "4x8:h100", 256, 4096), name)
    assert played.seconds == pytest.approx(played.estimate.time.step, rel=0.03)


def test_on_unlike_groups_each_pipeline_rank_is_played_at_the_speed_of_its_own() -> None:
    job = named_job("llama2-13b", "2x8:a100-80gb+4x8:v100-32gb", 480, 2048, "fp16")
    played = simulate(job, "dp16.pp3.z1.ls23-9-8.place0-1-1")
    assert played.seconds == pytest.approx(played.estimate.time.step, rel=0.03)


def everyone(plan: Plan, faults: Faults) -> list[ReplicaClass]:
    """Every replica as a lane of its own."""
    found = []
    marked = {lane.ranks[0]: lane for lane in replica_classes(plan, faults)}
    for replicate in range(plan.dp_replicate):
        for shard in range(plan.dp_shard):
            place = coords_of_rank(plan, 0)._replace(dp_replicate=replicate, dp_shard=shard)
            ranks = tuple(rank_at_coords(plan, place._replace(pp=pp)) for pp in range(plan.pp))
            marks = marked[ranks[0]].marks if ranks[0] in marked else ()
            found.append(ReplicaClass(1, replicate, ranks, marks))
    return found


@pytest.mark.parametrize(
    "name", ["dp4.pp2", "dp4.pp2.z1", "dp2x2.pp2.z1", "dp2x2.pp2.z2", "dp2x2.pp2.z3", "dp4x2.z3", "dp2x4.z2.rc-full"]
)
@pytest.mark.parametrize(
    "faults",
    [Faults(), Faults(slow=[(3, 2.0)]), Faults(slow=[(1, 1.5), (6, 3.0)], link=[(2, 0.2)])],  # type: ignore[list-item]
    ids=["healthy", "one slow", "two slow and a weak link"],
)
@pytest.mark.covering(8)
def test_one_of_equal_ranks_stands_for_all_of_them(name: str, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = small_job(on=cluster(2, 4), batch=32), parse_plan(name)
    few = simulate(job, plan, faults)
    monkeypatch.setattr("meshwright.planner.simulate.run.replica_classes", everyone)
    all_of_them = simulate(job, plan, faults)
    assert len(all_of_them.cells) == plan.dp * plan.pp >= len(few.cells)
    assert few.seconds == pytest.approx(all_of_them.seconds, rel=1e-9)
    assert sum(time.replicas for time in few.ranks) == plan.dp * plan.pp


# --- reductions and gathers
# -------------------------------------------------------------------------------------------------------


def reduced_by(played: SimulationResult, word: str) -> int:
    return sum(span.name.startswith(word) for span in played.cells[0].collectives)


def test_each_zero_stage_gathers_and_reduces_where_it_does() -> None:
    job = small_job(decoder(runs=((6, 256),)), cluster(1, 4), batch=16)
    counts = {
        zero: simulate(job, Plan(zero=zero, bucket=2**16, **{"dp_shard" if zero else "dp_replicate": 4}))
        for zero in range(4)
    }
    assert [reduced_by(counts[zero], "gather new weights") for zero in range(4)] == [0, 1, 1, 0]
    assert [reduced_by(counts[zero], "gather 0") for zero in range(4)] == [0, 0, 0, 2 * 4 * 10]
    assert reduced_by(counts[0], "reduce") == reduced_by(counts[1], "reduce") > 1
    assert reduced_by(counts[2], "reduce") == 4 * reduced_by(counts[1], "reduce")
    assert reduced_by(counts[3], "reduce") == 4 * 10


@pytest.mark.parametrize("plan", ["dp16", "dp16.z1", "dp16.z2.mb4", "dp16.z3.mb4", "dp8.pp2.z1.mb4"])
@pytest.mark.parametrize("base", [None, "nf4"])
def test_frozen_weights_are_neither_reduced_nor_gathered_after_the_update(plan: str, base: str | None) -> None:
    def played(**changes: Any) -> tuple[SimulationResult, float, float]:
        given = {"model.name": "llama-7b", "cluster.name": "2x8:h100", "workload.batch": 64, "workload.sequence": 512}
        result = simulate(resolve_job(read_job(None, (), {**given, **changes})), plan)
        kinds = ("reduce", "gather new weights")
        spans = result.cells[0].collectives
        return result, *(sum(span.end - span.start for span in spans if span.name.startswith(kind)) for kind in kinds)

    _, reduced, gathered = played()
    lora, of_adapters, new_adapters = played(**{"workload.lora": {"rank": 8, "base": base}})
    assert 0 < of_adapters < 0.1 * reduced and (0 < new_adapters < 0.02 * gathered or not gathered)
    assert lora.seconds == pytest.approx(lora.estimate.time.step, rel=0.03)


def test_stages_do_not_sum_the_gradients_of_a_frozen_tied_vocabulary() -> None:
    model = decoder(tied=True)
    frozen = model.but(
        layers=tuple(
            layer.but(parameters=tuple(each.but(frozen=layer.name != "block") for each in layer.parameters))
            for layer in model.layers
        )
    )
    plan = Plan(pp=2)
    ties = [
        compute_op_times(CostModel(small_job(each, cluster(1, 2))), plan, grid_of_plan(plan, 8, 4)).tie
        for each in (model, frozen)
    ]
    assert ties[0] > 0 == ties[1]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_pieces_of_a_pass_add_up_to_it_and_its_buckets_to_its_weights(zero: int) -> None:
    job = small_job(decoder(runs=((5, 256), (4, 512)), tied=True), cluster(1, 4), batch=16)
    plan = Plan(zero=zero, pp=2, bucket=2**16, **{"dp_shard" if zero else "dp_replicate": 2})
    pricer, box = CostModel(job), grid_of_plan(plan, 16, 9)
    found = compute_op_times(pricer, plan, box)
    prices = pricer.passes(box, pricer.ranks(box))
    for rank, stage in enumerate(found.stages):
        for pieces, whole in (
            (stage.forward, prices.forward),
            (stage.backward, prices.backward),
            (stage.last, prices.backward),
        ):
            assert sum(piece.compute + piece.exchange for piece in pieces) == pytest.approx(whole.reshape(2)[rank])
        assert [piece.unit for piece in stage.last if piece.unit >= 0] == list(range(len(stage.reductions)))[
            :: -1 if zero == 3 else 1
        ]


def test_reductions_of_a_rank_are_serial_and_slow_down_concurrent_compute() -> None:
    job = small_job(decoder(runs=((6, 256),)), cluster(1, 4), batch=16)
    plan = Plan(dp_replicate=4, bucket=2**16)
    cell = simulate(job, plan).cells[0]
    assert all(one.end <= other.start for one, other in zip(cell.collectives, cell.collectives[1:]))
    *_, before, last = [span.end - span.start for span in cell.actions if "B" in span.name]
    assert before < last <= before * 1.13 * (1 + 1e-9)


def test_on_a_host_device_compute_stands_still_while_ranks_exchange() -> None:
    played = simulate(named_job("llama-tiny", "1x4:cpu", 16, 64, "fp32"), "dp4.mb1")
    cell = played.cells[0]
    exchanged = sum(span.end - span.start for span in cell.collectives)
    alone = sum(cell.waits.values())
    assert played.seconds == pytest.approx(cell.busy + cell.update + alone)
    hidden = exchanged - alone
    last, first = [span.end - span.start for span in cell.actions if "B" in span.name][-1], cell.actions[1]
    assert len([span for span in cell.actions if "B" in span.name]) == 1 or last - (
        first.end - first.start
    ) == pytest.approx(hidden)


# --- faults
# ----------------------------------------------------------------------------------------------------------------------


def test_a_slow_rank_slows_all_and_all_wait_for_it() -> None:
    job = small_job(on=cluster(1, 4), batch=32)
    healthy = simulate(job, "dp4.mb1")
    slow = simulate(job, "dp4.mb1", Faults(slow=[(2, 2.0)]))  # type: ignore[list-item]
    assert slow.healthy == healthy.seconds
    assert 1.5 * healthy.seconds < slow.seconds <= 2.0 * healthy.seconds
    ill, others = slow.ranks
    assert (ill.rank, ill.replicas, ill.faulty) == (2, 1, True) and (others.replicas, others.faulty) == (3, False)
    assert others.waiting["reductions"] > 0.8 * (slow.seconds - healthy.seconds) > ill.waiting["reductions"]


def test_a_whole_slow_cluster_takes_as_many_times_as_long_where_nothing_is_exchanged() -> None:
    job = small_job(on=cluster(1, 1), batch=4)
    assert simulate(job, "dp1.mb1", Faults(slow=[(0, 3.0)])).seconds == pytest.approx(
        3.0 * simulate(job, "dp1.mb1").seconds
    )  # type: ignore[list-item]


def test_a_fast_rank_helps_nobody() -> None:
    job = small_job(on=cluster(1, 4), batch=32)
    assert simulate(job, "dp4.mb1", Faults(slow=[(2, 0.5)])).seconds == pytest.approx(
        simulate(job, "dp4.mb1").seconds, rel=1e-3
    )  # type: ignore[list-item]


def test_a_tensor_group_is_as_slow_as_the_slowest_of_its_ranks() -> None:
    job, plan = small_job(on=cluster(1, 4), batch=16), "dp2.tp2"
    one = simulate(job, plan, Faults(slow=[(2, 2.0)]))  # type: ignore[list-item]
    both = simulate(job, plan, Faults(slow=[(2, 2.0), (3, 1.5)]))  # type: ignore[list-item]
    assert one.seconds == both.seconds > simulate(job, plan).seconds


def test_a_weak_link_makes_reductions_take_as_many_times_as_long() -> None:
    job = small_job(on=cluster(1, 4), batch=4)

    def reductions(faults: Faults | None) -> float:
        (*_, last) = simulate(job, "dp4.mb1", faults).cells[0].collectives
        return last.end - last.start

    assert reductions(Faults(link=[(1, 0.1)])) == pytest.approx(10.0 * reductions(None))  # type: ignore[list-item]


def test_a_link_that_is_down_for_a_while_costs_at_most_that_while() -> None:
    job, down = small_job(on=cluster(2, 2), batch=16), 0.25
    healthy = simulate(job, "dp2.pp2.mb1")
    for start in (0.0, healthy.seconds / 3, healthy.seconds * 0.9):
        flap = simulate(job, "dp2.pp2.mb1", Faults(link=[SlowLink(rank=0, share=0.0, seconds=down, start=start)]))
        assert healthy.seconds < flap.seconds <= healthy.seconds + down + 1e-9
    late = simulate(
        job, "dp2.pp2.mb1", Faults(link=[SlowLink(rank=0, share=0.0, seconds=down, start=healthy.seconds * 2)])
    )
    assert late.seconds == pytest.approx(healthy.seconds)


def test_faults_read_from_tuples_and_from_text() -> None:
    faults = Faults(kill=[(3, 20)], slow=[(5, 1.5)], link=[(0, 0.25), (1, 0, "2 s", 1)])  # type: ignore[list-item]
    assert faults.kill == (KilledRank(rank=3, step=20),) and faults.slow == (SlowRank(rank=5, factor=1.5),)
    assert faults.link == parse_faults(SlowLink, ["0:0.25,1:0:2s:1"], "--link")
    assert Faults.model_validate_json(faults.to_json()) == faults


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--slow", "9:2"], "slow: rank 9 is not one of the 4 ranks, 0 to 3"),
        (["--slow", "1:2", "--slow", "1:3"], "slow: rank 1 is named twice"),
        (["--slow", "1"], "--slow '1' is not RANK:FACTOR; write it like --slow 3:1.5"),
        (["--slow", "1:x"], "--slow '1:x': 'x' is not a number"),
        (["--slow", "1:0"], "--slow '1:0'.factor: input should be greater than 0"),
        (["--slow", "1:inf"], "--slow '1:inf'.factor"),
        (
            ["--link", "1:0"],
            "link: rank 1 has no bandwidth until the end, so no step ends; give a duration, such as 1:0:2s, or kill "
            "the rank",
        ),
        (["--link", "1:2"], "--link '1:2'.share: input should be less than or equal to 1"),
        (["--link", "1:0:x"], "--link '1:0:x'.seconds: expected a quantity"),
        (["--plan", "dp8"], "dp(8) * tp(1) * pp(1) = 8 but the cluster has 4 devices"),
        (
            ["--trace", "/no/such/folder/file"],
            "--trace /no/such/folder/file: folder /no/such/folder does not exist; name a file in an existing folder",
        ),
        (["--save", "3 s"], "--save applies to a fleet: set its duration with --days"),
    ],
)
def test_what_is_wrong_with_a_question_is_said_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--cluster", "1x4:cpu", *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1


def test_a_failure_costs_the_recovery_and_without_a_replica_the_steps_since_a_save() -> None:
    job, policy = (
        small_job(on=cluster(1, 4), batch=16),
        RecoveryPolicy(save=2.0, detect=10.0, rebuild=20.0, restore=5.0),
    )
    twin = simulate(job, "dp4.mb1", Faults.model_validate({"kill": [(3, 250)]}), 300, 100, policy)
    assert twin.stretch.deaths == ((250, (3,), 3, 0),)
    assert twin.stretch.seconds == pytest.approx(300.5 * twin.seconds + 2 * 2.0 + 35.0)
    shard = simulate(job, "dp4.z1.mb1", Faults.model_validate({"kill": [(3, 250), (0, 20), (1, 20)]}), 300, 100, policy)
    assert [(death.ranks, death.holders, death.again) for death in shard.stretch.deaths] == [
        ((0, 1), 0, 19),
        ((3,), 0, 49),
    ]
    assert shard.stretch.seconds == pytest.approx((300 + 2 * 0.5 + 19 + 49) * shard.seconds + 2 * 2.0 + 2 * 35.0)


@pytest.mark.parametrize(
    ("name", "dead", "left"),
    [
        ("dp4.mb1", {1}, 3),
        ("dp4.mb1", {0, 1, 2, 3}, 0),
        ("dp2x2.z3", {1}, 1),
        ("dp2x2.z3", {1, 3}, 0),
        ("dp2x2.z3", {1, 2}, 1),
        ("tp4", {2}, 0),
    ],
)
def test_the_state_of_a_rank_is_on_its_replicas(name: str, dead: set[int], left: int) -> None:
    assert min(count_surviving_replicas(parse_plan(name), rank, dead) for rank in dead) == left


def test_deaths_are_told_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--cluster", "1x4:cpu", "--plan", "dp2x2.z1", "--steps", "9", "--detect", "3 s"]
    assert main([*asked, "--kill", "3:7,2:7", "--kill", "0:2,2:2"]) == 0
    shown = capsys.readouterr().out
    assert "in step 7 ranks 2, 3 die; 1 other rank can restore the state" in shown
    assert "in step 2 ranks 0, 2 die; no other rank has the state: back to the start" in shown
    assert main(["simulate", "--cluster", "1x4:cpu", "--kill", "3:7", "--steps", "6"]) == 2
    assert "kill: rank 3 dies in step 7, but only 6 steps are simulated" in capsys.readouterr().err


# --- what is shown
# ----------------------------------------------------------------------------------------------------------------

FAULTY = Faults(slow=[(3, 1.5)], link=[(0, 0.5)])  # type: ignore[list-item]


FIELDS: dict[str, dict[str, type]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float},
    "M": {"name": str, "pid": int, "args": dict},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": str},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": str, "bp": str},
}
"""What the Trace Event Format asks of complete events, metadata and flows; beside `ph`."""

OPTIONAL = {"X": {"args", "cname"}, "M": {"tid"}, "s": set[str](), "f": set[str]()}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
COLOURS = {"thread_state_running", "thread_state_runnable", "thread_state_iowait", "rail_load"}
"""Of the format's reserved names."""


def checked(events: list[dict[str, Any]]) -> Counter[str]:
    """Events by their phase: each has the fields of its phase, of their types, and no other; tracks are named once;
    nothing overlaps on a track;
    an arrow begins inside an action and ends where a message begins, not before."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    arrows: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        phase = event["ph"]
        assert event.keys() - OPTIONAL[phase] == FIELDS[phase].keys() | {"ph"}, event
        assert all(isinstance(event[name], kind) for name, kind in FIELDS[phase].items()), event
        if phase == "M":
            assert event["args"].keys() == {METADATA[event["name"]]} and ("tid" in event) == event["name"].startswith(
                "thread"
            ), event
        if phase == "X":
            assert event["dur"] >= 0.0 and event["ts"] >= 0.0 and event.get("cname") in {None, *COLOURS}, event
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if phase in "sf":
            arrows.setdefault(event["id"], []).append(event)
    named = Counter((event["pid"], event["tid"]) for event in events if event["name"] == "thread_name")
    assert set(named.values()) == {1} and slices.keys() <= named.keys()
    assert Counter(event["pid"] for event in events if event["name"] == "process_name").keys() == {
        event["pid"] for event in events
    }
    for spans in slices.values():
        spans.sort()
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(spans))
    for start, end in arrows.values():
        assert (
            (start["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
            and start["ts"] <= end["ts"]
            and start["name"] == end["name"]
        )
        assert any(begin <= start["ts"] <= stop for begin, stop in slices[start["pid"], start["tid"]])
        assert any(begin == end["ts"] for begin, _ in slices[end["pid"], end["tid"]])
    return Counter(event["ph"] for event in events)


def test_a_chrome_trace_has_a_track_for_each_rank_and_for_its_collectives(tmp_path: Path) -> None:
    job = small_job(decoder(runs=((8, 128),)), cluster(2, 4), batch=16)
    played = simulate(job, "dp4.pp2.z1.mb1", FAULTY)
    data = json.loads(json.dumps(chrome_trace(played), allow_nan=False))
    phases = checked(data["traceEvents"])
    actions = sum(len(cell.actions) for cell in played.cells)
    collectives = sum(len(cell.collectives) for cell in played.cells)
    messages = sum(len(cell.messages) for cell in played.cells)
    assert phases["X"] == actions + collectives + messages and phases["s"] == phases["f"] == messages > 0
    tracks = [event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"]
    assert len(set(tracks)) == len(tracks) and {"rank 0 (stage rank 0)", "rank 0 collectives", "rank 0 sends"} <= set(
        tracks
    )


def test_the_screen_fits_100_columns_and_the_json_is_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [
        "--model",
        "gpt3-175b",
        "--cluster",
        "128x8:a100-80gb",
        "--batch",
        "384",
        "--seq",
        "2048",
        "--plan",
        "dp16.tp8.pp8.z1.mb1",
    ]
    asked = ["simulate", *where, "--slow", "3:1.5,900:2", "--link", "5:0:1s"]
    assert main([*asked, "--trace", str(tmp_path / "step.json")]) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines())) <= 100 and "has a fault" in shown.out
    assert shown.err.count("\n") == 1 and checked(json.loads((tmp_path / "step.json").read_text())["traceEvents"])
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step"] > data["healthy"] > 0 and data["ranks"][0]["faulty"]


def test_every_second_of_a_rank_is_work_or_waiting() -> None:
    job = small_job(decoder(runs=((8, 128),)), cluster(2, 4), batch=32)
    for name in ("dp4.pp2.z1.mb1", "dp2x2.pp2.z2.mb1", "dp8.z3.mb1", "pp8.mb1.gpipe", "pp4.dp2.mb1.interleaved2"):
        played = simulate(job, name, FAULTY)
        for rank in played.ranks:
            assert rank.compute + rank.update + rank.idle == pytest.approx(played.seconds), name
        assert simulation_data(played)["name"] == parse_plan(name).name and simulation_text(played)


def test_the_package_is_the_verb(tmp_path: Path) -> None:
    job = small_job(on=cluster(1, 4), batch=16)
    assert (
        mw.simulate(job, "dp4.mb1").seconds
        == mw.simulate(job, mw.Plan(dp_replicate=4, micro_batch=1), mw.Faults()).seconds
    )
    with pytest.raises(InputError, match="rank 7 is not one of the 4 ranks"):
        mw.simulate(job, "dp4.mb1", mw.Faults(slow=[(7, 2.0)]))  # type: ignore[list-item]


@pytest.mark.parametrize(
    "name",
    [
        "dp128.tp8.sp.pp16.z1.rc-full",
        "dp64.tp8.sp.pp32.z1.rc-full",
        pytest.param("dp128.tp8.sp.pp16.z1.rc-full.interleaved7", marks=pytest.mark.soak),
    ],
)
def test_a_step_on_16384_devices_is_played_in_under_two_seconds(name: str) -> None:
    plan = parse_plan(name)
    job = named_job("llama3-405b", "2048x8:h100", 256 * plan.dp, 8192)
    seconds, played = quickest(lambda: simulate(job, plan), 2.0)
    assert seconds < 2.0
    assert sum(rank.replicas for rank in played.ranks) * plan.tp == 16384 and replace(played, faults=FAULTY).healthy


@pytest.mark.parametrize(("plan", "part"), [("dp4.z1.ga3-2-2-1", "ga3-2-2-1"), ("dp4.z2.zw2-1-1-1", "zw2-1-1-1")])
def test_replicas_with_unlike_work_or_states_are_not_played_as_if_they_were_alike(plan: str, part: str) -> None:
    with pytest.raises(InputError) as error:
        simulate(small_job(), plan)
    assert (
        f"{part} makes replicas different" in str(error.value)
        and "meshwright estimate" in str(error.value)
        and "\n" not in str(error.value)
    )
