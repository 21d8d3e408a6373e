"""Why a plan lost: rules, memory, or time whose terms are the whole gap; what would fit; which pins contradict each
other."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import answering_once, cluster, named_job, small_job
from test_search import small_jobs

from meshwright.cli.launch_plan import choose_plan
from meshwright.cli.main import main
from meshwright.cli.options import JobOptions
from meshwright.core.errors import InputError, MeshwrightError, NothingFits
from meshwright.core.messages import translate
from meshwright.core.units import show_bytes
from meshwright.planner.cost import constants
from meshwright.planner.cost.plan_grid import PlanGrid
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.plans import pins_from_plan
from meshwright.planner.search import ranking
from meshwright.planner.search.best_plans import (
    RISK_MARGIN,
    RankedPlan,
    SearchObjective,
    count_risks,
    required_gain,
    risk_adjusted_seconds,
)
from meshwright.planner.search.branch_and_bound import PlanSearch, search_top_plans
from meshwright.planner.search.explain import ComparisonOutcome, compare_families, explain, why_not
from meshwright.planner.search.infeasible import NoPlanFits
from meshwright.planner.search.ranking import search_plans
from meshwright.report.text import TEXT_COLUMNS, display_width
from meshwright.report.why import plan_comparison_text
from meshwright.spec.estimate import FitStatus, fit_message
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan

LARGE = ["--model", "llama-65b", "--cluster", "8x8:a100-40gb", "--batch", "128", "--seq", "2048"]
LARGE += ["--runnable", "--pin", "cp=1"]


def check_terms(job: Job) -> None:
    try:
        answer = search_plans(job)
    except MeshwrightError:
        return
    for found in compare_families(job, answer):
        assert found.estimate is not None
        gap = found.estimate.time.step - answer.chosen.estimate.time.step
        assert found.gap == math.fsum(term.seconds for term in found.terms)
        assert found.gap == pytest.approx(gap, rel=1e-9, abs=1e-12 * found.estimate.time.step)


@settings(max_examples=5, deadline=None)
@given(small_jobs())
def test_the_terms_of_every_family_sum_to_its_whole_gap(job: Job) -> None:
    check_terms(job)


def test_a_plan_expected_above_the_memory_is_not_called_tight() -> None:
    """Its lower bound is below the limit. `train` and `launch` say the bytes of the table of `plan`."""
    job, plan = named_job("llama3-70b", "4x8:h100", 512, 4096), parse_plan("tp8.pp4.z1")
    doubtful = estimate(job, plan)
    assert doubtful.verdict == FitStatus.tight and not doubtful.fits
    assert fit_message(doubtful).startswith("probably does not fit, expected ")
    best = parse_plan("dp32.z3.mb4.rc-full")
    chosen = RankedPlan(plan=best, estimate=estimate(job, best))
    assert why_not(job, chosen, plan.name, plan).outcome == ComparisonOutcome.unfit
    reserved, total = chosen.estimate.memory.reserved, chosen.estimate.memory.total
    asked = JobOptions(model="llama3-70b", cluster="4x8:h100", batch=512, seq=4096, plan=best.name)
    said = choose_plan(asked.job_file(None), None, None, {}, None).why
    assert show_bytes(reserved) != show_bytes(total)
    assert f"{show_bytes(reserved)} on the peak rank expected" in said[1]


def check_outcome(job: Job, at: int) -> None:
    try:
        answer = search_plans(job)
    except MeshwrightError:
        return
    entry = answer.plans[min(at, len(answer.plans) - 1)]
    found = why_not(job, answer.chosen, entry.name, entry.plan)
    doubtful = (ComparisonOutcome.tight, ComparisonOutcome.unmeasured)
    assert found.outcome in (ComparisonOutcome.chosen, ComparisonOutcome.slower, *doubtful)
    if found.outcome in doubtful:
        most = (1 + RISK_MARGIN) ** count_risks(job, entry.plan, entry.estimate)
        assert answer.chosen.estimate.time.step <= entry.estimate.time.step * most * (1 + 1e-9)


@settings(max_examples=5, deadline=None)
@given(small_jobs(), st.integers(0, 9))
def test_no_plan_of_the_search_is_faster_unless_it_is_tight(job: Job, at: int) -> None:
    check_outcome(job, at)


@pytest.mark.soak
@settings(max_examples=50, deadline=None)
@given(small_jobs(), st.integers(0, 9))
def test_terms_and_outcomes_of_50_random_jobs_agree_with_the_search(job: Job, at: int) -> None:
    check_terms(job)
    check_outcome(job, at)


def test_a_tight_plan_comes_first_only_when_it_is_more_than_5_percent_faster() -> None:
    passed = 0
    for memory in range(66, 100, 8):
        job = small_job(on=cluster(1, 4, memory * 1e5), batch=16)
        try:
            answer = search_plans(job)
        except NothingFits:
            continue
        scores = [risk_adjusted_seconds(job, entry.plan, entry.estimate) for entry in answer.plans]
        assert all(score <= later * (1 + 1e-9) for score, later in pairwise(scores))
        said = [line for line in explain(job, answer) if "comes first only when" in line]
        faster = [entry for entry in answer.plans if entry.estimate.time.step < answer.chosen.estimate.time.step]
        if faster and answer.chosen.estimate.verdict == FitStatus.fits:
            assert len(said) == 1
            tight = "but it is tight" in said[0]
            passed += tight
    assert passed


@pytest.mark.soak
def test_a_plan_over_an_unmeasured_host_link_is_first_only_if_over_5_percent_faster() -> None:
    job = named_job("llama2-70b", "8x8:h100", 512, 4096)
    group = job.cluster.groups[0].but(host_memory=2.0 * job.cluster.groups[0].host_memory)
    job = job.but(cluster=job.cluster.but(groups=(group,)))
    measured = job.but(cluster=job.cluster.but(groups=(group.but(host_update=constants.CPU_UPDATE_PARAMS_PER_SECOND),)))
    leaning, answer = search_plans(measured, 1).chosen, search_plans(job, 1)
    certain = answer.chosen
    assert leaning.plan.offload and not certain.plan.offload
    assert 0 < certain.estimate.time.step / leaning.estimate.time.step - 1 < RISK_MARGIN
    found = why_not(job, certain, leaning.name, leaning.plan)
    assert found.outcome == ComparisonOutcome.unmeasured and "not profiled" in plan_comparison_text(
        answer, found
    ).replace("\n", " ")


@pytest.mark.soak
def test_a_plan_that_another_objective_left_behind_is_not_said_to_be_too_uncertain() -> None:
    """Five times as fast is no too little, whether or not anybody has measured the link that it leans on."""
    job = named_job("llama-65b", "8x8:a100-40gb", 512, 2048)
    fast = search_plans(job, 1).chosen
    roomy = search_plans(job, 1, SearchObjective.headroom)
    assert fast.plan.offload and roomy.chosen.estimate.time.step > 4 * fast.estimate.time.step
    assert why_not(job, roomy.chosen, fast.name, fast.plan).outcome == ComparisonOutcome.faster


@pytest.mark.parametrize("gained", [1.03, 1.08, 1.15])
def test_a_plan_is_said_to_be_passed_over_by_as_much_as_decides(gained: float) -> None:
    """One that is tight and leans on an unmeasured link has to be 10.25 % faster, not 5."""
    job, plan = named_job("llama-65b", "8x8:a100-40gb", 512, 2048), parse_plan("dp64.z1.off-optimizer")
    entry = RankedPlan(plan=plan, estimate=estimate(job, plan))
    certain = entry.but(
        plan=entry.plan.but(offload=(), offload_share=100), estimate=entry.estimate.but(verdict=FitStatus.fits)
    )
    leaning = entry.estimate.but(
        verdict=FitStatus.tight, time=entry.estimate.time.but(step=entry.estimate.time.step / gained)
    )
    by = required_gain(job, (certain.plan, certain.estimate), (entry.plan, leaning))
    assert by == (pytest.approx(1.05**2 - 1) if gained < 1.05**2 else 0)


def test_the_margin_is_the_limit_less_what_is_reserved() -> None:
    for entry in search_plans(named_job("llama2-7b", "1x8:a100-80gb", 512, 4096)).plans:
        priced = entry.estimate
        assert priced.limit == 0.98 * 80 * 2**30
        assert priced.spare == priced.limit - priced.memory.reserved >= 0


@functools.cache
def without_offload() -> tuple[Job, RankedPlan]:
    """A large job without offload, and the plan that is chosen for it."""
    job = named_job("llama-65b", "8x8:a100-40gb", 64, 2048, pins={"offload": (), "cp": 1})
    return job, search_plans(job, 1).chosen


@pytest.mark.parametrize(
    ("wanted", "outcome", "words"),
    [
        ({"tp": 8, "pp": 8}, ComparisonOutcome.slower, ""),
        ({"dp": 64, "zero": 1, "offload": ()}, ComparisonOutcome.unfit, ""),
        ({"tp": 3}, ComparisonOutcome.illegal, "tp(3) = 3 but the cluster has 64 devices"),
        (
            {"tp": 64, "sequence_parallel": False, "dp": 2},
            ComparisonOutcome.illegal,
            "dp(2) * tp(64) = 128 but the cluster has 64 devices",
        ),
        (parse_plan("dp64"), ComparisonOutcome.unfit, ""),
        (parse_plan("dp3.tp3"), ComparisonOutcome.illegal, "dp(3) * tp(3) * pp(1) = 9 but the cluster has 64 devices"),
    ],
)
def test_why_not_names_the_limit_or_the_time(wanted: object, outcome: ComparisonOutcome, words: str) -> None:
    job, chosen = without_offload()
    found = why_not(job, chosen, "it", wanted)  # type: ignore[arg-type]
    assert found.outcome == outcome
    assert any(words in fault for fault in found.faults) or not words
    assert (found.gap > 0) if outcome == ComparisonOutcome.slower else True


def test_every_rule_that_a_plan_breaks_is_named() -> None:
    job = small_job(batch=7)
    found = why_not(job, search_plans(job).chosen, "it", parse_plan("dp2.tp8"))
    assert len(found.faults) == 3 and "does not divide heads(4)" in found.faults[1] and "batch 7" in found.faults[2]


@pytest.fixture(scope="module")
def searched_once() -> Iterator[None]:
    """The commands below ask the same of one large job."""
    with answering_once(ranking, "search_plans") as answers:
        yield
    assert len(answers) == 1


@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    "asked", [["--why"], ["--why-not", "tp=8,pp=8"], ["--why-not", "dp64.z3"], ["--why-not", "dp3.z3"], []]
)
def test_every_answer_fits_100_columns_in_both_languages(
    asked: list[str], language: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *LARGE, *asked, "--lang", language]) == 0
    assert max(map(display_width, capsys.readouterr().out.splitlines())) <= TEXT_COLUMNS


@pytest.mark.usefixtures("searched_once")
def test_differences_that_are_shown_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LARGE, "--why-not", "dp64.z3"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()[1:]
    rows = [
        [round(float(cell) * 100) for cell in line.replace(" s", "").replace(",", "").split()[1:]] for line in table
    ]
    assert all(other - chosen == difference for chosen, other, difference in rows)
    assert [sum(column) for column in zip(*rows[:-1], strict=True)] == rows[-1]


@pytest.mark.usefixtures("searched_once")
def test_why_not_as_json_has_terms_that_sum_to_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LARGE, "--why-not", "tp=8,pp=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [found[which]["estimate"]["time"]["step"] for which in ("entry", "chosen")]
    assert found["outcome"] == "slower" and found["gap"] == pytest.approx(steps[0] - steps[1], rel=1e-9)
    assert math.fsum(term["seconds"] for term in found["terms"]) == found["gap"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_two_plans_are_compared_by_terms_that_add_up(language: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LARGE, "--compare", "dp64.z3", "tp8.pp8.z1", "--lang", language]) == 0
    shown = capsys.readouterr().out
    assert max(map(display_width, shown.splitlines())) <= TEXT_COLUMNS
    assert "dp64.z3" in shown and "tp8.pp8" in shown
    assert main(["plan", *LARGE, "--compare", "dp64.z3", "tp8.pp8.z1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = (plan["estimate"]["time"]["step"] for plan in found["plans"])
    assert found["gap"] == pytest.approx(second - first, rel=1e-9)
    assert main(["plan", *LARGE, "--compare", "dp64.z3", "dp64.z3"]) == 0
    assert "slower" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "words"), [("dp3.z3", "cannot run"), ("tp=8", "is not understood")])
def test_a_comparison_with_what_cannot_run_is_one_line(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *LARGE, "--compare", "dp64.z3", name]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    assert main(["plan", *LARGE, "--compare", name]) == 2 and "needs 2 values" in capsys.readouterr().err


def test_when_nothing_fits_every_way_out_fits_when_it_is_taken() -> None:
    with pytest.raises(NoPlanFits) as caught:
        search_plans(named_job("llama-65b", "1x1:a100-80gb", 64, 2048, pins={"offload": (), "compile": False}))
    said = str(caught.value)
    assert (
        "the nearest (dp1.mb1.rc-full79+sac) needs 1.20 TiB on rank 0, which may use 80.0 GiB; optimizer states take "
        "729.6 GiB" in said
    )
    assert "16 nodes (16 devices) would fit (" in said and "devices of" not in said
    assert search_plans(named_job("llama-65b", "16x1:a100-80gb", 64, 2048, pins={"offload": ()})).plans
    assert translate(str(caught.value), "zh").startswith("没有放得下的方案")


def test_gradients_in_bfloat16_are_named_where_the_plan_fits_with_them() -> None:
    job = named_job("llama2-7b", "1x1:h200", 8, 512, pins={"offload": (), "compile": False})
    job = job.but(cluster=job.cluster.with_memory(124 * 2**30))
    with pytest.raises(NoPlanFits, match=r"reduce: bf16 would fit \(dp1\.mb2, "):
        search_plans(job, 1)
    assert search_plans(job.but(workload=job.workload.but(reduce="bf16")), 1).plans[0].plan.name == "dp1.mb2"


def test_a_local_disk_is_named_where_no_host_has_room_and_the_plan_fits_with_it() -> None:
    alone = named_job("llama2-7b", "1x1:rtx4090", 32, 256)
    with pytest.raises(
        NoPlanFits,
        match=r"a local disk in each node \(storage_bandwidth, 2\.00 GB/s\) would fit \(dp1\.\S*off-optimizer-disk",
    ) as caught:
        search_plans(alone)
    named = re.search(r"GB/s\) would fit \((\S+),", str(caught.value))
    groups = tuple(group.but(storage_bandwidth=2e9) for group in alone.cluster.groups)
    with_disk = alone.but(cluster=alone.cluster.but(groups=groups))
    assert named is not None
    price = estimate(with_disk, parse_plan(named[1]))
    assert price.fits and search_plans(with_disk).chosen.estimate.time.step <= price.time.step * (1 + 1e-9)


@pytest.mark.soak
def test_a_local_disk_is_not_named_where_there_is_one() -> None:
    alone = named_job("llama2-7b", "1x1:rtx4090", 32, 256)
    groups = tuple(group.but(storage_bandwidth=2e9) for group in alone.cluster.groups)
    with_disk = alone.but(cluster=alone.cluster.but(groups=groups))
    with pytest.raises(NoPlanFits) as caught:
        search_plans(with_disk.but(cluster=with_disk.cluster.but(budget=2**30)))
    assert "a local disk" not in str(caught.value)


@pytest.mark.soak
def test_without_host_memory_for_offload_no_partial_recompute_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes: list[PlanGrid] = []
    price = PlanSearch.price
    monkeypatch.setattr(PlanSearch, "price", lambda survey, box, *rest: boxes.append(box) or price(survey, box, *rest))
    assert not search_top_plans(named_job("llama2-70b", "1x8:rtx4090", 32, 256), 1).ranking.best
    assert len(boxes) < 600, len(boxes)  # of all numbers more than a thousand


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (
            {"sequence_parallel": True, "tp": 1},
            "pins sequence_parallel=true and tp=1 contradict each other: .*needs tp > 1",
        ),
        (
            {"zero": 0, "dp_shard": 4, "tp": 2},
            "pins zero=0 and dp_shard=4 contradict each other: ZeRO 0 shards nothing",
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 1},
            "pins schedule=interleaved and virtual_stages=1 contradict each other",
        ),
        ({"pp": 1, "virtual_stages": 2, "tp": 2}, "pins pp=1 and virtual_stages=2 contradict each other"),
    ],
)
def test_pins_that_contradict_each_other_are_named_together(pins: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        search_plans(small_job(on=cluster(2, 8), pins=pins))


def test_a_device_with_enough_memory_is_named() -> None:
    with pytest.raises(NoPlanFits, match=r"without the pin offload=.*devices of \d+\.0 GiB would fit, such as h200 \("):
        search_plans(named_job("llama2-7b", "1x1:a100-80gb", 8, 2048, pins={"offload": ()}))


def test_a_named_plan_that_does_not_fit_gets_a_zero_stage_before_offload() -> None:
    """Only plans with offload, which need 14 s a step, fit if other pins are removed."""
    pins = pins_from_plan(parse_plan("dp8.mb1"))
    with pytest.raises(NothingFits, match=r"; without the pin zero=0 would fit \(dp8\.z1\.mb1, "):
        search_plans(named_job("llama-7b", "8:h100", 32, 2048, pins=pins))


@pytest.mark.soak
def test_a_pin_in_the_way_is_named_with_what_would_fit_without_it() -> None:
    with pytest.raises(NothingFits, match=r"without the pin zero=0 would fit \(dp8\.tp2\."):
        search_plans(named_job("gpt3-175b", "8x8:a100-80gb", 512, 2048, pins={"pp": 4, "tp": 2, "dp": 8, "zero": 0}))
