"""Optimizers that need whole tensors, and those that a person brings: what one device computes, under every kind of plan."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import check
from updates import RULES, alone, by_dimensions, copies_after, go_on, said_of_update, train

from meshwright.base.errors import InputError
from meshwright.parallel.update.door import ELEMENTWISE, FUSED, Rule, fuse, rule_of
from meshwright.spec.layout import ALIGN
from meshwright.spec.plan import parse_plan

SAMPLE = [
    ("muon", "llama", "dp2.tp2.z3.mb2"), ("muon", "llama-tied", "dp2.pp2.z2"), ("adafactor", "llama", "dp2.z3"),
    ("given AdamW by dimensions", "llama", "dp2.z2"),
]  # fmt: skip
PLANS = ("dp1", "dp2", "dp2.z1", "dp4.z2", "dp2.z3.mb2", "dp2x2.z1", "tp2.mb4", "tp4.sp.mb4", "pp4", "dp2.tp2.z3.mb2",
         "tp2.pp2.mb2.interleaved2", "dp2.pp2.z1.zb1", "dp2.tp2.pp2.z2.mb2", "dp2.cp2.z1", "pp2.zbv", "dp2.z1.shards3-1")  # fmt: skip

# A key's bias moves no score: its gradient is rounding, of which Adafactor makes whole steps. It trains the models without one.
PAIRS = [(rule, model) for rule in sorted(RULES) for model in ("llama", "llama-tied", *(() if rule == "adafactor" else ("gpt2", "bert")))]


@functools.cache
def expected(rule: str, model: str) -> dict[str, Any]:
    return alone(rule, model, steps=2)


@pytest.mark.parametrize(("rule", "model", "plan"), SAMPLE)
def test_a_rule_updates_whole_tensors_as_one_device_does(ranks: Any, rule: str, model: str, plan: str) -> None:
    check(expected(rule, model), ranks.run(parse_plan(plan).world, train, rule, model, plan, 2), "fp64")


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("rule", "model"), PAIRS)
def test_every_rule_under_every_kind_of_plan_updates_as_one_device_does(ranks: Any, rule: str, model: str, plan: str) -> None:
    check(expected(rule, model), ranks.run(parse_plan(plan).world, train, rule, model, plan, 2), "fp64")


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [("muon", "dp2.tp2.z1.mb2", "dp2.z3"), pytest.param("adafactor", "dp2.z3", "dp2.tp2.z1.mb2", marks=pytest.mark.soak)],
)
def test_whole_states_go_on_under_another_plan(ranks: Any, tmp_path: Path, rule: str, before: str, after: str) -> None:
    ranks.run(parse_plan(before).world, train, rule, "llama", before, 1, str(tmp_path))
    saved = next(path for path in tmp_path.iterdir() if path.name.startswith("step"))
    gone_on = ranks.run(parse_plan(after).world, go_on, rule, "llama", after, 1, str(saved))[0]
    whole = expected(rule, "llama")
    assert gone_on["losses"][0] == pytest.approx(whole["losses"][1], rel=1e-10)
    for name, weight in whole["weights"].items():
        assert float((gone_on["weights"][name] - weight).norm() / weight.norm()) <= 1e-9, name


def test_the_door_tells_elementwise_rules_from_those_that_need_whole_tensors() -> None:
    plain = (torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adadelta)
    assert all(rule_of(lambda given, kind=kind: kind(given)) == ELEMENTWISE for kind in plain)
    assert rule_of(RULES["muon"]) == Rule(matrices=True, others=False)
    assert rule_of(RULES["adafactor"]) == rule_of(by_dimensions) == Rule(matrices=True, others=True)


@pytest.mark.parametrize("kind", FUSED)
def test_an_implementation_that_nobody_chose_is_the_fused_one_and_one_that_somebody_chose_stays(kind: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, dtype=torch.float64, generator=generator)
    steps = [torch.randn(40, dtype=torch.float64, generator=generator) for _ in range(3)]
    ends = []
    for said in ({}, {"foreach": False}, {"foreach": True}, {"fused": False}, {"differentiable": False}):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=1e-2, weight_decay=0.1, **said)
        fuse(optimizer)
        assert optimizer.param_groups[0]["fused"] == (said.get("fused") if "fused" in said or "foreach" in said else True)
        for parameter.grad in steps:
            optimizer.step()
        ends.append(parameter.detach())
    assert all(torch.allclose(each, ends[1], rtol=1e-13, atol=1e-15) for each in ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_kernels_round_an_element_alike_wherever_runs_of_whole_alignments_end(kind: Any, dtype: torch.dtype) -> None:
    for lengths in ([7] * 24, [1] * 5 + [3, 17, 1, 40, 64], [*range(1, 17)]):
        generator = torch.Generator().manual_seed(len(lengths))
        cuts = [length * ALIGN for length in lengths]
        start, *gradients = (torch.randn(sum(cuts), generator=generator, dtype=torch.float64).to(dtype) for _ in range(4))
        ends = []
        for split in ([sum(cuts)], cuts, cuts[::-1]):
            flat = start.clone()
            runs = [torch.nn.Parameter(run) for run in flat.split(split)]
            optimizer = kind(runs, lr=1e-2, weight_decay=0.1, fused=True)
            for gradient in gradients:
                for run, part in zip(runs, gradient.split(split), strict=True):
                    run.grad = part
                optimizer.step()
            ends.append(flat)
        assert all(torch.equal(ends[0], each) for each in ends[1:])


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        ("pp2.mb2", "fp32"),
        ("dp2.pp2.z1.mb2", "fp64"),
        *(
            pytest.param(plan, precision, marks=pytest.mark.soak)
            for plan in ("pp2.mb2", "dp2.pp2.z3.mb2", "dp2.pp2.z2.mb2", "pp2.zbv.mb2", "tp2.pp2.mb2")
            for precision in ("fp64", "bf16", "bf16-pure")
        ),
    ],
)
def test_copies_of_a_tied_weight_stay_equal_to_the_bit_and_runs_end_where_no_kernel_rounds_otherwise(
    ranks: Any, plan: str, precision: str
) -> None:
    found = ranks.run(parse_plan(plan).world, copies_after, plan, precision, 20)
    assert all(flags == [True] for _, _, flags in found)
    assert all(length % ALIGN == 0 for _, runs, _ in found for length in runs)
    copies = [copy for each, _, _ in found for copy in each]
    by_shard = len(copies) // 2
    assert by_shard and all(torch.equal(copies[at], copies[at + by_shard]) for at in range(by_shard))


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_kernels_round_alike_in_runs_of_any_lengths_that_the_layout_allows(kind: Any, dtype: torch.dtype) -> None:
    ends = []
    for cut in (ALIGN * 100, ALIGN, ALIGN * 3):
        generator = torch.Generator().manual_seed(0)
        flat = torch.randn(ALIGN * 100, generator=generator, dtype=dtype)
        optimizer = kind([torch.nn.Parameter(run) for run in flat.split(cut)], lr=1e-2, weight_decay=0.1, fused=True)
        for _ in range(4):
            gradient = torch.randn(flat.numel(), generator=generator, dtype=dtype)
            for run, part in zip(optimizer.param_groups[0]["params"], gradient.split(cut), strict=True):
                run.grad = part
            optimizer.step()
        ends.append(flat)
    assert all(torch.equal(ends[0], other) for other in ends)


def test_the_update_of_a_trainer_is_fused_where_nobody_chose(ranks: Any) -> None:
    assert ranks.run(1, said_of_update, "given AdamW by dimensions") == [[True, True]]


class Joined(torch.optim.SGD):
    """Divides by the norm of all gradients: no tensor is updated by itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in held]).norm()
        for each in held:
            each.grad = each.grad / norm
        super().step()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda given: Joined(given, lr=0.1), "depends on others"),
        (lambda given: torch.optim.LBFGS(given), "closure"),
        (lambda given: torch.optim.Muon(given), "Muon only supports 2D"),
        (lambda given: torch.optim.SparseAdam(list(given)), "dense gradients"),
    ],
)
def test_an_optimizer_that_no_part_of_a_model_can_follow_is_refused_in_one_line(make: Any, line: str) -> None:
    with pytest.raises(InputError, match=line) as refused:
        rule_of(make)
    assert "\n" not in str(refused.value)
