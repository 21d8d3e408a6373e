"""Shared experts are computed while tokens are on their way to routed experts, and a step is that of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import alone, anatomy_of, check, made, make_optimizer, measured
from moe_models import build_mixture
from torch import nn
from world_group import between_hosts

from meshwright.runtime.expert_parallel.shared_experts import RowExchange, SharedExpertOverlap, find_shared_experts
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

PLANS = ["tp2.sp.ep2.mb2", "dp2.ep2.z3.rc-full"]
SOAKED = [
    "dp2.ep2.z1",
    "tp2.ep2.mb2",
    "dp2.pp2.ep2.z1.mb2",
    "dp2.tp2.ep4.z1",
    "dp2.ep2.z2.rc-sac",
    "cp2.ep2",
    "pp2.dp2.ep2.z1.zbh1",
    "dp2.ep2.z1.off-activations",
]


def model_of(plan: str) -> str:
    """Latent attention of transformers allows no sequence parallelism."""
    return "glm4-moe" if ".sp" in plan else "shared-experts"


def train_and_record(plan: str) -> dict[str, Any]:
    """On every rank: a training, and what happens in its steps."""
    events: list[str] = []
    start, end, compute = RowExchange.start, RowExchange.end, SharedExpertOverlap.compute

    def record(name: str, function: Any) -> Any:
        def recorded(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return recorded

    kind = model_of(plan)
    model = made(kind, "fp64")
    with between_hosts():
        trainer = parallelize(model, make_optimizer, plan, precision="fp64", clip=1.0, anatomy=anatomy_of(kind))
        for name, parameter in model.named_parameters():
            if "shared_experts.down_proj" in name:
                parameter.register_hook(lambda gradient: events.append("gradient"))
        RowExchange.start, RowExchange.end = record("start", start), record("end", end)  # type: ignore[method-assign]
        SharedExpertOverlap.compute = record("shared", compute)  # type: ignore[method-assign]
        try:
            found = measured(trainer, kind, 2)
        finally:
            RowExchange.start, RowExchange.end = start, end  # type: ignore[method-assign]
            SharedExpertOverlap.compute = compute  # type: ignore[method-assign]
    return {**found, "events": events}


def check_plan(ranks: Any, plan: str) -> None:
    found = ranks.run(parse_plan(plan).world, train_and_record, plan)
    check(alone(model_of(plan), "fp64", 2), found, "fp64")
    for each in found:
        kinds = [kind for kind in each["events"] if kind != "gradient"]
        whole = " ".join(each["events"])
        assert "start shared end" in whole and kinds.count("start") == kinds.count("end")
        if "z3" not in plan and "zb" not in plan and "sac" not in plan:
            assert "start gradient end" in whole, whole


@pytest.mark.parametrize("plan", PLANS)
def test_shared_experts_overlap_with_the_dispatch_and_compute_what_one_device_does(ranks: Any, plan: str) -> None:
    check_plan(ranks, plan)


@pytest.mark.soak
@pytest.mark.parametrize("plan", SOAKED)
def test_shared_experts_overlap_under_more_plans(ranks: Any, plan: str) -> None:
    check_plan(ranks, plan)


@pytest.mark.parametrize(
    ("name", "found"),
    [("shared-experts", "shared_experts"), ("glm4-moe", "shared_experts"), ("qwen2-moe", ""), ("mixtral", "")],
)
def test_shared_experts_are_found_if_they_are_called_after_the_routed_ones(name: str, found: str) -> None:
    mixture = build_mixture(name).get_submodule("model.layers.1.mlp")
    before = {key: value.clone() for key, value in mixture.state_dict().items()}
    assert find_shared_experts(mixture, "experts") == found
    assert all(map(torch.equal, before.values(), mixture.state_dict().values()))


class Mixture(nn.Module):
    """A mixture whose shared experts read `read`, and have dropout `p`."""

    def __init__(self, read: str, p: float = 0.0) -> None:
        super().__init__()
        self.read = read
        self.experts, self.shared = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(p))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        routed = self.experts(hidden)
        if self.read == "changed":
            hidden.add_(1)
        return routed + self.shared(routed if self.read == "routed" else hidden)


@pytest.mark.parametrize(("read", "p", "found"), [("input", 0.0, "shared"), ("input", 0.5, ""), ("routed", 0.0, "")])
def test_shared_experts_that_need_another_order_are_not_found(read: str, p: float, found: str) -> None:
    assert find_shared_experts(Mixture(read, p), "experts") == found


@pytest.mark.parametrize("read", ["input", "routed", "changed"])
def test_a_result_computed_ahead_is_used_only_for_the_same_values(read: str) -> None:
    mixture, x = Mixture(read), torch.randn(2, 4)
    right, calls = mixture(x.clone()), list[int]()
    overlap = SharedExpertOverlap(mixture, mixture.shared)
    mixture.shared.register_forward_hook(lambda *_: calls.append(1))
    mixture.experts.register_forward_hook(lambda *_: overlap.compute())
    assert torch.equal(mixture(x.clone()), right) and len(calls) == (1 if read == "input" else 2)
