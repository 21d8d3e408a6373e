"""Shared experts are computed while tokens are on their way to routed experts, and a step is that of one device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from equality import alone, anatomy_of, check, made, make_optimizer, measured
from moe_models import REORDERED, build_mixture
from torch import nn
from world_group import between_hosts

from meshwright.runtime.expert_parallel.shared_experts import (
    RowExchange,
    SharedExpertOverlap,
    SharedExperts,
    find_shared_experts,
)
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

PLANS = [
    ("glm4-moe", "tp2.sp.ep2.mb2"),
    ("shared-experts", "dp2.ep2.z3.rc-full"),
    ("qwen2-moe", "tp2.ep2.mb2"),
    ("qwen2-moe", "dp2.ep2.z3.rc-full"),
    ("llama4", "dp2.ep2.z3.rc-full"),
]
SOAKED = [
    (name, plan)
    for name in ("shared-experts", "qwen2-moe", "llama4")
    for plan in (
        "dp2.ep2.z1",
        "tp2.ep2.mb2",
        "dp2.pp2.ep2.z1.mb2",
        "dp2.tp2.ep4.z1",
        "dp2.ep2.z2.rc-sac",
        "cp2.ep2",
        "pp2.dp2.ep2.z1.zbh1",
        "dp2.ep2.z1.off-activations",
    )
    if (name, plan) not in PLANS
]


def train_and_record(name: str, plan: str) -> dict[str, Any]:
    """On every rank: a training, and what happens in its steps."""
    events: list[str] = []
    start, end = RowExchange.start, RowExchange.end

    def record(event: str, function: Any) -> Any:
        def recorded(*args: Any) -> Any:
            events.append(event)
            return function(*args)

        return recorded

    model = made(name, "fp64")
    with between_hosts():
        trainer = parallelize(model, make_optimizer, plan, precision="fp64", clip=1.0, anatomy=anatomy_of(name))
        for path, module in model.named_modules():
            if path.endswith((".shared_experts", ".shared_expert")):
                module.register_forward_hook(lambda *_: events.append("shared"))
        for path, parameter in model.named_parameters():
            if re.search(r"shared_experts?\.down_proj", path):
                parameter.register_hook(lambda gradient: events.append("gradient"))
        RowExchange.start, RowExchange.end = record("start", start), record("end", end)  # type: ignore[method-assign]
        try:
            found = measured(trainer, name, 2)
        finally:
            RowExchange.start, RowExchange.end = start, end  # type: ignore[method-assign]
    return {**found, "events": events}


def check_plan(ranks: Any, name: str, plan: str) -> None:
    found = ranks.run(parse_plan(plan).world, train_and_record, name, plan)
    check(alone(name, "fp64", 2), found, "fp64")
    for each in found:
        kinds = [kind for kind in each["events"] if kind != "gradient"]
        whole = " ".join(each["events"])
        assert kinds.count("start") == kinds.count("end")
        assert whole.count("start shared end") == kinds.count("shared") > 0, whole
        if "z3" not in plan and "zb" not in plan and "sac" not in plan:
            assert "start gradient end" in whole, whole


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_shared_experts_overlap_with_the_dispatch_and_compute_what_one_device_does(
    ranks: Any, name: str, plan: str
) -> None:
    check_plan(ranks, name, plan)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "plan"), SOAKED)
def test_shared_experts_overlap_under_more_plans(ranks: Any, name: str, plan: str) -> None:
    check_plan(ranks, name, plan)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("shared-experts", SharedExperts("shared_experts", False)),
        ("glm4-moe", SharedExperts("shared_experts", False)),
        ("llama4", SharedExperts("shared_expert", False, reads_rows=True)),
        ("qwen2-moe", SharedExperts("shared_expert", True)),
        ("mixtral", None),
    ],
)
def test_shared_experts_are_found_by_a_run_on_the_meta_device(name: str, found: SharedExperts | None) -> None:
    layer = build_mixture(name).get_submodule("model.layers.1")
    mixture = layer.get_submodule("feed_forward" if name == "llama4" else "mlp")
    before = {key: value.clone() for key, value in mixture.state_dict().items()}
    assert find_shared_experts(mixture, "experts") == found
    assert all(map(torch.equal, before.values(), mixture.state_dict().values()))


@pytest.mark.parametrize("name", REORDERED)
def test_shared_experts_whose_result_is_read_early_or_input_changed_run_as_called(ranks: Any, name: str) -> None:
    found = ranks.run(2, train_and_record, name, "dp2.ep2.z1")
    check(alone(name, "fp64", 2), found, "fp64")
    for each in found:
        assert "shared" in each["events"] and "start" not in each["events"]  # the dispatch is one call


class Mixture(nn.Module):
    """A mixture whose shared experts read `read`, and have dropout `p`. `is_first`: they are called first."""

    def __init__(self, read: str, p: float = 0.0, is_first: bool = False) -> None:
        super().__init__()
        self.read, self.is_first = read, is_first
        self.experts, self.shared = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(p))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.call_shared_first(hidden) if self.is_first else self.call_shared_last(hidden)

    def call_shared_last(self, hidden: torch.Tensor) -> torch.Tensor:
        routed = self.experts(hidden)
        if self.read == "changed":
            hidden.add_(1)
        read = {"routed": routed, "detached": hidden.detach(), "rows": hidden.reshape(-1, 4)}.get(self.read, hidden)
        return routed + self.shared(read).view(hidden.shape)

    def call_shared_first(self, hidden: torch.Tensor) -> torch.Tensor:
        shared = self.shared(hidden)
        if self.read == "result":
            hidden = hidden + shared
        if self.read == "changed" or (self.read == "changed in evaluation" and not self.training):
            hidden.add_(1)
        if self.read == "passed":
            return self.experts(shared) + shared
        if self.read == "written":
            shared.mul_(2)
        return self.experts(hidden) * 2 + shared


@pytest.mark.parametrize(
    ("mixture", "found"),
    [
        (Mixture("input"), SharedExperts("shared", False)),
        (Mixture("rows"), SharedExperts("shared", False, reads_rows=True)),
        (Mixture("input", 0.5), None),
        (Mixture("routed"), None),
        (Mixture("changed"), None),
        (Mixture("detached"), None),
        (Mixture("input", is_first=True), SharedExperts("shared", True)),
        (Mixture("input", 0.5, is_first=True), None),
        (Mixture("result", is_first=True), None),
        (Mixture("passed", is_first=True), None),
        (Mixture("written", is_first=True), None),
        (Mixture("changed", is_first=True), None),
        (Mixture("changed in evaluation", is_first=True), None),
    ],
    ids=lambda value: f"{value.read}-{value.is_first}" if isinstance(value, Mixture) else "",
)
def test_shared_experts_that_need_another_order_are_not_found(mixture: Mixture, found: SharedExperts | None) -> None:
    assert find_shared_experts(mixture, "experts") == found


def overlapped(mixture: Mixture, x: torch.Tensor, found: SharedExperts) -> tuple[list[torch.Tensor], list[str]]:
    """The result of the mixture and its gradients, as if `found` had been found, and the order of the computations."""
    order = list[str]()
    overlap = SharedExpertOverlap(mixture, found)
    mixture.shared.register_forward_hook(lambda *_: order.append("shared"))
    mixture.experts.register_forward_pre_hook(lambda *_: order.append("start"))
    mixture.experts.register_forward_hook(lambda *_: (overlap.compute(), order.append("end"))[0])
    return computed(mixture, x), order


def computed(mixture: Mixture, x: torch.Tensor) -> list[torch.Tensor]:
    if mixture.read == "changed":  # autograd refuses a backward after this change
        with torch.no_grad():
            return [mixture(x.clone())]
    result = mixture(x.clone())
    return [result, *torch.autograd.grad(result.square().sum(), (x, *mixture.parameters()))]


@pytest.mark.parametrize("read", ["input", "rows", "routed", "changed"])
def test_a_result_computed_ahead_is_used_only_for_the_same_values(read: str) -> None:
    mixture, x = Mixture(read), torch.randn(2, 3, 4, requires_grad=True)
    right = computed(mixture, x)
    found, order = overlapped(mixture, x, SharedExperts("shared", False, reads_rows=read == "rows"))
    assert all(map(torch.equal, found, right))
    assert order == ["start", "shared", "end"] + ["shared"] * (read in ("routed", "changed"))


@pytest.mark.parametrize("read", ["input", "result", "passed", "written"])
def test_a_deferred_result_is_computed_at_its_first_use(read: str) -> None:
    """Even if a run did not show this use."""
    mixture, x = Mixture(read, is_first=True), torch.randn(2, 3, 4, requires_grad=True)
    right = computed(mixture, x)
    found, order = overlapped(mixture, x, SharedExperts("shared", True))
    assert all(map(torch.equal, found, right)) and type(found[0]) is torch.Tensor
    assert order == (["start", "shared", "end"] if read in ("input", "passed") else ["shared", "start", "end"])


def test_a_change_of_the_input_that_the_run_did_not_show_is_no_wrong_result() -> None:
    mixture = Mixture("changed", is_first=True)
    with pytest.raises(AssertionError, match="changes the input of its shared experts"):
        overlapped(mixture, torch.randn(2, 3, 4, requires_grad=True), SharedExperts("shared", True))
