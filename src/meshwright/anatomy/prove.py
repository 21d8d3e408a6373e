"""Proves a region with numbers: the shares that a few pretended ranks compute must sum to what the whole layer computes.

Rule: run the model for real up to a block, catch what the block is given, and run that block up to the region's row layer, once whole and once
for each rank with its shares of the weights and its counts of heads. A fused projection that is laid out otherwise than it seemed, or a
count that a forward method takes from elsewhere, shows here, and the region stays whole instead of being silently wrong. Models without
data (on the meta device) are run so for their shapes alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from meshwright.anatomy.counts import HeadsTaken, restore, set_counts
from meshwright.anatomy.experts import standing_in
from meshwright.anatomy.inputs import Example, Unasked, arguments, example_of
from meshwright.anatomy.lent import READ
from meshwright.anatomy.nouns import Slice, local_slice
from meshwright.anatomy.regions import Found
from meshwright.anatomy.seen import Given, Trace

TOLERANCE = 1e-3
"""Relative, in float32: rounding stays below 1e-5, a wrong layout is of the order of 1."""


class Caught(Exception):
    """Leaves a forward with what was looked for. Not an error."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value


class Proof:
    """Some blocks of a model with what each is given when it first runs. `seen`: the run without memory, if the model runs so."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        seen: Trace | None,
        vocabulary: int,
        example: Example | None,
        needed: Callable[[str], bool],
    ) -> None:
        """`needed`: whether what lies at a path runs before the last of `blocks` does."""
        self.model = model
        self.shares: Mapping[str, list[tuple[Given, frozenset[str]]]] = seen.shares if seen else {}
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
        self.is_meta = any(tensor.is_meta for name, tensor in tensors.items() if needed(name))
        twins = {id(tensor): self._twin(tensor) for tensor in tensors.values()}
        if seen and "writes" in seen.against:  # a proof leaves the model as it was
            twins = {key: twin.clone() for key, twin in twins.items()}
        self.state = {name: twins[id(tensor)] for name, tensor in tensors.items()}
        device = "meta" if self.is_meta else str(next(tensor.device for name, tensor in tensors.items() if needed(name)))
        args, kwargs = tree_map(_at_least_float32, arguments(example_of(model, example), None, device, min(vocabulary, READ)))
        self.given: dict[str, tuple[Any, Any]] = {}
        handles = [self._catch(path, len(blocks)) for path in blocks]
        try:
            with self._running():
                functional_call(model, self.state, args, kwargs)
        except Caught:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = _at_least_float32(tensor.detach())
        return torch.empty_like(tensor, device="meta") if self.is_meta else tensor

    def _catch(self, path: str, count: int) -> Any:
        def catch(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.given.setdefault(path, copy.deepcopy((args, kwargs)))
            if len(self.given) == count:
                raise Caught

        return self.model.get_submodule(path).register_forward_pre_hook(catch, with_kwargs=True)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(standing_in(self.model))  # experts ask for values or types of their own; what is proven lies around them
            if self.is_meta:
                stack.enter_context(torch.device("meta"))
                stack.enter_context(Unasked())
            yield

    def objection(self, block: str, found: Found) -> str | None:
        """Why `found` cannot be shared by the least number of ranks that could; None when it can."""
        ranks = _least_ranks(found, 2)
        return None if ranks is None else self.try_with(block, found, ranks)

    def try_with(self, block: str, found: Found, ranks: int) -> str | None:
        """Why it cannot be shared by `ranks` ranks."""
        if block not in self.given:
            return "its block does not run"
        region, row = found.region, found.region.rows[0]
        bias = self.state.get(f"{row}.bias")
        try:
            whole = self._row(block, row, self.state, found, 0, 1)
            shares = [self._share(block, found, rank, ranks) for rank in range(ranks)]
        except Exception as error:
            return f"it does not run when shared ({(str(error).splitlines() or [type(error).__name__])[0][:100]})"
        total = sum(shares[1:], shares[0])
        if total.shape != whole.shape:
            return f"shared it gives {tuple(total.shape)} instead of {tuple(whole.shape)}"
        if self.is_meta:
            return None
        if bias is not None:
            total = total - (ranks - 1) * (
                bias
                if isinstance(self.model.get_submodule(region.rows[0]), nn.Linear) or whole.shape[-1] == len(bias)
                else bias.view(-1, *[1] * (whole.ndim - 2))
            )
        return None if (total - whole).norm() <= TOLERANCE * whole.norm() else f"the shares of {ranks} ranks do not sum to the whole"

    def _share(self, block: str, found: Found, rank: int, ranks: int) -> torch.Tensor:
        region, state = found.region, dict(self.state)
        for name, split in found.splits.items():
            state[name] = local_slice(state[name], split, rank, ranks)
        undo = set_counts(self.model, region, ranks)
        for path in region.columns:
            layer = self.model.get_submodule(path)
            if hasattr(layer, "nf"):  # Conv1D of transformers, which reads its width
                undo.append((layer, "nf", layer.nf))
                layer.nf = state[f"{path}.weight"].shape[1]  # type: ignore[assignment]
        handles = [
            self.model.get_submodule(one.path).register_forward_pre_hook(_taking(one, rank, ranks), with_kwargs=True, prepend=True)
            for one in region.slices
        ]
        try:
            return self._row(block, region.rows[0], state, found, rank, ranks)
        finally:
            restore(undo)
            for handle in handles:
                handle.remove()

    def _row(self, block: str, row: str, state: dict[str, torch.Tensor], found: Found, rank: int, ranks: int) -> torch.Tensor:
        """What the row layer gives when the block runs with `state`."""
        args, kwargs = copy.deepcopy(self.given[block])  # a cache of keys among them would remember the last run
        for one, columns in self.shares.get(block, ()) if ranks > 1 else ():
            if columns & found.weights:
                args, kwargs = _taking(Slice(block, one.argument, one.dim, one.size), rank, ranks)(self.model, args, kwargs)
        handle = self.model.get_submodule(row).register_forward_hook(_catch_output)
        inside = {name.removeprefix(block + "."): tensor for name, tensor in state.items() if name.startswith(block + ".")}
        try:
            with self._running():
                functional_call(self.model.get_submodule(block), inside, args, kwargs)
        except Caught as caught:
            return caught.value
        finally:
            handle.remove()
        raise RuntimeError("a module that the first run had called was not called")


def proven(proof: Proof, block: str, found: Found, guesses: Sequence[tuple[Any, ...]]) -> tuple[Found, str | None]:
    """`found` with the first of `guesses` at its counts that is right, or why none is.

    With more ranks than key-value heads it is tried by itself: where that is wrong, they must divide.
    """
    first: str | None = None
    strict: Found | None = None
    for counts in guesses:
        tried = found._replace(region=replace(found.region, counts=(*found.region.counts, *counts)))
        objection = proof.objection(block, tried)
        if objection is None and _runs_with_many(proof, block, tried):
            return tried, None
        strict = strict or (tried if objection is None else None)
        first = first or objection
    if strict is None:
        return found, first
    whole = {name: replace(split, ways=()) for name, split in strict.splits.items()}
    return strict._replace(splits=whole, sizes={**strict.sizes, "groups of heads": strict.region.kv_heads}), None


def _runs_with_many(proof: Proof, block: str, found: Found) -> bool:
    """More ranks than key-value heads: each rank has one of them, and some have the same."""
    kv_heads = found.region.kv_heads
    ranks = _least_ranks(found, kv_heads + 1)
    return not kv_heads or kv_heads == found.region.heads or ranks is None or proof.try_with(block, found, ranks) is None


def _least_ranks(found: Found, least: int) -> int | None:
    """The fewest ranks from `least` on that every size allows."""
    sizes = dict(found.sizes)
    kv_heads = sizes.pop("kv_heads", 0)
    for ranks in range(least, max(sizes.values(), default=1) + 1):
        if all(size % ranks == 0 for size in sizes.values()) and (not kv_heads or kv_heads % ranks == 0 or ranks % kv_heads == 0):
            return ranks
    return None


def _taking(one: Slice, rank: int, ranks: int) -> HeadsTaken:
    return HeadsTaken(one, ranks, lambda tensor, dim: tensor.chunk(ranks, dim)[rank])


def _catch_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    raise Caught(output)


def _at_least_float32(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value
