"""Finds the stacked experts of a mixture-of-experts model and determines how ranks can divide them. `analyze_model`
adds the result to the `ModelGraph`.

A candidate for stacked experts is a module inside the blocks. Its forward takes exactly (hidden states, expert indices
of each token, routing weights of each token), or only rows grouped by expert. All its parameters are stacked by expert
along their first dimension. It should compute each (token, expert) pair independently. verify_experts.py verifies four
properties numerically:
- Expert parallelism: a rank that has some of the experts, and receives only their pairs, computes its partial sum.
- A pair whose index is at least the number of experts contributes nothing, if the module accepts such an index.
- The output is proportional to the routing weight. So the rank that sent the token may apply the weight.
- Tensor ranks that have a shard of each expert's inner features compute partial sums. A bias after the inner features
  is replicated, and each of tp ranks adds 1 / tp of it (`replicated`).

The inner dimension and the layout of a fused projection are determined by trying splits until the values agree. The
code around the experts, such as the router, is verified with the block. In this check the expert module returns its
input times a sum of the routing weights (`pass_through_experts`). Experts in a plain list that the block itself
iterates over stay unsharded.
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

MAX_SPLIT_CANDIDATES = 64
"""Maximum number of splits that are tried for the experts of a module."""

ExpertMessages = tuple[list[str], list[str]]
"""Two lists of findings: about experts that can be distributed, and about experts that cannot."""


def add_experts(
    model: nn.Module,
    graph: ModelGraph,
    inputs: Mapping[str, torch.Tensor],
    modes: Mapping[nn.Module, bool] | None = None,
) -> ModelGraph:
    """Returns `graph` with the experts of the model.

    `inputs` maps the path of each module inside the blocks to its input. `modes` are the training modes of the modules.
    """
    messages: list[str] = []
    hidden = model.get_parameter(f"{graph.embedding}.weight").shape[1] if graph.embedding else 0
    # If the model does not run on the meta device, the inputs of modules are unknown. Then their width is `hidden`.
    widths = {path: hidden for path, _ in model.named_modules()} if hidden else {}
    widths |= {path: tensor.shape[-1] for path, tensor in inputs.items() if tensor.ndim}
    lists = [stack for stack, _ in graph.stacks] or ([graph.blocks] if graph.blocks else [])
    undivided: list[str] = []
    found = find_experts(model, lists, widths, (messages, undivided), training_modes(model) if modes is None else modes)
    splits = {f"{experts.path}.{name}": split for experts in found for name, split in experts.splits.items()}
    widths_shared = [experts.width for experts in found if experts.splits]
    divisible = {"moe_ffn": math.gcd(*widths_shared)} if widths_shared else {}
    names = tuple(name for name in graph.replicated if name not in splits)
    against = graph.against_sequence
    matrix = graph.unsupported.get("matrix", "")
    if matrix:
        around = tuple(f"{experts.path.rpartition('.')[0]}." for experts in found)  # ShardingCheck verifies this code
        names_left = (name for name in names if name.startswith(f"{graph.blocks}.") and not name.startswith(around))
        matrix = next((name for name in names_left if model.get_parameter(name).ndim > 1), "")
        against = f"{matrix} is not sharded" if matrix else graph.unsupported.get("slices", "")
    unsupported = {**graph.unsupported, "sequence": against, "matrix": matrix}
    if undivided:
        unsupported["experts"] = undivided[0]
        unsupported["tensors"] = "; ".join(filter(None, (graph.unsupported.get("tensors"), *undivided)))
    return replace(
        graph,
        experts=found,
        unsupported=unsupported,
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
    """Returns all modules of stacked experts in the order of registration. Of identical modules only the first is
    verified.

    `lists` are the paths of the lists of blocks. `widths` maps the path of each module inside them to its number of
    input features.
    """
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
    """Returns a key that is equal for identical modules: their types, shapes and attributes, including the identity of
    functions and configurations. Integer attributes that equal an index in `path` are ignored.
    """
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    others = [
        (name, id(value))
        for inside in module.modules()
        for name, value in vars(inside).items()
        if not name.startswith("_") and not isinstance(value, bool | int | float | str | tuple | torch.dtype | None)
    ]
    return module_signature(module, lambda _path, _name, value: value in numbers), tuple(others)


def _analyze_experts(
    module: nn.Module,
    path: str,
    count: int,
    by_rows: bool,
    width: int,
    modes: Mapping[nn.Module, bool],
    messages: ExpertMessages,
) -> StackedExperts | None:
    """Returns the experts of `module` with their split. Returns None if they cannot be distributed, and adds the reason
    to `messages`.
    """
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
            f"{path} is not sharded: it does not run by itself ({(str(error).splitlines() or [''])[0][:100]})"
        )
        return None
    if why is not None:
        undivided.append(f"{path}: {count} experts are not sharded: the check with simulated ranks failed ({why})")
        return None
    if way is None:
        known.append(f"{count} experts in {path}, each in full on every tensor rank")
        return plain
    known.append(f"{count} experts in {path}, each sharded along its {way.width} inner features")
    return replace(plain, splits=way.splits, replicated=way.replicated, width=way.width)


def _split_candidates(module: nn.Module, count: int, width: int) -> Iterator[ExpertTpSplit]:
    """Yields candidate splits of every expert by its inner features, most likely first."""
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
    """Returns the split of a projection with `size` output features along `dim`. If `size` is larger than `features`,
    the projection consists of several fused projections. `together`: whether they are concatenated (True) or
    interleaved (False).
    """
    return TpSplit(dim, (features,) * (size // features) if together and size > features else ())
