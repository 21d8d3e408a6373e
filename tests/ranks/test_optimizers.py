"""Optimizers that need whole tensors, and those that a person brings: what one device computes, under every kind of
plan."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import check
from optimizer_reference import OWN, RULES, alone, by_dimensions, copies_after, go_on, said_of_update, train

from meshwright.core.errors import InputError
from meshwright.runtime.optim import rule_probe
from meshwright.runtime.optim.param_groups import ParamGroups
from meshwright.runtime.optim.rule_probe import ELEMENTWISE, FUSABLE_OPTIMIZERS, UpdateRule, enable_fused_kernels
from meshwright.runtime.shard.optimizer_shard import ShardParam
from meshwright.spec.layout import ALIGN_NUMEL
from meshwright.spec.plan import parse_plan

SAMPLE = [
    ("muon", "llama", "dp2.tp2.z3.mb2"), ("muon", "llama-tied", "dp2.pp2.z2"), ("adafactor", "llama", "dp2.z3"),
    ("given AdamW by dimensions", "llama", "dp2.z2"), ("given AdamW by path", "llama", "dp2.z1"),
    ("own AdamW by name", "llama", "dp2.tp2.z3"), ("own AdamW by name", "llama-tied", "pp2"),
    ("own AdamW by name", "gpt2", "dp2.z1.off-optimizer-disk"), ("own Muon by name", "llama", "dp2.pp2.z1"),
]  # fmt: skip
PLANS = ("dp1", "dp2", "dp2.z1", "dp4.z2", "dp2.z3.mb2", "dp2x2.z1", "tp2.mb4", "tp4.sp.mb4", "pp4", "dp2.tp2.z3.mb2",
         "tp2.pp2.mb2.interleaved2", "dp2.pp2.z1.zbh1", "dp2.tp2.pp2.z2.mb2", "dp2.cp2.z1", "pp2.zbv",
         "dp2.z1.zw3-1")  # fmt: skip

# A key's bias moves no score: its gradient is rounding, of which Adafactor makes whole steps. It trains the models
# without one.
PAIRS = [
    (rule, model)
    for rule in sorted(RULES | OWN)
    for model in ("llama", "llama-tied", *(() if rule == "adafactor" else ("gpt2", "bert")))
]


SHAPES = {"blocks.0.a": (8, 6), "blocks.0.b": (8,), "blocks.1.a": (8, 6), "blocks.1.b": (8,), "head": (9, 8)}


def groups_of(make: Any) -> ParamGroups:
    """What the door is shown of a small model."""
    return ParamGroups(make, SHAPES, {name: name.startswith("blocks") for name in SHAPES})


def rule_of(make: Any) -> UpdateRule:
    return rule_probe.probe_update_rule(groups_of(make))


@functools.cache
def expected(rule: str, model: str) -> dict[str, Any]:
    return alone(rule, model, steps=2)


@pytest.mark.parametrize(("rule", "model", "plan"), SAMPLE)
@pytest.mark.covering(1)
def test_a_rule_updates_whole_tensors_as_one_device_does(ranks: Any, rule: str, model: str, plan: str) -> None:
    check(expected(rule, model), ranks.run(parse_plan(plan).world, train, rule, model, plan, 2), "fp64")


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("rule", "model"), PAIRS)
def test_every_rule_under_every_kind_of_plan_updates_as_one_device_does(
    ranks: Any, rule: str, model: str, plan: str
) -> None:
    check(expected(rule, model), ranks.run(parse_plan(plan).world, train, rule, model, plan, 2), "fp64")


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("muon", "dp2.tp2.z1.mb2", "dp2.z3"),
        pytest.param("adafactor", "dp2.z3", "dp2.tp2.z1.mb2", marks=pytest.mark.soak),
    ],
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
    plain = (
        torch.optim.SGD,
        torch.optim.NAdam,
        torch.optim.Adagrad,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.Adadelta,
    )
    assert all(rule_of(lambda given, kind=kind: kind(given)) == ELEMENTWISE for kind in plain)
    assert rule_of(RULES["muon"]) == UpdateRule(matrices=True, others=False)
    assert rule_of(RULES["adafactor"]) == UpdateRule(matrices=True, others=True)
    assert rule_of(by_dimensions) == rule_of(RULES["given AdamW by path"]) == ELEMENTWISE


@pytest.mark.parametrize("kind", FUSABLE_OPTIMIZERS)
def test_the_optimizer_is_fused_unless_the_user_chose_an_implementation(kind: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, dtype=torch.float64, generator=generator)
    steps = [torch.randn(40, dtype=torch.float64, generator=generator) for _ in range(3)]
    ends = []
    for said in ({}, {"foreach": False}, {"foreach": True}, {"fused": False}, {"differentiable": False}):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=1e-2, weight_decay=0.1, **said)
        enable_fused_kernels(optimizer)
        assert optimizer.param_groups[0]["fused"] == (
            said.get("fused") if "fused" in said or "foreach" in said else True
        )
        for parameter.grad in steps:
            optimizer.step()
        ends.append(parameter.detach())
    assert all(torch.allclose(each, ends[1], rtol=1e-13, atol=1e-15) for each in ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", FUSABLE_OPTIMIZERS)
def test_fused_kernels_round_an_element_alike_wherever_runs_of_whole_alignments_end(
    kind: Any, dtype: torch.dtype
) -> None:
    for lengths in ([7] * 24, [1] * 5 + [3, 17, 1, 40, 64], [*range(1, 17)]):
        generator = torch.Generator().manual_seed(len(lengths))
        cuts = [length * ALIGN_NUMEL for length in lengths]
        start, *gradients = (
            torch.randn(sum(cuts), generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)
        )
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
        pytest.param("dp2.pp2.z1.mb2", "fp64", marks=pytest.mark.soak),
        *(
            pytest.param(plan, precision, marks=pytest.mark.soak)
            for plan in ("pp2.mb2", "dp2.pp2.z3.mb2", "dp2.pp2.z2.mb2", "pp2.zbv.mb2", "tp2.pp2.mb2")
            for precision in ("fp64", "bf16", "bf16-pure")
        ),
    ],
)
def test_replicas_of_a_tied_weight_stay_bit_identical(ranks: Any, plan: str, precision: str) -> None:
    found = ranks.run(parse_plan(plan).world, copies_after, plan, precision, 20)
    assert all(flags == [True] for _, _, flags in found)
    assert all(length % ALIGN_NUMEL == 0 for _, runs, _ in found for length in runs)
    copies = [copy for each, _, _ in found for copy in each]
    by_shard = len(copies) // 2
    assert by_shard and all(torch.equal(copies[at], copies[at + by_shard]) for at in range(by_shard))


@pytest.mark.parametrize("kind", FUSABLE_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_kernels_round_alike_in_runs_of_any_lengths_that_the_layout_allows(kind: Any, dtype: torch.dtype) -> None:
    ends = []
    for cut in (ALIGN_NUMEL * 100, ALIGN_NUMEL, ALIGN_NUMEL * 3):
        generator = torch.Generator().manual_seed(0)
        flat = torch.randn(ALIGN_NUMEL * 100, generator=generator, dtype=dtype)
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


def test_groups_whose_states_are_of_unlike_kinds_are_given_whole_tensors() -> None:
    def make(given: Any) -> torch.optim.Optimizer:
        late, rest = ([each for each in given if ("blocks.1" in each.path) is kind] for kind in (True, False))
        return torch.optim.SGD([{"params": late, "momentum": 0.0}, {"params": rest}], lr=0.1, momentum=0.9)

    assert rule_of(make) == UpdateRule(matrices=True, others=True)


def test_groups_by_parameter_name_have_the_ranges_of_their_parameters() -> None:
    own = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    names = {id(tensor): name for name, tensor in own.items()}

    def of_own(given: Any) -> torch.optim.Optimizer:
        late = [tensor for name, tensor in own.items() if name.startswith("blocks.1")]
        rest = [tensor for name, tensor in own.items() if not name.startswith("blocks.1")]
        return torch.optim.AdamW([{"params": late, "lr": 0.5}, {"params": rest}], lr=0.1)

    def by_saying(given: Any) -> torch.optim.Optimizer:
        late, rest = (
            [each for each in given if getattr(each, "path", "").startswith("blocks.1") is kind]
            for kind in (True, False)
        )
        return torch.optim.Adagrad([{"params": late, "lr": 0.5}, {"params": rest}], lr=0.1)

    for make in (of_own, by_saying):
        groups = ParamGroups(make, SHAPES, {name: name.startswith("blocks") for name in SHAPES}, names)
        assert groups.group_of == {name: 0 if name.startswith("blocks.1") else 1 for name in SHAPES}
        runs = [
            ShardParam(torch.zeros(4), True, "head"),
            ShardParam(torch.zeros(4), False, "blocks.1.b"),
            ShardParam(torch.zeros(2), True),
        ]
        late, rest = groups.build_optimizer(runs).param_groups
        assert late["lr"] == 0.5 and [id(each) for each in late["params"] if each.path] == [id(runs[1])]
        assert rest["lr"] == 0.1 and id(runs[0]) in map(id, rest["params"])
        assert len(late["params"]) + len(rest["params"]) == 3


STRANGER = torch.nn.Parameter(torch.zeros(3, 3))
ALWAYS_THIS = torch.optim.AdamW([STRANGER])


class Still(torch.optim.SGD):
    """Its groups have all, and it updates none."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda given: ALWAYS_THIS, r"a tensor of shape \(3, 3\) that is not a parameter of the model"),
        (
            lambda given: torch.optim.AdamW([each for each in given if each.ndim > 1]),
            "not given 2 of the 5 trainable parameters",
        ),
        (Still, "did not change a tensor of the group of blocks.0.a"),
        (lambda given: Joined(given, lr=0.1), "depends on other tensors"),
        (lambda given: torch.optim.LBFGS(given), "closure"),
        (lambda given: torch.optim.Muon(given), "Muon only supports 2D"),
        (lambda given: torch.optim.SparseAdam(list(given)), "dense gradients"),
    ],
)
def test_an_optimizer_that_no_part_of_a_model_can_follow_is_refused_in_one_line(make: Any, line: str) -> None:
    with pytest.raises(InputError, match=line) as refused:
        rule_of(make)
    assert "\n" not in str(refused.value)


def test_one_optimizer_for_every_call_and_one_that_starts_with_states_are_refused() -> None:
    own = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    names = {id(tensor): name for name, tensor in own.items()}
    in_block = {name: name.startswith("blocks") for name in SHAPES}
    made = torch.optim.AdamW(own.values())
    with pytest.raises(InputError, match="returns the same optimizer each time"):
        rule_probe.probe_update_rule(ParamGroups(lambda given: made, SHAPES, in_block, names))
    with pytest.raises(InputError, match="Adagrad creates its states in its constructor"):
        rule_probe.probe_update_rule(
            ParamGroups(lambda given: torch.optim.Adagrad(own.values()), SHAPES, in_block, names)
        )
