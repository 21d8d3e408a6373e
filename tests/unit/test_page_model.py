"""The model in the page of plans equals the planner: formulas that the cost model records, and the ranking in
JavaScript, over random jobs, memory sizes and rates."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from jobs import cluster, decoder, named_job, small_job
from test_search import small_jobs

from meshwright.core.errors import InputError
from meshwright.planner.cost.named_plans import complete_plan
from meshwright.planner.cost.step import estimate
from meshwright.planner.cost.step_formula import INPUTS, StepFormulas
from meshwright.planner.cost.symbolic import Program, Symbol
from meshwright.planner.search.best_plans import risk_adjusted_seconds
from meshwright.planner.search.branch_and_bound import search_top_plans
from meshwright.report.page.page_grid import (
    GridShape,
    PageGrid,
    PageSearch,
    cluster_memory_limit,
    page_axes,
    search_page_grid,
    with_memory_limit,
)
from meshwright.report.page.plan_page import compact_json, plan_page_data, read_asset
from meshwright.spec.cluster import ClusterRates
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
RUN = """
const fields = ({ entry, verdict, score }) =>
  [entry.name, verdict, score, entry.reserved, entry.speed, entry.mfu, entry.time]
console.log(JSON.stringify(DATA.asked.map(([place, inputs]) => {
  const point = DATA.points[place], rows = rankPlans(point, inputs), fits = rows.length && rows[0].verdict !== "no"
  return { rows: rows.map(fields), searched: fits && isSearched(point, inputs, rows[0].score) }
})))"""


def random_rates(job: Job, values: random.Random) -> dict[str, float]:
    own = job.cluster.rates
    assert own is not None
    rates = {name: value * values.uniform(0.1, 8.0) for name, value in own.model_dump().items()}
    return {**rates, "efficiency": min(rates["efficiency"], 1.0)}


def with_inputs(job: Job, inputs: dict[str, float]) -> Job:
    """The job with the memory and the rates of the inputs of a page."""
    work = {name: int(inputs[name]) for name in ("batch", "sequence") if name in inputs}
    rates = {name: value for name, value in inputs.items() if name in ClusterRates.model_fields}
    on = with_memory_limit(job.cluster.with_rates(ClusterRates(**rates)), inputs["memory"])
    return job.but(cluster=on, workload=job.workload.but(**work))


def random_workload(job: Job, values: random.Random) -> Job:
    """The job with another batch and another sequence length."""
    work = job.workload
    batch = values.choice([work.batch, 2 * work.batch, 3 * work.batch, values.randint(1, 4 * work.batch)])
    sequence = max(round(work.sequence * values.choice([0.25, 0.5, 0.75, 1.0, 1.125, 2.0]) / 8) * 8, 8)
    return job.but(workload=work.but(batch=batch, sequence=sequence))


def check_formulas(job: Job, values: random.Random) -> int:
    """Compares the formulas of the best plans, and of the best plan of each family, with their estimates for other
    rates, batches, sequences and micro-batch sizes. Returns the number of comparisons."""
    if job.cluster.rates is None or job.model.gathered or job.model.against_division:
        return 0
    try:
        ranking = search_top_plans(job, 8).ranking
    except InputError:
        return 0
    plans = {each.plan for each in (*ranking.best, *ranking.families.values(), *ranking.nearest.values())}
    program, compared = Program(INPUTS), 0
    formulas = StepFormulas(job, program)
    recorded = {plan: formulas.record(plan) for plan in plans}
    for _ in range(4):
        rates = random_rates(job, values)
        changed = random_workload(job.but(cluster=job.cluster.with_rates(ClusterRates(**rates))), values)
        work = changed.workload
        for plan, formula in recorded.items():
            sizes = [size for size in range(1, work.batch + 1) if work.batch % (plan.dp * size) == 0]
            sized = plan.but(micro_batch=values.choice(sizes or [1]))
            try:
                expected = estimate(changed, sized)
            except InputError:
                continue
            tokens, count = sized.micro_batch * work.sequence / plan.cp, work.batch // (plan.dp * sized.micro_batch)
            found = program.evaluate({**rates, "sequence": work.sequence, "tokens": tokens, "count": count})
            value = lambda each: found[each.at] if isinstance(each, Symbol) else each  # noqa: B023
            assert [value(each) for each in formula.time.values()] == pytest.approx(
                [getattr(expected.time, kind) for kind in formula.time], rel=1e-9, abs=1e-12 * expected.time.step
            ), sized.name
            for rank, known in zip(formula.ranks, expected.per_stage, strict=True):
                assert sum(map(value, rank[:5])) == pytest.approx(known.total, rel=1e-9), sized.name
            compared += 1
    return compared


@seed(1)
@settings(RELAXED, max_examples=8)
@given(small_jobs())
def test_formulas_of_random_jobs_equal_the_estimates_at_other_rates(job: Job) -> None:
    check_formulas(job, random.Random(len(job.to_json())))


@pytest.mark.soak
@settings(RELAXED, max_examples=200)
@given(small_jobs())
def test_formulas_of_200_random_jobs_equal_the_estimates_at_other_rates(job: Job) -> None:
    check_formulas(job, random.Random(len(job.to_json())))


@pytest.mark.parametrize(
    ("model", "on"),
    [
        ("gpt2-xl", "1x2:a100-40gb"),
        ("gpt2", "2x4:h100"),
        pytest.param("mixtral-8x7b", "2x8:h100", marks=pytest.mark.soak),
        pytest.param("llama2-7b", "2x8:a100-80gb", marks=pytest.mark.soak),
    ],
)
def test_formulas_of_known_models_equal_the_estimates_at_other_rates(model: str, on: str) -> None:
    assert check_formulas(named_job(model, on, 32, 1024), random.Random(7)) > 4


def test_a_branch_on_a_symbol_is_an_error_not_a_guess() -> None:
    program = Program(("a",))
    (a,) = program.inputs().values()
    with pytest.raises(TypeError, match="not known"):
        bool(a > 1.0)
    with pytest.raises(TypeError, match="not known"):
        max(a, 2.0 * a)
    with pytest.raises(TypeError, match="not known"):
        float(a)


def ask(found: PageGrid, asked: list[tuple[int, dict[str, float]]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The data of a page, and what its script answers to each (point, inputs)."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; docs/page_check.py checks the page in a browser")
    data = plan_page_data(found, ["meshwright", "plan"], found.job.cluster.name)
    script = "const DATA = JSON.parse(require('fs').readFileSync(0, 'utf8'))\n" + read_asset("plan_model.js") + RUN
    answer = subprocess.run(
        [node, "-e", script], input=compact_json({**data, "asked": asked}), capture_output=True, text=True, check=True
    )
    return data, json.loads(answer.stdout)


def random_inputs(found: PageGrid, values: random.Random, is_own_work: bool = False) -> dict[str, float]:
    """Values of all continuous inputs that the sliders of a page reach. `is_own_work`: whether batch and sequence are
    those of the job."""
    axes = found.axes
    ends = {"memory": axes.memory, **axes.rates}
    inputs = {name: end.low * (end.high / end.low) ** values.random() for name, end in ends.items()}
    if is_own_work:
        return inputs
    low, own, high = axes.batch
    batch = values.choice(
        [own, own * values.randint(1, 4), own * values.randint(1, 16) // 4, values.randint(low, high)]
    )
    return {**inputs, "batch": max(batch, low), "sequence": values.choice(axes.lengths)}


def check_page(
    job: Job, values: random.Random, count: int = 3, shape: GridShape = (1, 1, 1), is_own_work: bool = False
) -> list[float]:
    """Compares what the page shows for the anchors and for `count` random inputs with the planner. Returns for each of
    these inputs the fraction by which the best plan of a search is better than the best plan of the page."""
    found = search_page_grid(job, page_axes(job, shape))
    asked: list[tuple[int, dict[str, float]]] = []
    for place, point in enumerate(found.points):
        asked += [(place, anchor_inputs(anchor.job)) for anchor in point.anchors]
        asked += [(place, random_inputs(found, values, is_own_work)) for _ in range(count if not point.error else 0)]
    data, answers = ask(found, asked)
    assert data["keys"]["time"] and len(answers) == len(asked)
    lost = []
    for (place, given_inputs), answer in zip(asked, answers, strict=True):
        point = found.points[place]
        job = with_inputs(point.job, given_inputs)
        check_rows(job, values.sample(answer["rows"], min(6, len(answer["rows"]))))
        best = next(PageSearch().ranked(job, 1), None)
        is_anchor = any(given_inputs == anchor_inputs(anchor.job) for anchor in point.anchors)
        name, verdict, score, *_ = answer["rows"][0] if answer["rows"] else ("", "no", 0.0)
        if best is None or verdict == "no":
            assert (verdict == "no") == (best is None) or not is_anchor
            lost += [1.0] if best is not None else []
            continue
        loss = score / risk_adjusted_seconds(job, best.plan, best.estimate) - 1
        # the search lowers offload fractions only after it has chosen a plan
        is_partial = re.search(r"off-\w+?\d", f"{name} {best.name}")
        assert loss >= -1e-8 or is_partial, f"the page has {name}, {-loss:.1%} better than {best.name} of a search"
        assert answer["searched"] == (is_anchor and abs(loss) < 1e-6) or is_partial
        assert not is_anchor or is_partial or name == best.name or loss < 1e-9
        lost += [max(loss, 0.0)] if not is_anchor else []
    return lost


def anchor_inputs(job: Job) -> dict[str, float]:
    """The inputs of a page for the job of an anchor."""
    work, own = {"batch": job.workload.batch, "sequence": job.workload.sequence}, job.cluster.rates
    rates = {} if own is None else own.model_dump()
    return {"memory": cluster_memory_limit(job.cluster), **rates, **work}


def check_rows(job: Job, rows: list[list[Any]]) -> None:
    for name, verdict, _, reserved, speed, mfu, time in rows:
        expected = estimate(job, complete_plan(job, parse_plan(name)))
        kinds = [seconds for _, seconds in expected.time]
        assert time == pytest.approx(kinds, rel=1e-9, abs=1e-10 * expected.time.step)
        assert (reserved, speed, mfu) == pytest.approx(
            (expected.memory.reserved, expected.tokens_per_second, expected.mfu), rel=1e-9
        )
        assert (verdict == "fits") == (expected.verdict == "fits")
        assert (verdict != "no") == (expected.fits and not expected.crowded)


@seed(2)
@settings(RELAXED, max_examples=2)
@given(small_jobs())
def test_the_page_shows_the_numbers_of_the_planner_for_random_inputs(job: Job) -> None:
    check_page(job, random.Random(len(job.to_json())), 2)


@pytest.mark.soak
@settings(RELAXED, max_examples=40)
@given(small_jobs())
def test_40_pages_show_the_numbers_of_the_planner_for_random_inputs(job: Job) -> None:
    check_page(job, random.Random(len(job.to_json())), 6)


@pytest.mark.soak
@pytest.mark.parametrize(("is_own_work", "right"), [(True, 0.9), (False, 0.75)])
def test_the_page_of_a_real_model_is_right_for_most_random_inputs(is_own_work: bool, right: float) -> None:
    """Without a rule of its own for odd batches, the page misses more first plans at other batches and sequences."""
    job = named_job("llama2-7b", "2x8:a100-80gb", 128, 4096)
    lost = check_page(job, random.Random(5), 60, (1, 3, 2), is_own_work)
    assert len(lost) == 60 and sum(loss < 1e-6 for loss in lost) >= right * len(lost) and max(lost) < 0.1


@pytest.mark.soak
def test_the_pictures_of_the_documentation_show_the_plans_of_today() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("page_check", docs / "page_check.py")
    assert spec is not None and spec.loader is not None
    page_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page_check)
    known = json.loads(page_check.PICTURED_FILE.read_text(encoding="utf-8"))
    assert page_check.pictured() == known, "run make docs where a browser is installed, and look at docs/pictures"


def test_a_pin_has_the_best_plans_of_a_search_with_this_pin() -> None:
    job = small_job(decoder(((8, 128),)), cluster(1, 4, 2.0**26), 16)
    found = search_page_grid(job, page_axes(job, (1, 1, 1)))
    names = {priced.plan.name for priced in found.base.plans}
    assert set(found.base.pins) >= {"tp=1", "tp=2", "tp=4", "pp=1", "pp=2", "zero=0", "zero=3"}
    for pin in found.base.pins:
        name, value = pin.split("=")
        best = [
            entry
            for entry in PageSearch().ranked(job.but(pins={name: int(value)}), 3)
            if entry.plan.dp_shard > 1 or not entry.plan.zero
        ]
        assert {entry.name for entry in best} <= names, pin


def test_the_ranges_of_links_end_before_the_search_chooses_another_bucket() -> None:
    job = named_job("gpt2", "2x4:a100-80gb", 64, 1024)
    axes = page_axes(job, (1, 1, 1))
    buckets = {search_top_plans(each, 1).space.bucket for each in axes.anchors(job)}
    assert len(buckets) == 1 and axes.rates["efficiency"].high > axes.rates["efficiency"].own


def test_rates_of_a_job_file_replace_those_of_equal_nodes_only() -> None:
    job = named_job("gpt2", "2x4:a100-80gb", 64, 1024)
    changed = job.cluster.with_rates(ClusterRates(network=1e9))
    assert changed.network.bandwidth == 1e9 and changed.groups == job.cluster.groups
    mixed = named_job("gpt2", "1x4:a100-80gb+1x4:v100-32gb", 64, 1024).cluster
    with pytest.raises(InputError, match=re.escape("cluster.rates is for clusters of equal nodes")):
        mixed.with_rates(ClusterRates(network=1e9))
