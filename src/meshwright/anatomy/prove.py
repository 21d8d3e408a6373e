"""Proves a region with numbers: the shares that a few pretended ranks compute must sum to what the whole layer computes.

Rule: run the embedding for real, catch what the first block is given, and run that block up to the region's row layer, once whole and once
for each rank with its shares of the weights and its counts of heads. A fused projection that is laid out otherwise than it seemed, or a
count that a forward method takes from elsewhere, shows here, and the region stays whole instead of being silently wrong. Models without
data (on the meta device) are taken at their shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from meshwright.anatomy.nouns import Region, Split, local_slice

TOLERANCE = 1e-3
"""Relative, in float32: rounding stays below 1e-5, a wrong layout is of the order of 1."""

READ = 512
"""Rows of the vocabulary that hold the proof's token ids."""


class Caught(Exception):
    """Leaves a forward with what was looked for. Not an error."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Proof:
    """The first block of a model with the input that it is given."""

    def __init__(self, model: nn.Module, block: str, splits: Mapping[str, Split], vocabulary: int) -> None:
        self.block, self.prefix, self.splits = model.get_submodule(block), block + ".", splits
        device = next(model.parameters()).device
        ids = (torch.arange(14, device=device) * 31 % max(vocabulary, 1)).view(2, 7)
        args, kwargs = caught(self.block.register_forward_pre_hook(_catch_input, with_kwargs=True), lambda: model(ids))
        self.args, self.kwargs = tree_map(_at_least_float32, (args, kwargs))
        self.state = {name: _at_least_float32(tensor) for name, tensor in self.block.state_dict(keep_vars=True).items()}

    def objection(self, region: Region, counts: Mapping[str, int]) -> str | None:
        """Why `region` cannot be shared; None when it can."""
        ranks = next((n for n in range(2, max(counts.values()) + 1) if all(count % n == 0 for count in counts.values())), None)
        if ranks is None:
            return None
        row = self.block.get_submodule(region.rows[0])
        whole = self._row(row, self.state)
        bias = self.state.get(f"{region.rows[0]}.bias")
        try:
            shares = [self._share(region, row, rank, ranks) for rank in range(ranks)]
        except Exception as error:
            return f"it does not run when shared ({str(error).splitlines()[0][:100]})"
        total = sum(shares[1:], shares[0])
        if total.shape != whole.shape:
            return f"shared it gives {tuple(total.shape)} instead of {tuple(whole.shape)}"
        difference = (total - whole if bias is None else total - whole - (ranks - 1) * bias).norm()
        return None if difference <= TOLERANCE * whole.norm() else f"the shares of {ranks} ranks do not sum to the whole"

    def _share(self, region: Region, row: nn.Module, rank: int, ranks: int) -> torch.Tensor:
        mine = {f"{path}.{kind}" for path in (*region.columns, *region.rows) for kind in ("weight", "bias")}
        state = dict(self.state)
        for name in mine & state.keys():
            if self.prefix + name in self.splits:
                state[name] = local_slice(state[name], self.splits[self.prefix + name], rank, ranks)
        with counted(self.block, region, ranks):
            return self._row(row, state)

    def _row(self, row: nn.Module, state: dict[str, torch.Tensor]) -> torch.Tensor:
        handle = row.register_forward_hook(_catch_output)
        args, kwargs = copy.deepcopy((self.args, self.kwargs))  # a cache of keys among them would remember the last run
        result: torch.Tensor = caught(handle, lambda: functional_call(self.block, state, args, kwargs))
        return result


@contextmanager
def lent(model: nn.Module, blocks: str) -> Iterator[None]:
    """Parameters on the meta device, but for those of all blocks behind the first, hold numbers for a while: the same on every rank."""
    random = torch.Generator().manual_seed(0)
    before: list[tuple[nn.Module, str, nn.Parameter, bool]] = []
    numbers: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        if path.startswith(f"{blocks}.") and not f"{path}.".startswith(f"{blocks}.0."):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                before.append((module, name, parameter, path.startswith(f"{blocks}.")))
    try:
        for module, name, parameter, inside in before:
            if id(parameter) not in numbers:
                width = parameter.shape[-1] if parameter.ndim else 1
                tensor = torch.zeros(parameter.shape)  # of a large vocabulary only the rows that the proof reads ever take memory
                tensor.view(-1)[: None if inside else READ * width].normal_(0, width**-0.5, generator=random)
                numbers[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            module._parameters[name] = numbers[id(parameter)]
        yield
    finally:
        for module, name, parameter, _ in before:
            module._parameters[name] = parameter


@contextmanager
def counted(block: nn.Module, region: Region, ranks: int) -> Iterator[None]:
    """The region's counts as a rank has them, for a while."""
    owners = [(block.get_submodule(path), name) for path, name in region.attributes]
    owners += [(layer, "nf") for path in region.columns if hasattr(layer := block.get_submodule(path), "nf")]
    before = [getattr(owner, name) for owner, name in owners]
    try:
        for (owner, name), value in zip(owners, before, strict=True):
            setattr(owner, name, value // ranks)
        yield
    finally:
        for (owner, name), value in zip(owners, before, strict=True):
            setattr(owner, name, value)


def caught(handle: Any, run: Any) -> Any:
    """What the hook behind `handle` raised while `run` ran."""
    try:
        with torch.no_grad():
            run()
    except Caught as found:
        return found.value
    finally:
        handle.remove()
    raise RuntimeError("a module that the first run had called was not called")


def _catch_input(module: nn.Module, args: Any, kwargs: Any) -> None:
    raise Caught((args, kwargs))


def _catch_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    raise Caught(output)


def _at_least_float32(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value
