"""Recipes and update rules in the planner: bytes by kind, the rates that a device must have, what cannot be asked
for."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright as mw
from meshwright.core.errors import InputError
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.search.ranking import search_plans
from meshwright.spec.constraints import check_supported, plan_violations, unsupported_parts
from meshwright.spec.job import Job
from meshwright.spec.workload import Workload

GB = 1e9


def job(cluster: str = "1x8:h100", **workload: Any) -> Job:
    options = {"model.name": "llama2-7b", "cluster.name": cluster, "workload.batch": 64, "workload.sequence": 2048}
    return resolve_job(
        read_job(
            None, (), {**options, **{f"workload.{name.replace('__', '.')}": value for name, value in workload.items()}}
        )
    )


@pytest.mark.parametrize(
    ("workload", "held"),
    [
        ({"precision": "bf16"}, (2, 4, 12)),
        ({"precision": "bf16", "reduce": "bf16"}, (2, 2, 12)),
        ({"precision": "fp16"}, (2, 4, 12)),
        ({"precision": "fp16", "reduce": "fp16"}, (2, 2, 12)),
        ({"precision": "bf16-pure"}, (2, 2, 4)),
        ({"precision": "fp8"}, (2, 4, 12)),
        ({"precision": "tf32"}, (4, 4, 8)),
        ({"precision": "tf32", "reduce": "bf16"}, (4, 2, 8)),
        ({"precision": "bf16", "optimizer__state": "8bit"}, (2, 4, 6.25)),
        ({"precision": "bf16", "optimizer__name": "sgd"}, (2, 4, 4)),
    ],
    ids=str,
)
def test_an_estimate_holds_the_bytes_that_a_recipe_says(
    workload: dict[str, Any], held: tuple[float, float, float]
) -> None:
    asked = job(**workload)
    memory = mw.estimate(asked, "dp8.z3.mb1").memory
    each = asked.model.parameters / 8
    for found, expected in zip((memory.parameters, memory.gradients, memory.optimizer), held, strict=True):
        assert found == pytest.approx(expected * each, rel=1e-3)


def test_an_optimizer_of_a_persons_own_is_priced_as_adamw() -> None:
    assert mw.estimate(job(optimizer__name="mine:make"), "dp8.z1.mb1").memory == mw.estimate(job(), "dp8.z1.mb1").memory


def test_muon_and_adafactor_hold_less_than_adamw_by_what_their_rules_keep() -> None:
    adamw, muon, adafactor = (
        mw.estimate(job(optimizer__name=name), "dp8.z1.mb1").memory.optimizer for name in ("adamw", "muon", "adafactor")
    )
    spec = job().model
    matrices = sum(
        layer.repeat * each.numel
        for layer in spec.layers
        if layer.name == "block"
        for each in layer.parameters
        if len(each.shape) == 2
    )
    assert adamw - muon == pytest.approx(4 * matrices / 8, rel=1e-3)
    assert adafactor / adamw == pytest.approx(1 / 3, rel=0.01)


def test_every_recipe_and_rule_is_planned_with_what_runs_it() -> None:
    for precision in ("bf16", "bf16-pure", "fp8", "tf32"):
        assert mw.plan(job(precision=precision), 1)[0].estimate.mfu < 1
    fp8 = mw.plan(job(precision="fp8"), 3)
    assert all(entry.plan.tp == 1 and entry.plan.schedule in ("1f1b", "gpipe", "interleaved") for entry in fp8)
    assert fp8[0].estimate.time.step < mw.plan(job(precision="bf16"), 1)[0].estimate.time.step
    assert not any(entry.plan.offload for entry in mw.plan(job(optimizer__name="muon"), 3))
    with pytest.raises(InputError, match="exact: precision fp16 scales the loss"):
        job(precision="fp16", exact=1)


@pytest.mark.parametrize(
    ("cluster", "workload", "line"),
    [
        ("1x8:a100-80gb", {"precision": "fp8"}, "has no rate for fp8"),
        ("1x8:v100-32gb", {"precision": "tf32"}, "has no rate for tf32"),
        ("1x8:h100", {"precision": "bf16-pur"}, "did you mean 'bf16-pure'"),
        ("1x8:h100", {"optimizer__name": "muno"}, "did you mean 'muon'"),
        ("1x8:h100", {"optimizer__name": "muon", "optimizer__state": "8bit"}, "muon has no 8-bit states"),
        ("1x8:h100", {"optimizer__matrix_lr": 0.1}, "matrix_lr is an option of muon, not of adamw: leave it out"),
        ("1x8:h100", {"optimizer__momentum": 0.8}, "momentum is an option of sgd-momentum, muon, not of adamw"),
        (
            "1x8:h100",
            {"optimizer__name": "sgd", "optimizer__eps": 1e-6},
            "eps is an option of adamw, adam, muon, not of sgd",
        ),
        (
            "1x8:h100",
            {"optimizer__name": "adafactor", "optimizer__betas": (0.9, 0.99)},
            "betas is an option of adamw, adam, muon, not of adafactor",
        ),
        (
            "1x8:h100",
            {"optimizer__name": "mine:make", "optimizer__weight_decay": 0.2},
            "weight_decay is an option of adamw, adam, sgd",
        ),
        ("1x8:h100", {"optimizer__cooldown": 0.1}, "cooldown belongs to the schedule warmup-stable-decay"),
        (
            "1x8:h100",
            {"optimizer__schedule": "constant", "optimizer__final_lr": 0.0},
            "final_lr has no effect with schedule constant",
        ),
        ("1x8:h100", {"optimizer__schedule": "liner"}, "did you mean 'linear'"),
        ("1x8:h100", {"precision": "bf16-pure", "optimizer__name": "muon"}, "use precision bf16"),
        (
            "1x8:h100",
            {"precision": "bf16-pure", "optimizer__state": "8bit"},
            "cannot be combined with precision bf16-pure",
        ),
        ("1x8:h100", {"precision": "fp16", "reduce": "bf16"}, "leave reduce out"),
        ("1x8:h100", {"precision": "bf16", "reduce": "fp16"}, "leave reduce out"),
        ("1x8:h100", {"precision": "fp32", "reduce": "fp16"}, "leave reduce out"),
        ("1x8:h100", {"exact": 1, "reduce": "fp32"}, "leave one out"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(cluster: str, workload: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line) as refused:
        job(cluster, **workload)
    assert "\n" not in str(refused.value)


REFUSED = [
    ("1x8:h100", {"precision": "bf16", "optimizer__name": "muon"}, "dp8.z1.off-optimizer",
        "an optimizer that updates whole tensors does not support offload"),
    ("1x8:h100", {"precision": "bf16", "optimizer__name": "adafactor"}, "dp8.z3.off-parameters",
        "an optimizer that updates whole tensors does not support offload"),
    ("1x8:h100", {"precision": "bf16-pure"}, "dp8.z1.off-optimizer",
        "precision bf16-pure does not support offload"),
    ("1x8:h100", {"precision": "bf16", "optimizer__state": "8bit"}, "dp8.z1.off-optimizer",
        "the 8-bit optimizer state does not support offload"),
    ("1x8:h100", {"precision": "fp32"}, "dp8.z3.off-parameters",
        "add off-optimizer to update them there, or use bf16"),
    ("1x2:h100", {"precision": "bf16", "compression__kind": "int8"}, "dp2.z1.zw3-1",
        "compressed gradients need equal shards"),
    ("2x8:h100", {"precision": "bf16", "local__replicas": 2}, "dp2.cp8.rc-full",
        "workload.local cannot be combined with z0 with cp"),
    ("2x8:h100", {"precision": "bf16", "local__replicas": 2}, "dp2x8.z1.off-optimizer",
        "workload.local cannot be combined with off-optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("cluster", "workload", "plan", "line"), REFUSED, ids=str)
def test_a_plan_that_the_ranks_would_refuse_is_refused_where_it_is_priced(
    cluster: str, workload: dict[str, Any], plan: str, line: str
) -> None:
    with pytest.raises(InputError, match=f"plan {plan}: .*{line}"):
        mw.estimate(job(cluster, **workload), plan)


@pytest.mark.parametrize(
    ("cluster", "workload", "plan", "line"), [each for each in REFUSED if "zw" not in each[2]], ids=str
)
@pytest.mark.covering(4)
def test_a_search_ranks_nothing_that_the_ranks_would_refuse_and_counts_it(
    cluster: str, workload: dict[str, Any], plan: str, line: str
) -> None:
    asked = job(cluster, **workload)
    given, none = mw.parse_plan(plan), mw.parse_plan("dp1")
    pinned = {
        name: getattr(given, name)
        for name in ("offload", "tp", "schedule", "cp")
        if getattr(given, name) != getattr(none, name)
    }
    pinned |= {"zero": 0} if given.cp > 1 else {}
    with pytest.raises(InputError, match=line):
        mw.plan(asked.but(pins={**asked.pins, **pinned}), 5)
    found = search_plans(asked, 3)
    reasons = {fault.reason for fault in plan_violations(asked, given)}
    assert any(each.count and each.reason in reasons for each in found.rejected)


@pytest.mark.parametrize("schedule", ["zbh1", "zbv"])
def test_float8_with_zero_bubbles_is_estimated_and_never_called_runnable(schedule: str) -> None:
    asked, given = job("1x8:h100", precision="fp8"), mw.parse_plan(f"pp8.mb1.{schedule}")
    full = mw.estimate(job("1x8:h100", precision="bf16"), given.name)
    assert 0.5 < mw.estimate(asked, given.name).time.step / full.time.step <= 1.0
    assert unsupported_parts(given, asked.workload.recipe) == (f"fp8 with {schedule}",) and not unsupported_parts(given)
    with pytest.raises(InputError, match=f"fp8 with {schedule} can be planned but cannot be trained yet"):
        check_supported(given, asked.workload.recipe)
    pinned = asked.but(pins={**asked.pins, "schedule": given.schedule, "pp": 8})
    assert not search_plans(pinned, 1).chosen.runs
    with pytest.raises(InputError, match="fp8 runs without zero-bubble schedules"):
        search_plans(pinned, 1, runnable=True)


def test_float8_with_tensor_ranks_is_trained_and_counts_one_byte_per_cast() -> None:
    asked, full = job("1x8:h100", precision="fp8"), job("1x8:h100", precision="bf16")
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    for plan, ranks in (("dp8.z1.mb1", 1), ("dp2.tp4.z1.mb1", 4), ("dp2.tp4.z3.mb1", 0)):
        assert not unsupported_parts(mw.parse_plan(plan), asked.workload.recipe)
        one, other = (mw.estimate(each, plan).memory.total for each in (asked, full))
        assert one - other == (linear / ranks if ranks else 0)
    pinned = asked.but(pins={**asked.pins, "tp": 4})
    assert search_plans(pinned, 1, runnable=True).chosen.runs


def test_plans_that_an_update_does_not_go_with_are_counted_once() -> None:
    """As many are considered as of the same job that all of them go with."""
    counts = {
        search_plans(job("2x8:h100", precision="bf16", optimizer__name=name), 1).considered
        for name in ("adamw", "muon")
    }
    assert len(counts) == 1


def test_what_an_optimizer_of_whole_tensors_and_float8_go_with_is_searched() -> None:
    muon = job(precision="bf16", optimizer__name="muon")
    assert mw.plan(muon.but(pins={**muon.pins, "offload": ("activations",)}), 1)[0].plan.offload == ("activations",)
    float8 = job(precision="fp8")
    for schedule in ("gpipe", "interleaved"):
        assert mw.plan(float8.but(pins={**float8.pins, "schedule": schedule, "pp": 4}), 1)[0].plan.schedule == schedule
    local = job("2x8:h100", precision="bf16", local__replicas=2)
    assert mw.estimate(local, "dp2x8.z1.off-activations").fits


def test_a_compiled_plan_reads_back_and_is_found_by_a_pin() -> None:
    asked = job().but(pins={"compile": True})
    assert all(entry.plan.compile and entry.plan.name.endswith("compile") for entry in mw.plan(asked, 5))
    for part in ("cp8", "cp8.ulysses", "dp8.rc-attn", "dp8.rc-sac", "cp2.dp4.rc-full4+sac"):
        assert not list(plan_violations(asked, mw.parse_plan(f"{part}.compile")))
    assert mw.parse_plan("dp8.z3.compile").compile and Workload().recipe.name == "fp32"
