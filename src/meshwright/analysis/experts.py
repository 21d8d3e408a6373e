"""Finds the experts of a mixture: the module that is given hidden states, the numbers of each token's experts and their
weights.

Rule: inside the blocks, a module whose forward takes just these three (or rows of each expert alone), whose parameters
are all stacked expert by expert along their first
dimension, and which computes each pair of token and expert by itself. What follows from it is proven with numbers
(expert_proof.py):
- a rank that holds some of the experts, given the pairs that are theirs, computes its part of the sum (expert
  parallelism);
- a pair of no expert (a number beyond all) weighs nothing, where the module takes one;
- a weight on the output is a factor, so that it may be applied where the token came from;
- tensor ranks that hold a share of each expert's inner features compute parts of the sum. A bias behind the inner
  features is whole on every
  rank, and each adds its part of it (`once`).
Which dimension is the inner one, and how a fused projection is cut, is tried until the numbers agree. What surrounds
the experts (the router and all) is proven with
the block, where each expert multiplies by a number (`pass_through_experts`). Experts in a plain list that the block
itself runs through stay whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from meshwright.analysis.expert_modules import expert_count_attributes, num_experts_by_pairs, num_experts_by_rows
from meshwright.analysis.graph import ModelGraph, StackedExperts, TpSplit
from meshwright.analysis.run_conditions import module_signature, training_modes
from meshwright.analysis.verify_experts import ExpertTpSplit, verify_expert_splits

NOT_SHARDED_SUFFIX = " stays whole"
"""How a sentence ends that says why sequence parallelism would be wrong: a matrix that may mix places of the
sequence."""

MAX_SPLIT_CANDIDATES = 64
"""Ways to cut an expert that are tried at most."""

ExpertMessages = tuple[list[str], list[str]]
"""Lines on experts that may be divided, and on those that may not."""


def add_experts(
    model: nn.Module,
    graph: ModelGraph,
    inputs: Mapping[str, torch.Tensor],
    modes: Mapping[nn.Module, bool] | None = None,
) -> ModelGraph:
    """`anatomy` with the experts of the model. `inputs`: what each module inside the blocks was given in a run;
    `modes`: in which they are trained."""
    messages: list[str] = []
    hidden = model.get_parameter(f"{graph.embedding}.weight").shape[1] if graph.embedding else 0
    widths = (
        {path: hidden for path, _ in model.named_modules()} if hidden else {}
    )  # where the model cannot be run by shapes
    widths |= {path: tensor.shape[-1] for path, tensor in inputs.items() if tensor.ndim}
    lists = [stack for stack, _ in graph.stacks] or ([graph.blocks] if graph.blocks else [])
    undivided: list[str] = []
    found = find_experts(model, lists, widths, (messages, undivided), training_modes(model) if modes is None else modes)
    splits = {f"{experts.path}.{name}": split for experts in found for name, split in experts.splits.items()}
    widths_shared = [experts.width for experts in found if experts.splits]
    divisible = {"moe_ffn": math.gcd(*widths_shared)} if widths_shared else {}
    names = tuple(name for name in graph.replicated if name not in splits)
    against = graph.against_sequence
    if against.endswith(NOT_SHARDED_SUFFIX):
        around = tuple(f"{experts.path.rpartition('.')[0]}." for experts in found)  # proven with the block
        names_left = (name for name in names if name.startswith(f"{graph.blocks}.") and not name.startswith(around))
        left = next((name for name in names_left if model.get_parameter(name).ndim > 1), None)
        against = f"{left}{NOT_SHARDED_SUFFIX}" if left else graph.unsupported.get("slices", "")
    return replace(
        graph,
        experts=found,
        unsupported={**graph.unsupported, "sequence": against} | ({"experts": undivided[0]} if undivided else {}),
        splits={**graph.splits, **splits},
        divisible={**graph.divisible, **divisible},
        partial=(*graph.partial, *(f"{experts.path}.{name}" for experts in found for name in experts.replicated)),
        findings=(*graph.findings, *messages, *undivided),
        replicated=names,
    )


def find_experts(
    model: nn.Module,
    lists: Sequence[str],
    widths: Mapping[str, int],
    messages: ExpertMessages,
    modes: Mapping[nn.Module, bool],
) -> tuple[StackedExperts, ...]:
    """All of them in forward order; of each kind the first is proven. `widths`: features of what each module inside the
    blocks is given."""
    found: list[StackedExperts] = []
    known: dict[object, StackedExperts | None] = {}
    for path, module in (one for blocks in lists for one in model.get_submodule(blocks).named_modules(prefix=blocks)):
        pairs = num_experts_by_pairs(module)
        count = pairs or num_experts_by_rows(module)
        if not count or path not in widths or any(path.startswith(f"{other.path}.") for other in found):
            continue
        key = _experts_signature(module, path)
        if key not in known:
            known[key] = _analyze_experts(module, path, count, not pairs, widths[path], modes, messages)
        like = known[key]
        if like is not None:
            found.append(replace(like, path=path))
    return tuple(found)


def _experts_signature(module: nn.Module, path: str) -> object:
    """What like modules have in common: their kind, their modes, and the other objects that they hold, such as
    functions and configurations."""
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    others = [
        (name, id(value))
        for inside in module.modules()
        for name, value in vars(inside).items()
        if not name.startswith("_") and not isinstance(value, bool | int | float | str | tuple | torch.dtype | None)
    ]
    return module_signature(module, numbers), tuple(others)


def _analyze_experts(
    module: nn.Module,
    path: str,
    count: int,
    by_rows: bool,
    width: int,
    modes: Mapping[nn.Module, bool],
    messages: ExpertMessages,
) -> StackedExperts | None:
    """What is known of `module`, or None with the reason said."""
    known, undivided = messages
    counters = tuple((where, name) for where, name, value in expert_count_attributes(module) if value == count)
    plain = StackedExperts(path, count, tuple(name for name, _ in module.named_parameters()), counters, by_rows=by_rows)
    try:
        why, way = verify_expert_splits(
            module,
            plain,
            width,
            list(itertools.islice(_split_candidates(module, count, width), MAX_SPLIT_CANDIDATES)),
            modes,
        )
    except Exception as error:
        undivided.append(
            f"{path} stays whole: it does not run by itself ({(str(error).splitlines() or [''])[0][:100]})"
        )
        return None
    if why is not None:
        undivided.append(f"{path}: {count} experts stay whole: what one computes is not its part of the sum ({why})")
        return None
    if way is None:
        known.append(f"{count} experts in {path}, each of them whole on a tensor rank")
        return plain
    known.append(f"{count} experts in {path}, each shared by its {way.width} inner features")
    return replace(plain, splits=way.splits, replicated=way.replicated, width=way.width)


def _split_candidates(module: nn.Module, count: int, width: int) -> Iterator[ExpertTpSplit]:
    """Ways to cut every expert by its inner features, the likeliest first."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    weights = [name for name, shape in shapes.items() if len(shape) == 3 and shape[0] == count]
    if not weights or any(shape[0] != count or len(shape) not in (2, 3) for shape in shapes.values()):
        return
    turned = bool(getattr(module, "is_transposed", False))
    joined = bool(getattr(module, "is_concatenated", True))
    fitting = [
        dims
        for dims in itertools.product((1, 2), repeat=len(weights))
        if all(shapes[name][3 - dim] == width for name, dim in zip(weights, dims, strict=True))
    ]
    expected = (*[2 if turned else 1] * (len(weights) - 1), 1 if turned else 2)
    fitting.sort(key=lambda dims: dims != expected)
    for dims in fitting:
        inner = {name: shapes[name][dim] for name, dim in zip(weights, dims, strict=True)}
        features = min(inner.values())
        if any(size % features for size in inner.values()):
            continue
        for together in (joined, not joined):
            cuts = {
                name: _projection_split(dim, inner[name], features, together)
                for name, dim in zip(weights, dims, strict=True)
            }
            options: list[list[TpSplit | None]] = [[cuts[name]] if name in cuts else [] for name in shapes]
            for option, (name, shape) in zip(options, shapes.items(), strict=True):
                if name not in cuts and shape[1] in inner.values():
                    option.append(_projection_split(1, shape[1], features, together))
                if name not in cuts and shape[1] == width:
                    option.insert(0, None)
            for chosen in itertools.product(*options):
                named = dict(zip(shapes, chosen, strict=True))
                splits = {name: split for name, split in named.items() if split is not None}
                yield ExpertTpSplit(splits, tuple(name for name in named if name not in splits), features)


def _projection_split(dim: int, size: int, features: int, together: bool) -> TpSplit:
    """A projection of `size` features: plain, or `size / features` of them fused, one behind the other (`together`) or
    alternating."""
    return TpSplit(dim, (features,) * (size // features) if together and size > features else ())
