"""A budget of bytes a rank: never over, as near as a block is large, and the least time that any choice of recompute
and offload has."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from jobs import cluster, decoder, small_job

from meshwright.cli.main import run_command
from meshwright.core.errors import NothingFits
from meshwright.planner.cost import constants
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import reserved_bytes
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.uncertainty import unmeasured_features
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.search.best_plans import RISK_MARGIN
from meshwright.planner.search.branch_and_bound import find_best_plan
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.search.space import PlanSpace
from meshwright.spec.job import Job
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan

DEEP, DEEPER = (decoder(((blocks, 64),), hidden=32, heads=2, vocabulary=64, tied=True) for blocks in (20, 48))
HOSTS = {"no way to the host": 0.0, "a slow way": 1e9, "a fast way": 1e12}


LLAMA = model_spec("llama", ArchitectureSizes(kind="llama", layers=12, hidden=64, heads=2, ffn=160, vocab=96, seq=256))
"""Of whose blocks much follows from the rest: they recompute by operation too."""


def job(devices: int, batch: int, link: float = 0.0, **pins: int) -> Job:
    on = cluster(1, devices, 1e9)
    group = on.groups[0].but(
        host_bandwidth=link, host_memory=1e9, host_update=constants.CPU_UPDATE_PARAMS_PER_SECOND
    )  # as if measured
    return small_job(DEEP, on.but(groups=(group,)), batch, sequence=256).but(pins={"compile": False, **pins})


def with_budget(question: Job, budget: float) -> Job:
    return question.but(cluster=question.cluster.but(budget=budget))


def margin(question: Job, plan: Plan) -> float:
    """The factor by which unmeasured features raise the score of a plan."""
    return (1.0 + RISK_MARGIN) ** len(unmeasured_features(question.cluster, plan))


def every_price(question: Job) -> Iterator[tuple[float, float, Plan]]:
    """Scores and reserved bytes of every plan of the space, one by one."""
    pricer = CostModel(question)
    for box in PlanSpace(question).boxes():
        for index in np.argwhere(np.broadcast_to(box.legal[0], box.shape)).tolist():
            plan = box.plan(tuple(index))
            one = grid_of_plan(plan, question.workload.batch, question.model.blocks)
            prices = pricer.price(one)
            yield (
                prices.step.item() * margin(question, plan),
                float(reserved_bytes(pricer.setting, prices.allocated, driver_bytes(pricer.setting, one))[0].item()),
                plan,
            )


@pytest.mark.parametrize("link", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize(
    ("devices", "pins"), [(1, {}), (2, {"pp": 2, "micro_batch": 1})], ids=["one device", "a pipeline"]
)
@pytest.mark.parametrize("model", [DEEP, LLAMA], ids=["as wholes", "by operation too"])
@pytest.mark.covering(1)
def test_within_a_budget_the_plan_is_the_quickest_that_exhaustive_choice_finds(
    model: ModelSpec, devices: int, pins: dict[str, int], link: float
) -> None:
    question = job(devices, 2, link, schedule="1f1b", **pins).but(model=model)  # type: ignore[arg-type]
    every = list(every_price(question))
    assert len({plan for _, _, plan in every}) == len(every) > 20
    taken = [bytes_ for _, bytes_, _ in every]
    for share in (0.02, 0.1, 0.35, 0.7, 1.0):
        budget = min(taken) + share * (max(taken) - min(taken))
        best = search_plans(with_budget(question, budget), top=1).chosen
        assert best.estimate.memory.reserved <= budget
        score = best.estimate.time.step * margin(question, best.plan)
        assert score <= 1.000001 * min(seconds for seconds, bytes_, _ in every if bytes_ <= budget), share


def test_what_is_too_slow_for_all_blocks_may_be_quick_enough_for_some() -> None:
    question = job(1, 4, micro_batch=4).but(model=LLAMA)
    full, by_operation = (
        search_plans(question.but(pins={**question.pins, "recompute": kind})).chosen.estimate
        for kind in ("none", "sac")
    )
    limited = with_budget(question, (full.memory.reserved + by_operation.memory.reserved) / 2)
    best = search_plans(limited).chosen
    assert best.plan.recompute == "sac" and 0 < best.plan.recompute_layers < 12
    found = find_best_plan(limited, ceiling=best.estimate.time.step * margin(question, best.plan) * 1.000001)
    assert found is not None and found.plan == best.plan and best.estimate.time.step < by_operation.time.step


def test_recompute_that_makes_a_plan_fit_is_within_3_percent_of_the_budget() -> None:
    question = job(1, 4, micro_batch=1).but(model=DEEPER)
    full, lean = (
        search_plans(question.but(pins={**question.pins, "recompute": kind})).chosen.estimate
        for kind in ("none", "full")
    )
    for share in np.linspace(0.05, 0.95, 10):
        budget = lean.memory.reserved + share * (full.memory.reserved - lean.memory.reserved)
        plan = search_plans(with_budget(question, budget)).chosen
        assert 0.97 * budget <= plan.estimate.memory.reserved <= budget, (share, plan.name)
        assert lean.time.step > plan.estimate.time.step > full.time.step


def test_a_budget_that_cannot_be_met_names_the_least_that_can() -> None:
    question = job(1, 2, 1e9)
    with pytest.raises(NothingFits) as refused:
        search_plans(with_budget(question, 3e5))
    said = str(refused.value)
    assert "\n" not in said and "which may use 293.0 KiB" in said and "a budget of 1.00 MiB would fit" in said, said
    assert search_plans(with_budget(question, 2.0 * 2**20)).chosen.estimate.memory.reserved <= 2.0 * 2**20


def test_the_command_plans_within_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "llama2-7b",
        "--cluster",
        "1x8:a100-80gb",
        "--batch",
        "64",
        "--seq",
        "4096",
        "--budget",
        "30GiB",
    ]
    assert run_command([*words, "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]["estimate"]
    assert 0.97 * 30 * 2**30 <= chosen["memory"]["reserved"] <= 30 * 2**30 == chosen["limit"]
