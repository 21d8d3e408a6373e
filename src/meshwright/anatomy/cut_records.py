"""Records of runs that are cut where ranks communicate, and how the runs of ranks are held against a run of the whole (split_proof.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.anatomy.conditions import cotangent, differs
from meshwright.anatomy.projected import Projected

SEQUENCE = 1
"""The dimension of the sequence in a hidden state (B, T, C)."""
SMALL = 1 << 20
"""Numbers in a whole tensor up to which it is compared after a run: whether the forward wrote to it."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Key = tuple[str, int]
"""What a cut is at, in words, and how often it was met before."""
Own = Callable[[torch.Tensor], torch.Tensor] | None
"""A rank's part of a whole tensor; None where ranks have summands."""


@dataclass
class Reached:
    """What a block was given and what it returned, detached; `learnt`: which leaves of the former have gradients in training."""

    given: Arguments
    output: Any = None
    learnt: tuple[bool, ...] = ()


OWN = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass
class Record:
    """One run. `brought`: at each cut, and with it the rank's part of the whole; `leaves`: what the run goes on with."""

    brought: dict[Key, tuple[torch.Tensor, Own]] = field(default_factory=dict)
    leaves: dict[Key, tuple[torch.Tensor, Own]] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    of_parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, torch.Tensor] = field(default_factory=dict)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def hidden_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What flows through a module: `hidden_states`, or the first tensor among its arguments."""
    given = (kwargs.get("hidden_states"), *args, *kwargs.values())
    return next((value for value in given if isinstance(value, torch.Tensor)), None)


def sequence_part(rank: int, ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A rank's slice along the sequence. Raises ValueError where slices are not equal."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        length, rest = divmod(tensor.shape[SEQUENCE], ranks) if tensor.ndim > SEQUENCE else (0, 1)
        if rest:
            raise ValueError(f"{tuple(tensor.shape)} is not cut along the sequence by {ranks}")
        return tensor.narrow(SEQUENCE, rank * length, length)

    return part


def compare_cuts(known: Record, ranks: Sequence[Record], part: str, is_meta: bool = False) -> str | None:
    """What ranks brought, and the gradients of what they went on with, held against a run of the whole."""
    for number, record in enumerate(ranks):
        if record.brought.keys() != known.brought.keys():
            (missing, _), *_ = sorted(record.brought.keys() ^ known.brought.keys())
            return f"{part} {missing} is not computed as often as on the whole (rank {number})"
    for key, (there, _) in known.brought.items():
        if (why := _unlike([record.brought[key] for record in ranks], there, 0.0, is_meta)) is not None:
            return f"{part} {key[0]} {why}"
    scale = max((float(tensor.norm()) for tensor in known.gradients.values()), default=0.0)
    for key, there in known.gradients.items():
        if any(key not in record.gradients for record in ranks):
            return f"{part} no gradient reaches {key[0]}"
        here = [(record.gradients[key], record.leaves[key][1]) for record in ranks]
        if (why := _unlike(here, there, scale)) is not None:
            return f"{part} the gradient of {key[0]} {why}"
    return None


def _unlike(here: Sequence[tuple[torch.Tensor, Own]], there: torch.Tensor, scale: float = 0.0, is_meta: bool = False) -> str | None:
    there = there.detach()
    if here[0][1] is None and all(tensor.shape == there.shape for tensor, _ in here):
        total = here[0][0].detach().clone()
        for tensor, _ in here[1:]:
            total += tensor.detach()
        pairs = [(total, there)]
    else:
        pairs = [(tensor.detach(), there if own is None else own(there)) for tensor, own in here]
    for one, two in pairs:
        if one.shape != two.shape:
            return f"is {tuple(one.shape)} instead of {tuple(two.shape)}"
        if not is_meta and (off := differs(one, two, scale)) is not None:
            return f"differs by {off:.1e}" if here[0][1] is not None else f"does not sum to the whole: it differs by {off:.1e}"
    return None


def compare_parameters(known: Record, ranks: Sequence[Record], part: str, summed: dict[str, bool] | None = None) -> str | None:
    """Compares the gradients of parameters and returns the first difference. Every rank must compute the whole gradient.

    Where `summed` is given, the gradients of all ranks may add up to the whole instead. It records by name which of the two holds
    (True: they add up), and the same must hold in every call.
    """
    scale = max((float(tensor.norm()) for tensor in known.of_parameters.values()), default=0.0)
    for name in dict.fromkeys([*known.of_parameters, *(name for record in ranks for name in record.of_parameters)]):
        like = next(record.of_parameters[name] for record in (known, *ranks) if name in record.of_parameters)
        there = known.of_parameters.get(name, torch.zeros_like(like))
        found = [record.of_parameters.get(name, torch.zeros_like(like)) for record in ranks]
        off = next((off for one in found if (off := differs(one, there, scale)) is not None), None)
        if off is None and not (summed and summed.get(name)):
            if summed is not None and there.any():
                summed[name] = False
            continue
        if summed is not None and summed.get(name, True) and _add_up(found, there, scale):
            summed[name] = True
            continue
        return f"{part} the gradient of {name} differs by {off or 1.0:.1e}"
    return None


def _add_up(found: Sequence[torch.Tensor], there: torch.Tensor, scale: float) -> bool:
    return all(one.shape == there.shape for one in found) and differs(torch.stack(list(found)).sum(0), there, scale) is None


def backward(record: Record, known: Record, parameters: Mapping[str, torch.Tensor], projected: Projected) -> None:
    """Fills in the gradients of `record`: they begin at all that was brought, as random as those of `known` and its parts. Of what is
    `projected` among `parameters` there is a projection of the gradient."""
    terms = []
    for number, (key, (there, _)) in enumerate(known.brought.items()):
        if key in record.brought and record.brought[key][0].requires_grad:
            tensor, own = record.brought[key]
            weight = cotangent(there.shape, there, number)
            weight = weight if own is None else own(weight)
            if tensor.shape == weight.shape:  # else the comparison says so
                terms.append((tensor * weight).sum())
    named = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
    leaves = {key: leaf for key, (leaf, _) in record.leaves.items() if leaf.requires_grad}
    if not terms:
        return
    total = torch.stack([term.to(terms[0]) for term in terms]).sum()
    probes = projected.leaves()
    found = torch.autograd.grad(total, [*leaves.values(), *named.values(), *probes.values()], allow_unused=True)
    gradients = zip(leaves.items(), found, strict=False)
    of_probes = dict(zip(probes, found[len(leaves) + len(named) :], strict=True))
    of_named: dict[str, torch.Tensor | None] = dict(zip(named, found[len(leaves) :], strict=False))
    of_named |= {name: projected.projection(name, of_named[name], one) for name, one in of_probes.items()}
    record.gradients = {key: torch.zeros_like(leaf) if one is None else one for (key, leaf), one in gradients}
    record.of_parameters = {name: one for name, one in of_named.items() if one is not None}


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where it is small: a run may write to it."""
    if tensor.numel() > SMALL:
        return tensor
    found = tensor.detach().clone()
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


class Snapshot:
    """What a run of `root` may write: small parameters and buffers, and whatever else its modules hold."""

    def __init__(self, root: nn.Module) -> None:
        held = [vars(module) for module in root.modules()]
        self.attributes = [(one, {name: value for name, value in one.items() if name not in OWN}) for one in held]
        self.attributes += [(one, dict(one)) for module in root.modules() for one in (module._buffers, module._parameters)]
        tensors = (*root.parameters(), *root.buffers())
        self.numbers = [(tensor, tensor.detach().clone()) for tensor in tensors if tensor.numel() <= SMALL and not tensor.is_meta]

    def put_back(self) -> None:
        for held, values in self.attributes:
            for name in held.keys() - values.keys() - OWN:
                del held[name]
            held.update(values)
        for tensor, numbers in self.numbers:
            if not torch.equal(tensor.detach(), numbers):
                tensor.data.copy_(numbers)
