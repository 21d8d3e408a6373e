"""A model that is built without memory begins, on every rank and under every plan, as one that is built whole."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from equality import SIZES, anatomy_of, make_model, make_optimizer, measured
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.core.errors import InputError
from meshwright.models.registry import build_reference_model
from meshwright.runtime.deferred_init import build_deferred, deferred_init, deferred_init_of
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

FEW = [("llama-tied", "pp2.dualpipev")]
MORE = [
    ("hf-gpt2", "tp2.z1"), ("mixture", "dp2.ep2.z1"),
    ("llama", "dp2.z3"), ("llama", "tp2.sp"), ("llama", "dp2.off-parameters.z3"), ("llama", "dp2.off-optimizer"),
    ("llama-tied", "pp2"), ("llama-tied", "tp2.pp2"), ("gpt2", "dp2.tp2.z1"), ("bert", "tp2"), ("convnet", "tp2"),
    ("hf-llama", "dp2.pp2.z2"), ("mixture", "tp2"), ("qwen3-moe", "ep2.tp2"),
]  # fmt: skip


def both(name: str, plan: str, precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is measured of the model built whole, and of the one that begins later."""
    whole = parallelize(make_model(name), make_optimizer, plan, precision=precision, clip=1.0, anatomy=anatomy_of(name))
    first = measured(whole, name, 2)
    whole.close()
    model = build_deferred(functools.partial(make_model, name), 0)
    assert all(parameter.is_meta for parameter in model.parameters())
    later = parallelize(model, make_optimizer, plan, precision=precision, clip=1.0)
    second = measured(later, name, 2)
    later.close()
    return first, second


@pytest.mark.parametrize(("name", "plan"), [*FEW, *(pytest.param(*one, marks=pytest.mark.soak) for one in MORE)])
def test_a_model_that_begins_later_has_the_same_bits_as_one_built_whole(name: str, plan: str, ranks: Any) -> None:
    for precision in ("fp32", "bf16") if name == "llama" else ("fp32",):
        first, second = ranks.run(parse_plan(plan).world, both, name, plan, precision)[0]
        assert (
            first["first"] == second["first"]
            and first["losses"] == second["losses"]
            and first["norms"] == second["norms"]
        )
        assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])


class Scaled(nn.Module):
    """Parameters that begin in ways of their own: copied layers, tied by one object, drawn before they are registered,
    read from one another."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.randn(8, 8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first.weight = self.second.weight = shared
        self.copied = copy.deepcopy(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
        self.padded, self.ones = nn.Embedding(9, 8, padding_idx=2), nn.Parameter(torch.ones(300, 300))
        nn.init.orthogonal_(self.copied[0].weight)
        nn.init.trunc_normal_(self.padded.weight, std=0.5)
        nn.init.eye_(self.second.weight)
        with torch.no_grad():
            self.padded.weight[3].copy_(self.padded.weight[1] * 2)
            self.first.bias.mul_(0.5).add_(torch.arange(8.0))
        self.register_buffer("drawn", torch.rand(3))


def test_every_way_to_begin_is_followed_and_what_is_drawn_after_it_is_the_same() -> None:
    torch.manual_seed(5)
    whole, after = Scaled(), torch.rand(2)
    later = build_deferred(Scaled, 5)
    assert torch.equal(after, torch.rand(2)) and torch.equal(whole.drawn, later.drawn)
    assert later.first.weight is later.second.weight and all(parameter.is_meta for parameter in later.parameters())
    for name, parameter in whole.named_parameters():
        seen = deferred_init_of(later).seen(later.get_parameter(name))
        assert seen is not None and torch.equal(seen.value(), parameter), name


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if self.linear.weight.sum() > 0:
            nn.init.zeros_(self.linear.weight)


def test_a_model_whose_code_asks_for_values_is_built_whole() -> None:
    torch.manual_seed(3)
    whole, model = Asking(), build_deferred(Asking, 3)
    assert torch.equal(whole.linear.weight, model.linear.weight)
    with pytest.raises(Exception, match=r"meta|item"), deferred_init():
        Asking()


def test_memory_while_a_model_begins_later_is_that_of_one_parameter() -> None:
    """Of twelve matrices never two are there at once."""

    def matrices() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12)))

    seen = Peak()
    with seen:
        model = build_deferred(matrices, 1)
        for parameter in model.parameters():
            deferred_init_of(model).seen(parameter).value()
    assert seen.most <= 3 * 512 * 512 * 4, "the one that is made, and what draws its numbers"


class Peak(TorchDispatchMode):
    """Most bytes of real tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


def test_ranks_that_would_begin_with_other_numbers_are_refused_in_one_line(ranks: Any) -> None:
    with pytest.raises(Exception, match="ranks disagree on the weights"):
        ranks.run(2, other_seeds)


def other_seeds() -> None:
    model = build_deferred(
        functools.partial(build_reference_model, {**SIZES, "kind": "llama"}), torch.distributed.get_rank()
    )
    parallelize(model, make_optimizer, "dp2")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def test_operations_on_parameters_are_recorded_in_the_context_and_refused_after_it() -> None:
    torch.manual_seed(2)
    whole = Small().bfloat16().double()
    nn.init.ones_(whole.last.weight)
    torch.manual_seed(2)
    with deferred_init():
        model = Small().bfloat16().double()
        nn.init.ones_(model.last.weight)
    found = parallelize(model, make_optimizer, "dp1", precision="fp64", loss=square).full_state_dict()
    assert found is not None and all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    for change, says in (
        (Small.double, "first.weight became float64"),
        (lambda model: nn.init.ones_(model.last.bias), "last.bias was written to"),
    ):
        with deferred_init():
            model = Small()
        change(model)
        with pytest.raises(InputError, match=f"{says} after `with deferred_init"):
            parallelize(model, make_optimizer, "dp1", precision="fp64", loss=square)


def square(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output**2).mean()
