"""Profiles one forward and backward on fake tensors and assigns every operation and every saved byte to the layer that
is running. fake_step.py runs the step, and model_spec.py derives the costs per token for the planner.

[Note: saved bytes] Saved-tensor hooks record what autograd saves. A storage counts once, for the layer that saves it
first. A storage that several blocks save (rotary tables, a mask) counts for the layer that made it. Parameters do not
count. Elements in the compute dtype and bytes in fixed dtypes are counted separately. A cast to float32 makes a new
storage only if the compute dtype is narrower. The profile runs in the job's compute dtype on CPU tensors. Shapes, saved
tensors and dtypes are those of a GPU, with three exceptions that the profile corrects. On a GPU, dropout saves a mask
of one byte per element. Statistics of norms take 4 bytes each on a GPU. Attention saves no score matrices on a GPU. On
the CPU, torch computes them if attention has dropout, or if values and queries have different widths (multi-head latent
attention). CUDA kernels recompute dropout from its seed, and the memory-efficient kernel supports any width.

[Note: sharded activations] The output of a column-parallel weight is sharded over tensor ranks. So is everything that
is computed from this output, until a row-parallel weight reads it. The size of saved sharded tensors is divided by tp.
The size of all others is not.

[Note: compiled] A compiled block saves fewer tensors (runtime/compile.py). It drops a tensor that is saved only for
recomputable functions and can itself be recomputed. The result of a reduction, such as the 1/rms of a norm, is saved:
torch does not recompute results smaller than a quarter of their inputs. `RematTape`, which finds what selective
recompute drops, also records for which functions a tensor is saved.

[Note: transient] The transient bytes of a layer are measured while backward runs this layer. They are the live bytes
minus the bytes that this layer and all earlier layers have saved. The saved tensor that backward requests shows which
layer is running.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.analysis.graph import TpSplit
from meshwright.analysis.profile.flops import FUSED_ATTENTION_OPS, GROUPED_MM, operation_cost, operation_name
from meshwright.analysis.recompute_min_cut import RematPlan, RematValue, StorageView, ancestors_in_order, plan_remat
from meshwright.analysis.recompute_tape import RematTape


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Computes attention without dropout and without score matrices, as a fused kernel does. Takes the arguments of
    `scaled_dot_product_attention` and returns its output.
    """
    causal = bool(named.get("is_causal", rest[1] if len(rest) > 1 else False))
    scale, grouped = named.get("scale"), bool(named.get("enable_gqa", False))
    if value.shape[-1] == query.shape[-1] or query.ndim != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, causal, scale=scale, enable_gqa=grouped
        )
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = bias.expand(*query.shape[:-1], key.shape[-2])
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, 0.0, causal, scale=scale
    )[0]
    return output


NORM_OPS = frozenset({"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"})
MHA_DROPOUT_INDEX = 10
"""Position of `dropout_p` among the arguments of `multi_head_attention_forward`."""

REDUCTION_FACTOR = 4
"""A function counts as a reduction if its inputs have more than this many times the bytes of its output."""

STATISTIC_BYTES = 4
"""Bytes of one mean or 1/std on a GPU, for any dtype of the input."""


@dataclass
class DroppedBytes:
    """What a layer does not save: `derived_*` under selective recompute, `fused_*` in compiled blocks.

    The suffixes are those of `LayerStats`. `fused_gates` are the elements of `fused_split` that a block does save if it
    is compiled in pieces. `derived_moved` are the bytes that the recompute reads and writes.
    """

    derived_split: float = 0.0
    derived_whole: float = 0.0
    derived_fixed_split: float = 0.0
    derived_fixed_whole: float = 0.0
    derived_moved: float = 0.0
    fused_split: float = 0.0
    fused_gates: float = 0.0
    fused_whole: float = 0.0
    fused_fixed_split: float = 0.0
    fused_fixed_whole: float = 0.0


@dataclass
class LayerStats:
    """Totals of one layer in one profiled step, over the whole batch.

    `saved_*` count elements in the compute dtype. `fixed_*` count bytes of tensors whose dtype does not depend on it.
    `*_split` is sharded over tensor ranks, `*_whole` is not. `core_fixed` are the bytes of `fixed_split` that fused
    attention saves. `moved` and `transient` are bytes; `routed`, `output` and the widths are elements. `LayerSpec`
    describes the fields of the same names.
    """

    flops: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    saved_split: float = 0.0
    saved_whole: float = 0.0
    fixed_split: float = 0.0
    fixed_whole: float = 0.0
    core_fixed: float = 0.0
    query_width: float = 0.0
    key_value_width: float = 0.0
    routed: float = 0.0
    transient: float = 0.0
    output: float = 0.0
    dropped: DroppedBytes = field(default_factory=DroppedBytes)

    def values(self) -> dict[str, float]:
        """Returns all totals by name, including those of `dropped`."""
        return {name: value for name, value in (vars(self) | vars(self.dropped)).items() if name != "dropped"}


class StorageOrigin(NamedTuple):
    """Describes where a storage comes from.

    `layer` made the storage. `weight` is the name of a weight if the storage is computed from weights alone.
    `is_sharded`: whether tensor ranks have shards of the storage. `is_statistic`: whether it is the mean or 1/std of a
    norm. `is_core`: whether fused attention saves it in addition to its operands and output. `from_input`: whether it
    is an input of the model or computed from one.
    """

    layer: str
    weight: str | None = None
    is_sharded: bool = False
    is_statistic: bool = False
    is_core: bool = False
    from_input: bool = False


@dataclass
class SavedStorage:
    """A storage that autograd saves: the layers that save it in forward order, and its size in bytes."""

    layers: dict[str, None]
    dtype: torch.dtype
    size: int


@dataclass
class ActivationProfiler:
    """Profiles one step. After `backward`, `layers` has the totals of each layer."""

    compute: torch.dtype
    splits: Mapping[str, TpSplit]
    layer: str
    rows: int
    layers: dict[str, LayerStats] = field(default_factory=lambda: defaultdict(LayerStats))
    looked_up: dict[str, int] = field(default_factory=dict)
    """Maps each table that is indexed by position alone, such as learned positions, to the number of positions looked
    up.
    """
    origins: weakref.WeakKeyDictionary[Any, StorageOrigin] = field(default_factory=weakref.WeakKeyDictionary)
    saved: weakref.WeakKeyDictionary[Any, SavedStorage] = field(default_factory=weakref.WeakKeyDictionary)
    alive: dict[weakref.ref[Any], int] = field(default_factory=dict)
    live: int = 0
    dropped: dict[str, weakref.WeakKeyDictionary[Any, str]] = field(
        default_factory=lambda: {what: weakref.WeakKeyDictionary() for what in ("derived", "fused")}
    )
    """Maps the storages that selective recompute ('derived') or compilation ('fused') drops to the block that would
    save them.
    """
    gates: weakref.WeakKeyDictionary[Any, str] = field(default_factory=weakref.WeakKeyDictionary)
    """Maps storages that a compiled block drops to this block, if it saves them when it is compiled in pieces."""
    tape: RematTape | None = None
    packed: list[tuple[torch.Tensor, bool]] = field(default_factory=list)
    """Saved tensors of the running block, and for each whether it is saved for a recomputable function."""
    before: dict[str, float] | None = None
    """Maps each layer to the bytes that this layer and all earlier layers have saved. None before backward."""

    def register_inputs(self, parameters: Mapping[str, torch.Tensor], inputs: Any) -> None:
        """Registers parameters, which do not count, and the inputs of the model. Floating-point inputs count for the
        layer that saves them, because the runtime casts them. Integer inputs do not count.
        """
        for name, tensor in parameters.items():
            self.origins[tensor.untyped_storage()] = StorageOrigin("", name)
        for tensor in tree_leaves(inputs):
            self._track([tensor.untyped_storage()], StorageOrigin("", from_input=True))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records operations and saved tensors inside the context."""
        with saved_tensors_hooks(self._pack, self._unpack), _CudaLikeFunctions(), _ProfilerMode(self):
            yield

    def backward(self, outputs: list[torch.Tensor], order: list[str]) -> None:
        """Runs backward from `outputs`, and assigns the saved bytes and transient bytes to layers. `order` has the
        layers in forward order.
        """
        self._assign_saved()
        total, self.before = 0.0, {}
        for place in order:
            tally = self.layers[place]
            total += (
                tally.fixed_split + tally.fixed_whole + (tally.saved_split + tally.saved_whole) * self.compute.itemsize
            )
            self.before[place] = total
        root = torch.stack([output.sum() for output in outputs]).sum()
        outputs.clear()
        root.backward()

    # --- saved tensors

    def begin_block(self, given: Any) -> None:
        """Records the start of a block with the arguments `given`."""
        self.tape = RematTape(tree_leaves(given), plain=(FakeTensor,))
        self.tape.__enter__()

    def end_block(self) -> None:
        """Records the end of a block. Computes what selective recompute and the compiler drop."""
        tape = self.end_tape()
        assert tape is not None
        requested = tape.requested_values(tensor for tensor, _ in self.packed)
        read = tape.requested_values(tensor for tensor, is_cheap in self.packed if not is_cheap)
        gates = self._separated_by_products(requested)
        self.packed.clear()
        least = self._drop("derived", requested, plan_remat(requested, {}))
        self.layers[self.layer].dropped.derived_moved += sum(_recompute_bytes(value) for value in least.recomputed)
        sums = {
            value: None
            for value in ancestors_in_order(requested)
            if REDUCTION_FACTOR * value.nbytes < sum(_view_bytes(view) for view in value.sources)
        }
        fused = self._drop("fused", requested, plan_remat(requested, {}, read | sums))
        self.gates.update(
            {
                storage: self.layer
                for value in gates
                if value not in fused.saved and (storage := value.storage()) is not None
            }
        )

    def _separated_by_products(self, requested: Iterable[RematValue]) -> list[RematValue]:
        """Returns the values of `requested` that a matrix product separates from their inputs: the product runs after
        the inputs are saved and before the value is saved.

        If products separate the compiled graphs of a block, such a value crosses from one graph to the next, so it is
        saved. See [Note: in pieces] in planner/cost/activations.py.
        """
        first: dict[int, int] = {}
        products = [at for at, (_, is_cheap) in enumerate(self.packed) if not is_cheap]
        for at, (tensor, _) in enumerate(self.packed):
            first.setdefault(tensor.untyped_storage()._cdata, at)
        place = {
            value: first[storage._cdata]
            for value in requested
            if (storage := value.storage()) is not None and storage._cdata in first
        }
        made = {
            value: max((place[view.value] for view in value.sources if view.value in place), default=at)
            for value, at in place.items()
        }
        return [value for value, at in place.items() if any(made[value] < product < at for product in products)]

    def _drop(self, what: str, requested: Collection[RematValue], cut: RematPlan) -> RematPlan:
        for value in (
            *(value for value in cut.saved if value not in requested),
            *(value for value in cut.needed if value.entered),
        ):
            if (storage := value.storage()) not in self.saved:
                self._add(what, self.layer, storage, value.probe.dtype, -value.nbytes)
        for value in requested:
            if value not in cut.saved:
                self.dropped[what][value.storage()] = self.layer
        return cut

    def end_tape(self) -> RematTape | None:
        """Ends the tape of the running block and returns it, None if no block is running."""
        tape, self.tape = self.tape, None
        if tape is not None:
            tape.__exit__(None, None, None)
        return tape

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        storage = tensor.untyped_storage()
        if self.tape is not None:
            self.packed.append((tensor, self.tape.is_cheap))
        if storage in self.saved:
            self.saved[storage].layers[self.layer] = None
        elif storage not in self.origins or self.origins[storage].weight is None:
            self.saved[storage] = SavedStorage({self.layer: None}, tensor.dtype, storage.nbytes())
        return tensor, self.layer

    def _unpack(self, packed: tuple[torch.Tensor, str]) -> torch.Tensor:
        tensor, self.layer = packed
        return tensor

    def _assign_saved(self) -> None:
        for storage, entry in self.saved.items():
            origin = self.origins.get(storage, StorageOrigin(""))
            if origin.from_input and not origin.layer and not entry.dtype.is_floating_point:
                continue
            first = next(iter(entry.layers))
            blocks = sum(place.startswith("block.") for place in entry.layers)
            place = origin.layer if blocks > 1 and origin.layer else first
            self._add("saved", place, storage, entry.dtype, entry.size)
            for what, storages in self.dropped.items():
                if storages.get(storage) == place and len(entry.layers) == 1:
                    self._add(what, place, storage, entry.dtype, entry.size)
            if (
                self.gates.get(storage) == place
                and len(entry.layers) == 1
                and entry.dtype == self.compute
                and origin.is_sharded
            ):
                self.layers[place].dropped.fused_gates += entry.size / entry.dtype.itemsize

    def _add(self, what: str, place: str, storage: Any, dtype: torch.dtype, size: float) -> None:
        """Adds `size` bytes of `dtype` to a total of the layer `place`. `what` is 'saved', 'derived' or 'fused'."""
        tally, origin = self.layers[place], self.origins.get(storage, StorageOrigin(""))
        is_element = dtype == self.compute and not origin.is_statistic and not origin.is_core
        amount = (
            size / dtype.itemsize * (1 if is_element else STATISTIC_BYTES if origin.is_statistic else dtype.itemsize)
        )
        side = "split" if origin.is_sharded else "whole"
        name = f"{what}_{side}" if is_element else f"fixed_{side}" if what == "saved" else f"{what}_fixed_{side}"
        target = tally if what == "saved" else tally.dropped
        setattr(target, name, getattr(target, name) + amount)
        tally.core_fixed += amount if origin.is_core and name == "fixed_split" else 0.0

    # --- operations
    def record(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records one operation: the origins of its results, and its FLOPs and bytes for the running layer."""
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not made:
            return
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in given]
        fresh = [storage for tensor in made if (storage := tensor.untyped_storage()) not in storages]
        if self.before is not None:
            self._track(fresh, StorageOrigin(self.layer))
            tally = self.layers[self.layer]
            tally.transient = max(tally.transient, self.live - self.before.get(self.layer, 0.0))
            return
        if not fresh and not operation._schema.is_mutable:
            return  # the operation only makes a view
        origins = [self.origins.get(storage, StorageOrigin(self.layer)) for storage in storages]
        weights = [origin.weight for origin in origins if origin.weight is not None]
        name = operation_name(operation)
        if (
            name == "embedding"
            and weights
            and not origins[1].from_input
            and given[1].shape[:-1] in ((), (1,), (self.rows,))
        ):
            self.looked_up[weights[0]] = given[1].shape[-1]
        price = operation_cost(operation, args, kwargs, given, made, bool(weights))
        tally = self.layers[self.layer]
        if not weights or len(weights) < len(given):
            tally.flops += price.flops
            tally.attention += price.attention
            tally.moved += price.moved if name != "embedding" else 2 * made[0].numel() * made[0].element_size()
        self._track(fresh, self._origin(origins, weights, price.is_product))
        if name in FUSED_ATTENTION_OPS:
            tally.query_width += given[0].numel()
            tally.key_value_width += given[1].numel() + given[2].numel()
        if name == GROUPED_MM and not tally.routed:  # the first expert product reads all routed tokens
            tally.routed = given[0].numel()
        if name in FUSED_ATTENTION_OPS or name in NORM_OPS:
            for tensor in made[1:]:
                storage = tensor.untyped_storage()
                self.origins[storage] = self.origins[storage]._replace(
                    is_statistic=name in NORM_OPS, is_core=name in FUSED_ATTENTION_OPS
                )

    def _origin(self, origins: list[StorageOrigin], weights: list[str], is_product: bool) -> StorageOrigin:
        if origins and len(weights) == len(origins):
            return StorageOrigin(self.layer, weights[0])
        is_share = any(origin.is_sharded for origin in origins)
        if is_product and any(weight in self.splits for weight in weights):
            is_share = not is_share  # the output of a column weight is sharded, the sum after a row weight is not
        return StorageOrigin(self.layer, None, is_share, from_input=any(origin.from_input for origin in origins))

    def _track(self, storages: list[Any], origin: StorageOrigin) -> None:
        for storage in storages:
            if storage in self.origins:
                continue
            self.origins[storage] = origin
            reference = weakref.ref(storage, self._freed)
            self.alive[reference] = storage.nbytes()
            self.live += storage.nbytes()

    def _freed(self, reference: weakref.ref[Any]) -> None:
        self.live -= self.alive.pop(reference)


class _ProfilerMode(TorchDispatchMode):
    """Passes every operation to the profiler."""

    def __init__(self, watch: ActivationProfiler) -> None:
        super().__init__()
        self.profiler = watch

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.ops.prim.device.default, torch.ops.aten.set_.source_Storage_storage_offset):
            self.profiler.record(function, args, kwargs or {}, result)
        return result


class _CudaLikeFunctions(TorchFunctionMode):
    """Makes dropout and attention save what they save on a CUDA device. An append to an empty key-value cache returns
    the appended tensor, because training stores no cache.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return fused_attention(*args, **kwargs)
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if function is F.multi_head_attention_forward:  # the mode does not intercept functions that it calls
            args = (*args[:MHA_DROPOUT_INDEX], 0.0, *args[MHA_DROPOUT_INDEX + 1 :])
        if function is torch.cat and len(args[0]) == 2 and args[0][0].numel() == 0:
            return args[0][1]
        return function(*args, **kwargs)


def _recompute_bytes(value: RematValue) -> int:
    """Returns the number of bytes that the recompute of a value reads and writes."""
    return value.nbytes + sum(map(_view_bytes, value.sources))


def _view_bytes(view: StorageView) -> int:
    return view.size.numel() * view.dtype.itemsize


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input
