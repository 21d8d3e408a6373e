"""What a proof of large weights costs, and that it sees what a proof of small ones sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.analysis.analyze import GATHERING_UNVERIFIED_REASON, analyze_model
from meshwright.analysis.graph import TpSplit
from meshwright.analysis.run_comparison import MAX_COMPARED_NUMEL, GradProjection

WIDTH = 1024
WORDS = 200_000


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inner, weight)
        return functional.linear(inner, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inner, weight = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).T @ inner.flatten(0, -2)
        return gradient @ weight, of_weight / of_weight.norm()


class Down(nn.Linear):
    """Computes a share forward, but the gradient of a share is not a share of the gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Normed.apply(input, self.weight)  # type: ignore[no-any-return,no-untyped-call]


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = (Down if way == "gradient" else nn.Linear)(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.up(hidden)
        if self.way == "written":
            with torch.no_grad():
                self.up.weight.data.mul_(1 + 0.1 * self.up.weight.shape[0] / WIDTH)
        return hidden + self.down(functional.gelu(inner))


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Counted(TorchDispatchMode):
    """The elements that operations made, but for views."""

    made = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and not function._schema.is_mutable:
            self.made += sum(
                one.numel() for one in tree_leaves(result) if isinstance(one, torch.Tensor) and not one.is_meta
            )
        return result


def model_of(way: str = "plain") -> Model:
    with torch.device("meta"):
        return Model(way)


def test_a_proof_makes_no_gradient_as_large_as_the_vocabulary() -> None:
    model, counted = model_of(), Counted()
    with counted:
        found = analyze_model(model, use_random_weights=True)
    assert len(found.regions) == 3
    assert not found.unsupported.get("proof")
    assert not found.against_sequence
    block = sum(one.numel() for one in model.blocks[0].parameters())
    assert all(one.numel() > MAX_COMPARED_NUMEL for one in model.blocks[0].parameters())
    assert counted.made < WORDS * WIDTH / 2, f"{counted.made / block:.1f} numbers for each parameter of a block"


def test_a_gradient_of_a_large_weight_that_is_no_share_is_refused() -> None:
    found = analyze_model(model_of("gradient"), use_random_weights=True)
    assert not found.regions
    assert any("the gradient of blocks.0.down.weight differs" in line for line in found.findings), found.findings


def test_a_large_weight_that_a_share_writes_to_otherwise_is_refused() -> None:
    found = analyze_model(model_of("written"), use_random_weights=True)
    assert not found.regions
    assert any("writes other values to blocks.0.up.weight" in line for line in found.findings), found.findings


def test_only_a_plan_that_gathers_weights_runs_the_model_in_eval_mode() -> None:
    class Writes(Model):
        def forward(self, input_ids: torch.Tensor) -> Any:
            if not self.training:
                with torch.no_grad():
                    self.head.weight.mul_(0.5)
            return super().forward(input_ids)

    with torch.device("meta"):
        model = Writes("plain")
    written = analyze_model(model).unsupported["gathering"]
    assert "head.weight" in written
    assert analyze_model(model, gathers=False).unsupported["gathering"] == GATHERING_UNVERIFIED_REASON
    assert "gathering" not in analyze_model(model_of()).unsupported


def test_projections_are_products_of_the_whole_gradient() -> None:
    torch.manual_seed(0)
    given, ids, other = (
        torch.randn(2, 5, 12, dtype=torch.float64),
        torch.randint(0, 16, (2, 5)),
        torch.randn(16, 12, dtype=torch.float64),
    )
    for dim in (0, 1):
        weight = torch.randn(16, 12, dtype=torch.float64, requires_grad=True)

        def loss(weight: torch.Tensor = weight) -> torch.Tensor:
            looked_up = functional.embedding(ids, weight, 3)
            turned = torch.addmm(other[0], looked_up.flatten(0, 1) @ other.T, weight, alpha=0.5)
            return (
                functional.linear(given, weight).square().sum() + turned.sin().sum() + (weight * other).tanh().sum()
            ) * 0.1

        (whole,) = torch.autograd.grad(loss(), [weight])
        with GradProjection({"w": weight}, {"w": TpSplit(dim)}) as projected:
            output = loss()
        own, zeros = torch.autograd.grad(output, [weight, projected.leaves()["w"]])
        random = projected.probes[id(weight)].random
        wanted = random.T @ whole if dim else whole @ random
        found = projected.projection("w", own, zeros)
        assert found is not None
        assert float((found - wanted).norm() / wanted.norm()) < 1e-12
        assert float((own - whole).norm()) > 1e-3, "layers still computed the whole gradient"
