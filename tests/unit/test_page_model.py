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
from meshwright.planner.cost.step_formula import RATES, StepFormulas
from meshwright.planner.cost.symbolic import Program, Symbol
from meshwright.planner.search.best_plans import risk_adjusted_seconds
from meshwright.planner.search.branch_and_bound import search_top_plans
from meshwright.report.page.page_grid import (
    InputRange,
    PageGrid,
    PageSearch,
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
    rates = {name: value for name, value in inputs.items() if name != "memory"}
    return job.but(cluster=with_memory_limit(job.cluster.with_rates(ClusterRates(**rates)), inputs["memory"]))


def check_formulas(job: Job, values: random.Random) -> int:
    """Compares the formulas of the best plans, and of the best plan of each family, with their estimates."""
    if job.cluster.rates is None:
        return 0
    try:
        ranking = search_top_plans(job, 8).ranking
    except InputError:
        return 0
    plans = {each.plan for each in (*ranking.best, *ranking.families.values(), *ranking.nearest.values())}
    program = Program(RATES)
    formulas = StepFormulas(job, program)
    recorded = {plan: formulas.record(plan) for plan in plans}
    for _ in range(3):
        rates = random_rates(job, values)
        changed = job.but(cluster=job.cluster.with_rates(ClusterRates(**rates)))
        found = program.evaluate(rates)
        for plan, formula in recorded.items():
            expected = estimate(changed, plan).time
            seconds = [found[each.at] if isinstance(each, Symbol) else each for each in formula.values()]
            assert seconds == pytest.approx(
                [getattr(expected, kind) for kind in formula], rel=1e-9, abs=1e-12 * expected.step
            )
    return len(plans)


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


def check_page(job: Job, values: random.Random, count: int = 3, shape: tuple[int, int, int] = (1, 2, 1)) -> list[float]:
    """Compares what the page shows for the anchors and for `count` random inputs with the planner. Returns for each of
    these inputs the fraction by which the best plan of a search is better than the best plan of the page."""
    found = search_page_grid(job, page_axes(job, shape))
    axes, asked = found.axes, []

    def inputs(ends: dict[str, InputRange], at: float | None) -> dict[str, float]:
        chosen = {name: values.random() if at is None else at for name in ends}
        return {name: end.low * (end.high / end.low) ** chosen[name] for name, end in ends.items()}

    own = {"memory": axes.memory.own, **{name: each.own for name, each in axes.rates.items()}}
    for place, point in enumerate(found.points):
        if not point.error:
            asked += [(place, {**own, "memory": limit}) for limit in set(axes.memory)]
            asked += [(place, inputs({"memory": axes.memory, **axes.rates}, None)) for _ in range(count)]
    data, answers = ask(found, asked)
    assert data["keys"]["time"] and len(answers) == len(asked)
    lost = []
    for (place, given_inputs), answer in zip(asked, answers, strict=True):
        job = with_inputs(found.points[place].job, given_inputs)
        check_rows(job, values.sample(answer["rows"], min(6, len(answer["rows"]))))
        best = next(PageSearch().ranked(job, 1), None)
        if not answer["rows"]:
            assert best is None
            continue
        name, verdict, score, *_ = answer["rows"][0]
        assert (verdict == "no") == (best is None) or given_inputs["memory"] not in axes.memory
        if best is None or verdict == "no":
            continue
        loss = score / risk_adjusted_seconds(job, best.plan, best.estimate) - 1
        # the search lowers offload fractions only after it has chosen a plan
        is_partial = re.search(r"off-\w+?\d", f"{name} {best.name}")
        assert loss >= -1e-8 or is_partial, f"the page has {name}, {-loss:.1%} better than {best.name} of a search"
        is_anchor = given_inputs["memory"] in axes.memory
        assert answer["searched"] == (is_anchor and abs(loss) < 1e-6) or is_partial
        assert not is_anchor or is_partial or name == best.name or loss < 1e-9
        lost.append(max(loss, 0.0))
    return lost


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
@settings(RELAXED, max_examples=3)
@given(small_jobs())
def test_the_page_shows_the_numbers_of_the_planner_for_random_inputs(job: Job) -> None:
    check_page(job, random.Random(len(job.to_json())), 2)


@pytest.mark.soak
@settings(RELAXED, max_examples=40)
@given(small_jobs())
def test_40_pages_show_the_numbers_of_the_planner_for_random_inputs(job: Job) -> None:
    check_page(job, random.Random(len(job.to_json())), 6)


@pytest.mark.soak
def test_the_page_of_a_real_model_is_right_for_nine_of_ten_random_inputs() -> None:
    lost = check_page(named_job("llama2-7b", "2x8:a100-80gb", 128, 4096), random.Random(5), 60, (1, 1, 1))
    assert sum(loss < 1e-6 for loss in lost) >= 0.9 * len(lost) and max(lost) < 0.1


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
    buckets = {search_top_plans(job.but(cluster=on), 1).space.bucket for on in axes.anchors(job.cluster)}
    assert len(buckets) == 1 and axes.rates["efficiency"].high > axes.rates["efficiency"].own


def test_rates_of_a_job_file_replace_those_of_equal_nodes_only() -> None:
    job = named_job("gpt2", "2x4:a100-80gb", 64, 1024)
    changed = job.cluster.with_rates(ClusterRates(network=1e9))
    assert changed.network.bandwidth == 1e9 and changed.groups == job.cluster.groups
    mixed = named_job("gpt2", "1x4:a100-80gb+1x4:v100-32gb", 64, 1024).cluster
    with pytest.raises(InputError, match=re.escape("cluster.rates is for clusters of equal nodes")):
        mixed.with_rates(ClusterRates(network=1e9))
