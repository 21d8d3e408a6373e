"""Recipes and update rules in the planner: bytes by kind, the rates that a device must have, what cannot be asked for."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright as mw
from meshwright.base.errors import InputError
from meshwright.intake.job import read_job, resolve
from meshwright.spec.job import Job
from meshwright.spec.workload import Workload

GB = 1e9


def job(cluster: str = "1x8:h100", **workload: Any) -> Job:
    options = {"model.name": "llama2-7b", "cluster.name": cluster, "workload.batch": 64, "workload.sequence": 2048}
    return resolve(read_job(None, (), {**options, **{f"workload.{name.replace('__', '.')}": value for name, value in workload.items()}}))


@pytest.mark.parametrize(
    ("workload", "held"),
    [
        ({"precision": "bf16"}, (2, 2, 12)),
        ({"precision": "bf16", "reduce": "fp32"}, (2, 4, 12)),
        ({"precision": "bf16-pure"}, (2, 2, 4)),
        ({"precision": "fp8"}, (2, 2, 12)),
        ({"precision": "tf32"}, (4, 4, 8)),
        ({"precision": "tf32", "reduce": "bf16"}, (4, 2, 8)),
        ({"precision": "bf16", "optimizer__state": "8bit"}, (2, 2, 6.25)),
        ({"precision": "bf16", "optimizer__name": "sgd"}, (2, 2, 4)),
    ],
    ids=str,
)
def test_an_estimate_holds_the_bytes_that_a_recipe_says(workload: dict[str, Any], held: tuple[float, float, float]) -> None:
    asked = job(**workload)
    memory = mw.estimate(asked, "dp8.z3").memory
    each = asked.model.parameters / 8
    for found, expected in zip((memory.parameters, memory.gradients, memory.optimizer), held, strict=True):
        assert found == pytest.approx(expected * each, rel=1e-3)


def test_muon_and_adafactor_hold_less_than_adamw_by_what_their_rules_keep() -> None:
    adamw, muon, adafactor = (mw.estimate(job(optimizer__name=name), "dp8.z1").memory.optimizer for name in ("adamw", "muon", "adafactor"))
    spec = job().model
    matrices = sum(
        layer.repeat * each.numel for layer in spec.layers if layer.name == "block" for each in layer.parameters if len(each.shape) == 2
    )
    assert adamw - muon == pytest.approx(4 * matrices / 8, rel=1e-3)
    assert adafactor / adamw == pytest.approx(1 / 3, rel=0.01)


def test_every_recipe_and_rule_is_planned_with_what_runs_it() -> None:
    for precision in ("bf16", "bf16-pure", "fp8", "tf32"):
        assert mw.plan(job(precision=precision), 1)[0].estimate.mfu < 1
    fp8 = mw.plan(job(precision="fp8"), 3)
    assert all(entry.plan.tp == 1 and entry.plan.schedule == "1f1b" for entry in fp8)
    assert fp8[0].estimate.time.step < mw.plan(job(precision="bf16"), 1)[0].estimate.time.step
    assert not any(entry.plan.offload for entry in mw.plan(job(optimizer__name="muon"), 3))


@pytest.mark.parametrize(
    ("cluster", "workload", "line"),
    [
        ("1x8:a100-80gb", {"precision": "fp8"}, "has no rate for fp8"),
        ("1x8:v100-32gb", {"precision": "tf32"}, "has no rate for tf32"),
        ("1x8:h100", {"precision": "bf16-pur"}, "did you mean 'bf16-pure'"),
        ("1x8:h100", {"optimizer__name": "muno"}, "did you mean 'muon'"),
        ("1x8:h100", {"optimizer__name": "muon", "optimizer__state": "8bit"}, "muon has no states of 8 bits"),
        ("1x8:h100", {"optimizer__matrix_lr": 0.1}, "matrix_lr is of muon"),
        ("1x8:h100", {"precision": "bf16-pure", "optimizer__name": "muon"}, "use bf16"),
        ("1x8:h100", {"precision": "bf16-pure", "optimizer__state": "8bit"}, "do not go with precision bf16-pure"),
        ("1x8:h100", {"precision": "fp16", "reduce": "bf16"}, "leave reduce out"),
        ("1x8:h100", {"exact": 1, "reduce": "fp32"}, "leave one out"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(cluster: str, workload: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line) as refused:
        job(cluster, **workload)
    assert "\n" not in str(refused.value)


def test_a_compiled_plan_reads_back_and_is_found_by_a_pin() -> None:
    asked = job().but(pins={"compile": True})
    assert all(entry.plan.compile and entry.plan.name.endswith("compile") and entry.plan.cp == 1 for entry in mw.plan(asked, 5))
    assert mw.parse_plan("dp8.z3.compile").compile and Workload().recipe.name == "fp32"
