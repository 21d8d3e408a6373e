"""Shards a model in place for tensor parallelism: column and row layers on local tensors, with one collective at the
beginning of a region and one at its end. The build calls `shard_model`.

A region is a part of a block, such as attention or MLP (analysis/graph.py). It begins at the module whose input the
column layers read, and ends after the row layers. A column layer computes its local output features without
communication. A row layer sums its output over the ranks, and then adds its bias. Convolutions are sharded by channels
in the same way. With fewer key-value heads than ranks, every rank stores the full projections of keys and values, but
computes only the heads that it needs. Under sequence parallelism the hidden state is sharded along the sequence, from
the input of the first block to the output of the last block. A region then gathers the hidden state at its beginning
and reduce-scatters it at its end. In embedding and head, each rank stores a part of the vocabulary.

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing Activation Recomputation (2022),
section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.block_lists import find_block_lists  # fmt: skip
from meshwright.analysis.graph import ModelGraph, TpRegion, TpSplit, local_shard, shard_intervals, shard_view
from meshwright.analysis.layer_rules.rule import LayerRule, is_linear_like, rule_of
from meshwright.analysis.local_layers import (
    LocalHeadsHook,
    set_local_heads,
    update_layer_sizes,
)
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.float8 import float8_layer
from meshwright.runtime.tensor_parallel import collectives
from meshwright.runtime.tensor_parallel.chunks import network_backends
from meshwright.runtime.tensor_parallel.column import ColumnLinear, RegionEntryHook, ReplicatedInputHook
from meshwright.runtime.tensor_parallel.random import install_tp_rng
from meshwright.runtime.tensor_parallel.row import row_chunk_count, row_forward, row_layer
from meshwright.runtime.weight_gradients import is_functorch_tensor, matmul_forward


def shard_model(model: nn.Module, anatomy: ModelGraph, group: CommGroup | None, sequence_parallel: bool) -> None:
    """Shards `model` in place over `group`, and does nothing if `group` is None. The model's parameters must be full,
    with the same values on every rank. Call this function only once per model.

    Raises:
        InputError: the model cannot be sharded. If the error comes from `check_divisible`, the model is unchanged.
    """
    if group is None:
        return
    ranks, index = group.size, group.index
    anatomy = anatomy.for_tp(ranks)
    check_divisible(model, anatomy, ranks, sequence_parallel)
    table = (
        model.get_submodule(anatomy.embedding or "").weight if anatomy.shards_vocabulary(anatomy.embedding) else None
    )
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.weight is table]
    _shard_parameters(model, anatomy, index, ranks)
    columns = {f"{path}.weight" for region in anatomy.regions for path in region.columns}
    for name in anatomy.partly_used.keys() - columns if anatomy.regions else ():
        if name.endswith(".weight"):  # an adapter outside the column layers, of which a rank uses only some outputs
            _make_column_subset(
                model.get_submodule(name.removesuffix(".weight")), None, anatomy.partly_used[name], group
            )
    for region in anatomy.regions:
        _enter_region(model, region, anatomy, group, sequence_parallel)
        for path in region.rows:
            _make_row(model.get_submodule(path), anatomy.splits[f"{path}.weight"], group, sequence_parallel)
        for one in region.per_head_args:
            taken = LocalHeadsHook(one, ranks, lambda tensor, dim: collectives.scatter_sequence(tensor, group, dim))
            model.get_submodule(one.path).register_forward_pre_hook(taken, with_kwargs=True)
        set_local_heads(model, region, ranks)
    for module in tables:  # the embedding modules of encoder and decoder may have one common weight
        VocabParallelEmbedding(module, shard_intervals(anatomy.vocabulary, index, ranks)[0], group)
    if anatomy.shards_vocabulary(anatomy.head):
        head, entry = model.get_submodule(anatomy.head or ""), RegionEntryHook(group, False, 1, in_block=False)
        head.register_forward_pre_hook(entry, with_kwargs=True)
        _make_column(head, entry, TpSplit(0))
    install_tp_rng(model, anatomy, group, sequence_parallel)


def check_divisible(model: nn.Module, anatomy: ModelGraph, ranks: int, sequence_parallel: bool) -> None:
    """Raises InputError if `model` cannot be sharded over `ranks` tensor ranks. The message names the sizes in
    `anatomy.divisible` that `ranks` does not divide. If there are none, the message names the sizes of split tensors
    that `ranks` does not divide."""
    wrong = [
        f"{name} ({size})"
        for name, size in anatomy.divisible.items()
        if size % ranks and (name != "kv_heads" or ranks % size)
    ]
    vocabulary = _vocab_sharded_names(model, anatomy)  # shards of the vocabulary may be uneven
    for name, split in anatomy.splits.items() if not wrong else ():
        tensor = _get_tensor(model, name)
        sizes = split.parts or (tensor.shape[split.dim],)
        wrong += [f"{name} ({size})" for size in sizes if name not in vocabulary and size % ranks]
    if wrong:
        raise InputError(
            Message("tp({ranks}) must divide {wrong}: choose another tp", ranks=ranks, wrong=", ".join(wrong))
        )
    if not (anatomy.regions or anatomy.experts):
        raise InputError(
            Message(
                "tp({ranks}): no part of this model can be sharded ({findings}): use tp1",
                ranks=ranks,
                findings="; ".join(anatomy.findings),
            )
        )
    if vocabulary and anatomy.vocabulary <= -(-anatomy.vocabulary // ranks) * (ranks - 1):
        raise InputError(
            Message(
                "tp({ranks}) leaves tensor rank {last} without a part of the vocabulary ({vocabulary}): choose a "
                "smaller tp",
                ranks=ranks,
                last=ranks - 1,
                vocabulary=anatomy.vocabulary,
            )
        )
    if sequence_parallel and anatomy.against_sequence:
        raise InputError(
            Message("sp: {against_sequence}: leave sequence parallelism out", against_sequence=anatomy.against_sequence)
        )


def with_full_logits(model: nn.Module, anatomy: ModelGraph) -> ModelGraph:
    """Returns `anatomy` with an unsharded head, because the user's loss reads full logits."""
    if not anatomy.shards_vocabulary(anatomy.head):
        return anatomy
    table = None if anatomy.tied else model.get_submodule(anatomy.embedding or "").weight
    whole = {name for name in _vocab_sharded_names(model, anatomy) if _get_tensor(model, name) is not table}
    return replace(anatomy, splits={name: split for name, split in anatomy.splits.items() if name not in whole})


def _vocab_sharded_names(model: nn.Module, anatomy: ModelGraph) -> set[str]:
    """Returns the names of the parameters and buffers that are sharded along the vocabulary."""
    inside = tuple(f"{path}." for path in find_block_lists(model))
    outside = {name: split for name, split in anatomy.splits.items() if not name.startswith(inside)}
    return {name for name, split in outside.items() if _get_tensor(model, name).shape[split.dim] == anatomy.vocabulary}


def _get_tensor(model: nn.Module, name: str) -> torch.Tensor:
    """Returns the parameter or buffer `name`."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    found = module._parameters.get(last)
    return module.get_buffer(last) if found is None else found


def partial_grad_names(model: nn.Module, anatomy: ModelGraph, sequence_parallel: bool = True) -> set[str]:
    """Returns the names of the replicated parameters whose gradients are partial sums on each tensor rank, and must be
    summed over the tensor ranks.

    Under sequence parallelism these are all replicated parameters inside the blocks (norms, biases of row layers) and
    between blocks, because each rank applies them to a slice of the sequence. Without sequence parallelism they are
    only parameters that are applied to sharded features, such as a norm of each head.
    """
    inside = tuple(f"{path}." for path, _ in anatomy.stacks) or (f"{anatomy.blocks}.",)
    names = [name for name, _ in model.named_parameters() if name not in anatomy.splits]
    return {
        name
        for name in names
        if name in anatomy.partial
        or (sequence_parallel and (name.startswith(inside) or name in anatomy.sequence_sliced))
    }


def _shard_parameters(model: nn.Module, anatomy: ModelGraph, index: int, ranks: int) -> None:
    """Replaces every parameter in `anatomy.splits` by this rank's shard, in all modules that use the parameter. So tied
    weights remain tied."""
    by_identity = {
        id(tensor): anatomy.splits[name] for name, tensor in model.named_parameters() if name in anatomy.splits
    }
    shards: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, full in list(module._parameters.items()):
            if full is None or id(full) not in by_identity:
                continue
            if id(full) not in shards:
                local = local_shard(full.detach(), by_identity[id(full)], index, ranks)
                shards[id(full)] = nn.Parameter(local, requires_grad=full.requires_grad)
            module._parameters[name] = shards[id(full)]
            update_layer_sizes(module)
    for name in anatomy.splits.keys() & dict(model.named_buffers()).keys():  # buffers of statistics for each channel
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        owner._buffers[last] = local_shard(owner.get_buffer(last), anatomy.splits[name], index, ranks)


def _enter_region(
    model: nn.Module, region: TpRegion, anatomy: ModelGraph, group: CommGroup, sequence_parallel: bool
) -> None:
    columns = {
        path: layer for path in region.columns if not isinstance(layer := model.get_submodule(path), nn.Embedding)
    }
    readers = [path for path in columns if path not in region.inner_columns]
    entered = (region.module,) if region.module else region.entries or readers
    entry = RegionEntryHook(group, sequence_parallel, len(readers), len(entered))
    for path in entered:
        model.get_submodule(path).register_forward_pre_hook(entry, with_kwargs=True)
    for path in region.mla_inputs:
        model.get_submodule(path).register_forward_hook(ReplicatedInputHook(group, sequence_parallel))
    for path, layer in columns.items():
        name = f"{path}.weight"
        if name in anatomy.partly_used:
            _make_column_subset(layer, entry if path in readers else None, anatomy.partly_used[name], group)
        elif path in readers:  # column layers that read the output of a replicated layer keep their forward
            _make_column(layer, entry, anatomy.splits[name])


def _make_column(module: nn.Module, entry: RegionEntryHook, split: TpSplit) -> None:
    if is_linear_like(module):
        module.forward = ColumnLinear(module, entry, split.dim == 0).forward  # type: ignore[method-assign]
    else:  # other layers keep their forward, and autograd computes their gradients
        module.register_forward_hook(entry.was_read)


def _make_column_subset(module: nn.Module, entry: RegionEntryHook | None, split: TpSplit, group: CommGroup) -> None:
    """Replaces the forward of a replicated layer, so that it computes only the outputs that this rank uses."""
    if not is_linear_like(module):
        raise InputError(
            Message(
                "tp({size}): {type} has a custom forward, and tp({size}) is larger than its number of key-value heads: "
                "choose a smaller tp",
                size=group.size,
                type=type(module).__name__,
            )
        )
    along_bias = TpSplit(0, split.parts, split.ways)

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        own = None if bias is None else shard_view(bias, along_bias, group.index, group.size)
        products = float8_layer(module)
        if products is not None:
            output = products.multiply_replicated(x, group)
            output = shard_view(output, replace(split, dim=output.ndim - 1), group.index, group.size)
            return output if own is None else output + own
        mine = shard_view(weight, split, group.index, group.size)
        return F.linear(x, mine if split.dim == 0 else mine.t(), own)

    forward.is_traceable = True  # type: ignore[attr-defined]
    module.forward = forward  # type: ignore[assignment]
    if entry is not None:
        module.register_forward_hook(entry.was_read)


def _make_row(module: nn.Module, split: TpSplit, group: CommGroup, sequence_parallel: bool) -> None:
    leave = collectives.reduce_scatter_from_region if sequence_parallel else collectives.reduce_from_region
    if is_linear_like(module):
        module.forward = RowLinear(module, split.dim == 1, group, sequence_parallel).forward  # type: ignore[method-assign]
    elif rule_of(module).adds_bias_last:
        module.forward = RowLayer(module, rule_of(module), lambda x: leave(x, group)).forward  # type: ignore[method-assign]
    else:  # these layers have no bias (analysis/regions.py), so they keep their forward
        module.register_forward_hook(RowOutputHook(lambda x: leave(x, group)))


class RowLinear:
    """Replaces the forward of a linear row layer: sums the local product over the ranks, and then adds the bias. Large
    layers are computed in chunks, whose sums overlap with products (row.py). `linear`: whether the weight is (out, in)
    instead of (in, out)."""

    is_traceable = True

    def __init__(self, module: nn.Module, linear: bool, group: CommGroup, sequence_parallel: bool) -> None:
        self.module, self.linear, self.group, self.sequence_parallel = module, linear, group, sequence_parallel
        self.backends = network_backends(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.module._parameters.get("bias")
        output = self._summed_product(x)
        return output if bias is None else output + bias

    def _summed_product(self, x: torch.Tensor) -> torch.Tensor:
        leave = collectives.reduce_scatter_from_region if self.sequence_parallel else collectives.reduce_from_region
        products = float8_layer(self.module)
        if products is not None:
            return leave(products.multiply(x), self.group)
        weight = self.module._parameters["weight"]
        assert weight is not None
        sliced = self.group.size if self.sequence_parallel else 1
        outputs = weight.shape[0 if self.linear else 1]
        chunks = row_chunk_count(x, outputs, self.backends, sliced)
        if chunks > 1 and torch.compiler.is_compiling():
            full = weight if self.linear else weight.t()
            return row_layer(x, full, self.group.key, chunks, self.sequence_parallel)
        if chunks > 1 and not is_functorch_tensor(x):
            sink = getattr(self.module, "put_off", None)
            return row_forward(x, weight, chunks, (self.group, self.sequence_parallel, self.linear, sink))
        return leave(matmul_forward(self.module, x, None, self.linear), self.group)


class RowLayer:
    """Replaces the forward of a row layer that is not linear, such as a convolution. Sums the local outputs over the
    ranks with `leave`, and then adds the bias as the layer's rule defines."""

    is_traceable = True

    def __init__(self, module: nn.Module, rule: LayerRule, leave: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.module, self.rule, self.leave = module, rule, leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.module._parameters.get("bias")
        output = self.leave(self.rule.forward_without_bias(self.module, x))
        return output if bias is None else self.rule.add_bias(output, bias)


class RowOutputHook:
    """A forward hook of a row layer without a bias. Sums the local outputs over the ranks with `leave`."""

    is_traceable = True

    def __init__(self, leave: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.leave = leave

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.leave(output)


class VocabParallelEmbedding:
    """Adds hooks to an embedding that stores only the vocabulary rows [start, stop), given by `rows`. For all other
    token ids, this rank's output is zero. The outputs of all ranks are summed."""

    def __init__(self, module: nn.Module, rows: tuple[int, int], group: CommGroup) -> None:
        self.rows, self.group = rows, group
        self.missing: torch.Tensor | None = None
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            module.padding_idx = padding - rows[0] if rows[0] <= padding < rows[1] else None  # type: ignore[assignment]
        module.register_forward_pre_hook(self._local_ids)
        module.register_forward_hook(self._sum)

    def _local_ids(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        start, stop = self.rows
        missing = (args[0] < start) | (args[0] >= stop)
        self.missing = missing
        return ((args[0] - start).masked_fill(missing, 0), *args[1:])

    def _sum(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        assert self.missing is not None
        missing, self.missing = self.missing, None
        return collectives.reduce_from_region(output.masked_fill(missing.unsqueeze(-1), 0), self.group)


class SequenceParallelRegion:
    """Shards the hidden state over tensor ranks along the sequence, from `enter` (before the first block) to `leave`
    (after the last block)."""

    def __init__(self, group: CommGroup | None) -> None:
        self.group = group
        self.ranks = 1 if group is None else group.size

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns this rank's slice (B, T / ranks, C) of `hidden` (B, T, C).

        Raises:
            InputError: T is not a multiple of the number of ranks. The error is raised before any collective.
        """
        if hidden.shape[1] % self.ranks:
            raise InputError(
                Message(
                    "sequence ({shape}) is not a multiple of tp({ranks}), which sequence parallelism needs: pad the "
                    "sequence or leave sp out",
                    shape=hidden.shape[1],
                    ranks=self.ranks,
                )
            )
        return collectives.scatter_sequence(hidden, self.group)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gathers the slices (B, T / ranks, C) of all ranks. Returns (B, T, C)."""
        return collectives.gather_replicated(hidden, self.group)
