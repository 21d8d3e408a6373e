"""Propagates feature sharding through single torch functions. op_trace.py calls `propagate_sharding` for every function
that reads a sharded tensor.

Tensor ranks split the output features of a column layer into equal contiguous segments. Reshapes, transposes, slices,
reductions and broadcasts move the features to other dimensions. `propagate_sharding` follows the features through one
function. It raises `NotShardable` if the function needs all features. If it cannot follow the features, the numeric
verification decides whether the layer can be sharded (verify_sharding.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from meshwright.core.messages import Message

RESHAPE_OPS = frozenset(
    {"view", "reshape", "flatten", "unflatten", "contiguous", "clone", "view_as", "reshape_as", "_unsafe_view"}
)
TRANSPOSE_OPS = frozenset(
    {
        "t",
        "transpose",
        "T",
        "mT",
        "swapaxes",
        "permute",
        "movedim",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "broadcast_to",
    }
)
SLICE_OPS = frozenset(
    {"__getitem__", "split", "chunk", "tensor_split", "split_with_sizes", "unbind", "select", "narrow"}
)
REDUCTION_OPS = frozenset(
    {"mean", "sum", "var", "std", "var_mean", "norm", "vector_norm", "linalg_vector_norm", "softmax", "log_softmax",
     "logsumexp", "max", "amax", "min", "amin", "argmax", "argmin", "topk", "sort", "cumsum", "prod", "normalize",
     "any", "all", "flip", "roll", "gather", "index_select"}
)  # fmt: skip
NORM_OPS = frozenset({"layer_norm", "rms_norm", "instance_norm"})
MATMUL_OPS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm"})
FIRST_INPUT_OPS = frozenset({"to", "type", "type_as", "expand_as", "view_as", "reshape_as"})
"""Functions whose result depends only on the values of the first tensor argument."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns all tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class NotShardable(Exception):
    """Signals that an operation needs all of the sharded features. The message says which operation."""


class OpCall(NamedTuple):
    """A call of a torch function. A read of a tensor property counts as a call with the name of the property."""

    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Returns the argument with the name `name` or at position `place`, `default` if there is none."""
        return self.kwargs.get(name, self.args[place] if len(self.args) > place else default)


@dataclass(frozen=True)
class ShardedTensorInfo:
    """Describes a sharded tensor. `columns` are the weights of the column layers that it comes from.

    `dims` are the dimensions that contain the features, outermost first. Ranks split `dims[0]`. `dims` is empty if the
    features cannot be followed. `inner` is how often the features repeat inside `dims[0]`: for a dimension (batch size
    x heads), the batch size. `product_slice` is the range (start, stop) of the output features of one product that the
    tensor contains, None if the tensor comes from several products.
    """

    columns: frozenset[str]
    dims: tuple[int, ...]
    inner: int = 1
    product_slice: tuple[int, int] | None = None

    @property
    def dim(self) -> int | None:
        """Returns the dimension that ranks split, None if it is unknown."""
        return self.dims[0] if self.dims else None


def aligned_dim(call: OpCall, tensor: torch.Tensor, share: torch.Tensor, info: ShardedTensorInfo) -> int | None:
    """Returns the dimension of `tensor` that `call` aligns with the sharded dimension of `share`, None if there is
    none. `info` describes `share`.
    """
    if not info.dims:
        return None
    size, dim = share.shape[info.dims[0]], info.dims[0]
    if call.name in ("batch_norm", "group_norm") or call.name.startswith("conv"):
        return 0 if tensor.shape[0] == size else None
    place = tensor.ndim - (share.ndim - dim)
    return place if place >= 0 and tensor.shape[place] == size else None


def propagate_sharding(
    call: OpCall, share: ShardedTensorInfo, before: torch.Tensor, outputs: list[torch.Tensor]
) -> list[ShardedTensorInfo]:
    """Returns the sharding of each of `outputs`, which `call` computes from the tensor `before` with the sharding
    `share`.

    Raises:
        NotShardable: the operation needs all features.
    """
    if not share.dims or not outputs:
        return [replace(share, dims=(), product_slice=None) for _ in outputs]
    if call.name in RESHAPE_OPS:
        return [_propagate_reshape(share, before, after) for after in outputs]
    if call.name in TRANSPOSE_OPS:
        return [_propagate_transpose(call, share, before, after) for after in outputs]
    if call.name in SLICE_OPS:
        return _propagate_slice(call, share, before, outputs)
    if call.name in REDUCTION_OPS:
        return [_propagate_reduction(call, share, before, after) for after in outputs]
    if call.name in NORM_OPS:
        normed = call.argument(1, "normalized_shape", ()) if call.name != "instance_norm" else ()
        if share.dims[0] >= before.ndim - len(normed):
            raise NotShardable(Message("needs all features for {call}", call=call.name))
        return [share]
    if call.name == "einsum":
        return [_propagate_einsum(call, share, before)]
    return [_propagate_broadcast(call, share, before, after) for after in outputs]


def _propagate_reshape(share: ShardedTensorInfo, before: torch.Tensor, after: torch.Tensor) -> ShardedTensorInfo:
    """Returns the sharding after a reshape, which preserves the order of elements. So the product of the sizes of all
    dimensions in front of the features is equal before and after the reshape.
    """
    ahead = math.prod(before.shape[: share.dims[0]]) * share.inner
    size = before.shape[share.dims[0]] // share.inner
    run = list(share.dims) == list(range(share.dims[0], share.dims[0] + len(share.dims)))
    length = math.prod(before.shape[dim] for dim in share.dims) // share.inner if run else size
    if after.shape == before.shape:
        return share
    begins = [dim for dim in range(after.ndim) if math.prod(after.shape[:dim]) == ahead]
    # The features may begin at a dimension of size 1: the head dimension of a single head. A leading dimension of size
    # 1 is skipped, because it is the batch dimension of a single sample.
    first = next((dim for dim in begins if dim or after.shape[0] > 1), None)
    if first is None:
        outer = next(dim for dim in reversed(range(after.ndim)) if math.prod(after.shape[:dim]) < ahead)
        inner, rest = divmod(ahead, math.prod(after.shape[:outer]))
        return (
            replace(share, dims=(), product_slice=None)
            if rest or after.shape[outer] % inner
            else replace(share, dims=(outer,), inner=inner)
        )
    dims, covered = [], 1
    for dim in range(first, after.ndim):
        if covered >= length:
            break
        dims.append(dim)
        covered *= after.shape[dim]
    return replace(share, dims=tuple(dims), inner=1) if dims else replace(share, dims=(first,), inner=1)


def _call_on_index_tensor(call: OpCall, tensor: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """Returns the results of `call` on a meta tensor with the shape of `tensor` and stride 1 along `dim`, 0 along all
    other dimensions. The stride shows to which dimension the call moves `dim`.
    """
    marked = torch.empty(0, device="meta").as_strided(tensor.shape, [int(place == dim) for place in range(tensor.ndim)])
    result = call.function(marked, *call.args[1:], **call.kwargs)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _propagate_transpose(
    call: OpCall, share: ShardedTensorInfo, before: torch.Tensor, after: torch.Tensor
) -> ShardedTensorInfo:
    dims = []
    for dim in share.dims:
        turned = _call_on_index_tensor(call, before, dim)[0]
        places = [
            place
            for place, stride in enumerate(turned.stride())
            if stride == 1 and turned.shape[place] == before.shape[dim]
        ]
        dims += places[:1]
    return (
        replace(share, dims=tuple(dims)) if dims[: len(share.dims[:1])] else replace(share, dims=(), product_slice=None)
    )


def _propagate_slice(
    call: OpCall, share: ShardedTensorInfo, before: torch.Tensor, outputs: list[torch.Tensor]
) -> list[ShardedTensorInfo]:
    """Returns the sharding after a slice. A slice along the sharded features selects one matrix of a fused projection.
    An integer index removes its dimension.
    """
    if not _is_view_call(call):
        return _propagate_index_list(call, share, before, outputs)
    size = before.shape[share.dims[0]]
    shape = [size if dim == share.dims[0] else 1 for dim in range(before.ndim)]
    counted = torch.arange(size, device="cpu").view(shape).expand(before.shape)
    taken = call.function(counted, *call.args[1:], **call.kwargs)
    marks = [_call_on_index_tensor(call, before, dim) for dim in share.dims]
    result = []
    for index, indices in enumerate([taken] if isinstance(taken, torch.Tensor) else taken):
        dims: list[int] = []
        for dim, marked in zip(share.dims, marks, strict=True):
            turned = marked[index]
            places = [place for place, stride in enumerate(turned.stride()) if stride]
            dims += [place for place in places if turned.shape[place] > 1][:1] or (
                places[:1] if dim == share.dims[0] else []
            )
        result.append(_slice_of_product(share, tuple(dims), size, _feature_indices(indices)))
    return result


def _feature_indices(indices: torch.Tensor) -> torch.Tensor:
    """Returns the distinct feature indices in `indices`, a view of an expanded index tensor."""
    return (
        indices[tuple(slice(None) if stride else 0 for stride in indices.stride())] if indices.numel() else indices
    ).unique()


def _propagate_index_list(
    call: OpCall, share: ShardedTensorInfo, before: torch.Tensor, outputs: list[torch.Tensor]
) -> list[ShardedTensorInfo]:
    """Returns the sharding after an index by a list, as in x[..., [-2], :]. A list along the sharded features counts as
    a slice. A list along another dimension does not change the sharding. If the index has a tensor or changes the
    number of dimensions, the features cannot be followed.
    """
    places = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    lists = [place for place in places if isinstance(place, list)]
    after = outputs[0]
    if after.ndim != before.ndim or not lists or any(isinstance(place, torch.Tensor) for place in places):
        return [replace(share, dims=(), product_slice=None)]
    dim = share.dims[0]
    ahead = (
        places.index(lists[0])
        if Ellipsis not in places[: places.index(lists[0])]
        else before.ndim - len(places) + places.index(lists[0])
    )
    if ahead != dim:
        return [share]
    indices = torch.tensor([place % before.shape[dim] for place in lists[0]], device="cpu")
    return [_slice_of_product(share, share.dims, before.shape[dim], indices)]


def _is_view_call(call: OpCall) -> bool:
    """Returns whether the result of a slice is a view. An index by a list or a tensor makes a copy."""
    places = call.argument(1, "index") if call.name == "__getitem__" else None
    return not any(
        isinstance(place, list | torch.Tensor) for place in (places if isinstance(places, tuple) else (places,))
    )


def _slice_of_product(
    share: ShardedTensorInfo, dims: tuple[int, ...], size: int, indices: torch.Tensor
) -> ShardedTensorInfo:
    count = len(indices)
    if count in (0, size) or share.inner > 1:
        return replace(share, dims=dims)
    first = int(indices[0])
    steps = indices.diff().unique().tolist()
    if steps not in ([], [1]):
        if len(steps) > 1 or size % steps[0]:
            raise NotShardable(Message("selects individual features"))
        # The slice takes, for example, every second feature. Its step divides the features, so ranks can slice locally.
        return replace(share, dims=dims, product_slice=None)
    if share.product_slice is None:
        return replace(share, dims=dims)
    unit = (share.product_slice[1] - share.product_slice[0]) // size
    begin = share.product_slice[0] + first * unit
    return replace(share, dims=dims, product_slice=(begin, begin + count * unit))


def _propagate_reduction(
    call: OpCall, share: ShardedTensorInfo, before: torch.Tensor, after: torch.Tensor
) -> ShardedTensorInfo:
    place = call.argument(1, "dim", call.kwargs.get("axis"))
    if isinstance(place, torch.Tensor):  # a maximum of two tensors has no dimension to reduce
        return _propagate_broadcast(call, share, before, after)
    if call.name in ("norm", "normalize", "vector_norm", "linalg_vector_norm", "topk", "roll", "var", "std"):
        place = call.kwargs.get(
            "dim",
            call.args[2]
            if len(call.args) > 2
            else (1 if call.name == "normalize" else place if call.name in ("var", "std") else None),
        )
        place = -1 if place is None and call.name == "topk" else place
    if call.name == "sort" and place is None:
        place = -1
    if place is None:
        raise NotShardable(Message("needs all features for {call}", call=call.name))
    along = {dim % before.ndim for dim in (place if isinstance(place, tuple | list) else (place,))}
    if along & set(share.dims[:1]):
        raise NotShardable(Message("needs all features for {call}", call=call.name))
    left = [dim for dim in share.dims if dim not in along]
    if after.ndim == before.ndim:
        return replace(share, dims=tuple(left))
    return replace(share, dims=tuple(dim - sum(removed < dim for removed in along) for dim in left))


def _propagate_einsum(call: OpCall, share: ShardedTensorInfo, before: torch.Tensor) -> ShardedTensorInfo:
    """Returns the sharding after an einsum, whose equation shows where each dimension of `before` moves."""
    equation = call.args[0].replace(" ", "")
    sources, _, target = equation.partition("->")
    given = call.args[1] if isinstance(call.args[1], tuple | list) else call.args[1:]
    mine = next(letters for letters, tensor in zip(sources.split(","), given, strict=True) if tensor is before)
    if "." in equation or not target:
        return replace(share, dims=(), product_slice=None)
    letters = [mine[dim] for dim in share.dims]
    if letters[0] not in target:
        raise NotShardable(Message("sums over all features"))
    return replace(
        share, dims=tuple(target.index(letter) for letter in letters if letter in target), product_slice=None
    )


def _propagate_broadcast(
    call: OpCall, share: ShardedTensorInfo, before: torch.Tensor, after: torch.Tensor
) -> ShardedTensorInfo:
    """Returns the sharding after an operation that aligns dimensions from the right. These are elementwise functions,
    `cat`, `stack`, `repeat` and batched matrix products, which preserve the batch dimensions.

    Raises:
        NotShardable: the operation multiplies, concatenates or repeats along the sharded features.
    """
    shift = after.ndim - before.ndim
    if call.name in MATMUL_OPS and share.dims[0] >= before.ndim - 1:
        raise NotShardable(Message("multiplies matrices along the sharded features"))
    if call.name in ("cat", "concat", "concatenate", "stack"):
        dim = call.argument(1, "dim", 0) % after.ndim
        if call.name == "stack":
            return replace(share, dims=tuple(place + (dim <= place) for place in share.dims), product_slice=None)
        if dim == share.dims[0]:
            raise NotShardable(Message("concatenates along the sharded features"))
    if call.name == "repeat" and before.shape[share.dims[0]] != after.shape[share.dims[0] + shift]:
        raise NotShardable(Message("repeats along the sharded features"))
    dims = tuple(dim + shift for dim in share.dims)
    if min(dims) < 0 or (call.name != "repeat_interleave" and after.shape[dims[0]] != before.shape[share.dims[0]]):
        return replace(share, dims=(), product_slice=None)
    is_elementwise = call.name not in MATMUL_OPS and call.name != "scaled_dot_product_attention"
    return replace(
        share, dims=dims if is_elementwise else dims[:1], product_slice=share.product_slice if is_elementwise else None
    )
