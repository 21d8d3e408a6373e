"""Finds the parameters of a wrapped model, with the full name and the region of each local piece.

Supported are plain parameters and DDP, FSDP1 (flat parameters), FSDP2 and DTensor, the attributes of Megatron-Core
(`tensor_model_parallel`, `partition_dim`, `partition_stride`), and DeepSpeed ZeRO 1 to 3 (layout_deepspeed.py).
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.recording.trace_format import TensorRegion

WRAPPER_NAMES = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Names of the child module of wrappers, which are left out of the names of modules and parameters."""
OUTER_WRAPPERS = frozenset(
    {
        "DistributedDataParallel",
        "DataParallel",
        "FullyShardedDataParallel",
        "DeepSpeedEngine",
        "OptimizedModule",
        "Float16Module",
    }
)
"""Classes whose instances wrap the user's model as `module` or `_orig_mod`."""


class LocalPart(NamedTuple):
    """A piece of a parameter. `data` and `gradient` return the local tensors (None: there is none); `partial` says
    whether the current gradient is a partial sum. `stored`: whether this rank writes the weights of the piece."""

    name: str
    region: TensorRegion
    data: Callable[[], torch.Tensor | None]
    gradient: Callable[[], torch.Tensor | None]
    partial: Callable[[], bool] = lambda: False
    gradient_region: Callable[[], TensorRegion | None] = lambda: None
    stored: bool = True
    trains: bool = True


class ShardedBy(NamedTuple):
    """Tensor parallelism of plain tensors: `dims` maps name patterns to the sharded dimension, and `rank` of `size` is
    the place of this rank in the group with the global ranks `peers`."""

    dims: Mapping[str, int]
    rank: int
    size: int
    peers: tuple[int, ...]


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the user's model without DDP, FSDP1, DeepSpeed and compile wrappers."""
    while type(model).__name__ in OUTER_WRAPPERS or hasattr(model, "_fsdp_wrapped_module"):
        inner = next(
            (
                found
                for name in ("_fsdp_wrapped_module", "_orig_mod", "module")
                if isinstance(found := getattr(model, name, None), nn.Module)
            ),
            None,
        )
        if inner is None:
            break
        model = inner
    return model


def user_class(model: nn.Module) -> type[nn.Module]:
    """Returns the class of a model. FSDP2 replaces it by a class of its own, which inherits from it."""
    kind = type(model)
    return (
        kind.__bases__[-1] if kind.__module__.startswith("torch.distributed.fsdp") and len(kind.__bases__) > 1 else kind
    )


def clean(name: str) -> str:
    """Returns a module path or parameter name without the names that wrappers add.

    >>> clean("layers.0._checkpoint_wrapped_module.fc.weight")
    'layers.0.fc.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the path and the module for all modules below `model`, the innermost one if wrappers share a path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        found[clean(path)] = module
    found.pop("", None)
    return iter(found.items())


def sharded_by(shards: Mapping[str, int] | None, group: Any) -> ShardedBy | None:
    """Returns the tensor parallelism of plain tensors: of the arguments of `recording`, or of Megatron-Core's state."""
    if group is None and (state := sys.modules.get("megatron.core.parallel_state")) is not None:
        group = state.get_tensor_model_parallel_group() if state.model_parallel_is_initialized() else None
    if not dist.is_initialized() or (group is None and not shards):
        return None
    peers = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    return ShardedBy(dict(shards or {}), peers.index(dist.get_rank()), len(peers), peers)


def parts_of(model: nn.Module, by: ShardedBy | None, first: bool) -> list[LocalPart]:
    """Returns the pieces of all parameters of this rank. `first`: whether this rank writes unsharded weights."""
    found: list[LocalPart] = []
    flat_ids: set[int] = set()
    for path, module in model.named_modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is not None:
            found += _flat_parts(path, module, flat)
            flat_ids |= {id(flat), *(id(parameter) for parameter in flat._params or ())}
    gated = gated_ids(model)
    for name, parameter in model.named_parameters():
        if id(parameter) not in flat_ids:
            found.append(_part_of(clean(name), parameter, by, first, id(parameter) in gated))
    return found


def gated_ids(model: nn.Module) -> set[int]:
    """Returns the ids of the fused first weights of gated feed-forward layers of Megatron-Core, whose attributes do not
    say that a rank has a part of the gate and a part of the up projection.

    Source: NVIDIA/Megatron-LM d98e8a64, core/transformer/mlp.py (`apply_swiglu_sharded_factory`).
    """
    fused = [
        getattr(module, "linear_fc1", None)
        for module in model.modules()
        if getattr(getattr(module, "config", None), "gated_linear_unit", False)
    ]
    return {id(each) for first in fused if isinstance(first, nn.Module) for each in first.parameters(recurse=False)}


def _part_of(name: str, parameter: nn.Parameter, by: ShardedBy | None, first: bool, gated: bool) -> LocalPart:
    if isinstance(parameter, DTensor):
        mine = all(
            _is_sharded(place) or (coordinate := parameter.device_mesh.get_coordinate()) is None or not coordinate[at]
            for at, place in enumerate(parameter.placements)
        )
        return LocalPart(
            name,
            dtensor_region(parameter),
            lambda: local_tensor(parameter),
            lambda: None if parameter.grad is None else local_tensor(parameter.grad),
            lambda: (
                isinstance(parameter.grad, DTensor) and any(place.is_partial() for place in parameter.grad.placements)
            ),
            lambda: _gradient_region(parameter),
            mine,
            parameter.requires_grad,
        )
    region = _plain_region(name, parameter, by, gated)

    def gradient() -> torch.Tensor | None:
        main = getattr(parameter, "main_grad", None)  # Megatron-Core accumulates here
        return parameter.grad if main is None else main

    return LocalPart(
        name,
        region,
        lambda: parameter.detach(),
        gradient,
        stored=first or not region.whole,
        trains=parameter.requires_grad,
    )


def _gradient_region(parameter: DTensor) -> TensorRegion | None:
    """Returns the region of a gradient that is divided in another way than its weight, otherwise None."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or gradient.placements == parameter.placements:
        return None
    return dtensor_region(gradient)


def _plain_region(name: str, parameter: nn.Parameter, by: ShardedBy | None, gated: bool) -> TensorRegion:
    """Returns the region of a plain tensor: a shard if Megatron's attributes or the user's patterns say so. `gated`:
    whether a shard consists of two parts."""
    shape, stride, dim = tuple(parameter.shape), 1, None
    if by is not None:
        if getattr(parameter, "tensor_model_parallel", False):
            dim, stride = int(parameter.partition_dim), int(getattr(parameter, "partition_stride", 1))  # type: ignore[attr-defined]
            stride *= 1 + gated
        dim = next((value for pattern, value in by.dims.items() if fnmatch.fnmatchcase(name, pattern)), dim)
    if by is None or dim is None or by.size == 1:
        return TensorRegion(shape=shape)
    if not -len(shape) <= dim < len(shape):
        raise InputError(
            Message(
                "recording: shards gives dimension {dim} to {name}, which has shape {shape}",
                dim=dim,
                name=name,
                shape=shape,
            )
        )
    dim %= len(shape)
    block = shape[dim] // stride
    pieces = tuple(((at * by.size + by.rank) * block, (at * by.size + by.rank + 1) * block) for at in range(stride))
    full = (*shape[:dim], shape[dim] * by.size, *shape[dim + 1 :])
    return TensorRegion(shape=full, ranges=tuple(pieces if at == dim else ((0, size),) for at, size in enumerate(full)))


def dtensor_region(tensor: DTensor) -> TensorRegion:
    """Returns the region of the local tensor of a DTensor. A fused weight with a strided shard has several ranges."""
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if not any(_is_sharded(place) for place in tensor.placements):
        return TensorRegion(shape=shape)
    elements = [torch.arange(size if coordinate is not None else 0, device="cpu") for size in shape]
    for at, placement in enumerate(tensor.placements):
        place: Any = placement
        if _is_sharded(place) and coordinate is not None:
            strided = {"split_factor": place.split_factor} if hasattr(place, "split_factor") else {}
            pieces, _ = type(place)(0, **strided)._split_tensor(elements[place.dim], mesh.size(at), with_padding=False)
            elements[place.dim] = pieces[coordinate[at]]
    return TensorRegion(shape=shape, ranges=tuple(_ranges_of(each) for each in elements))


def _ranges_of(elements: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Returns ascending indices as ranges [start, end)."""
    if not len(elements):
        return ((0, 0),)
    ends = (elements.diff() != 1).nonzero().flatten() + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in elements.tensor_split(ends))


def _is_sharded(place: Any) -> bool:
    """Returns whether a placement divides the tensor. The strided shards of FSDP2 with tensor parallelism do."""
    return not place.is_replicate() and not place.is_partial()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, or the tensor itself, without communication."""
    found = tensor.detach()
    return found._local_tensor if isinstance(found, DTensor) else found


def _flat_parts(path: str, module: nn.Module, flat: Any) -> Iterator[LocalPart]:
    """Yields the pieces of a flat parameter of FSDP1, which are ranges of the flattened parameters."""
    prefix = f"{path}." if path else ""
    sharded = module._handle.uses_sharded_strategy  # type: ignore[union-attr]
    offsets = [] if sharded else module._handle._get_flat_param_offsets()  # type: ignore[union-attr, operator]
    for at, (fqn, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
        name, trains = clean(prefix + fqn), flat.requires_grad
        if not sharded:
            start, end = offsets[at]
            here = slice(start, end + 1)
            region = TensorRegion(shape=tuple(shape))
        else:
            info = flat._shard_param_infos[at]
            if not info.in_shard:
                continue
            here = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
            region = TensorRegion(shape=tuple(shape), flat=(info.intra_param_start_idx, info.intra_param_end_idx + 1))

        def data(here: slice = here) -> torch.Tensor:
            return getattr(flat, "_local_shard", flat).detach().view(-1)[here]

        def gradient(here: slice = here, at: int = at) -> torch.Tensor | None:
            if flat.grad is not None and (
                not sharded or flat.grad.numel() == getattr(flat, "_local_shard", flat).numel()
            ):
                return flat.grad.view(-1)[here]
            return flat._params[at].grad if flat._params else None

        yield LocalPart(name, region, data, gradient, stored=True, trains=trains)


def region_key(region: TensorRegion) -> tuple[Any, ...]:
    """Returns a hashable key of the elements of a region."""
    return (region.ranges, region.flat)


def slice_region(full: torch.Tensor, region: TensorRegion) -> torch.Tensor:
    """Returns the elements of `region` of a full tensor."""
    if region.flat is not None:
        return full.reshape(-1)[region.flat[0] : region.flat[1]]
    for dim, ranges in enumerate(region.ranges):
        if ranges != ((0, full.shape[dim]),):
            full = torch.cat([full.narrow(dim, start, end - start) for start, end in ranges], dim)
    return full


def fill_region(full: torch.Tensor, region: TensorRegion, piece: torch.Tensor) -> None:
    """Writes a piece into its region of a full, contiguous tensor, in place."""
    if region.flat is not None:
        full.view(-1)[region.flat[0] : region.flat[1]] = piece.reshape(-1)
        return
    if not region.ranges:
        full.copy_(piece)
        return
    index = [torch.cat([torch.arange(start, end) for start, end in ranges]) for ranges in region.ranges]
    full[torch.meshgrid(*index, indexing="ij")] = piece.to(full.dtype)


def local_shape(region: TensorRegion) -> tuple[int, ...]:
    """Returns the shape of the local tensor of a region."""
    if region.flat is not None:
        return (region.flat[1] - region.flat[0],)
    return tuple(sum(end - start for start, end in ranges) for ranges in region.ranges) or region.shape
