"""Runs simulated tensor-parallel ranks on one block and compares them with the full block: outputs, gradients, and
written tensors. `ShardingCheck` (verify_sharding.py) uses it to verify regions. A region consists of column-parallel
layers and the row-parallel layers that read their outputs. At its entry every rank has the full input.

A run is cut at every point where ranks communicate (Shoeybi et al., Megatron-LM, 2019, section 3; Korthikanti et al.,
2022, section 4.2.2). At this point each rank receives the value that the full block computed, instead of the result of
a collective. So the ranks can run one after the other. Each segment between two communication points is compared
separately ("slice" is the slice of the rank under sequence parallelism):

| point | each rank contributes | each rank receives |
|---|---|---|
| input and output of the block | the full tensor, or its slice | the contributed tensor |
| entry of a region, MLA input | the full tensor, or its slice | the full tensor; its gradient is summed over ranks |
| row layer | a partial sum | the sum over ranks, or its slice |
| argument with one entry for each head | the full tensor | the heads of the rank |

Backward begins at every contributed tensor with a random gradient, and ends at every received tensor and at the
parameters. A sharded parameter must get the shard of the gradient. The gradients of a partial parameter must add up
over ranks to the full gradient. Any other parameter must get the full gradient on every rank. A gradient is linear in
the gradients at which backward begins. So if all segments agree, the whole block agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.analysis.dry_run import ParamWriteRecorder, storage_spans
from meshwright.analysis.graph import PerHeadArg, TpSplit, shard_intervals, shard_view
from meshwright.analysis.layer_rules.rule import rule_of
from meshwright.analysis.local_layers import (
    LocalHeadsHook,
    restore_attributes,
    set_local_heads,
    update_layer_sizes,
)
from meshwright.analysis.regions import RegionCandidate
from meshwright.analysis.run_comparison import (
    MAX_COMPARED_NUMEL,
    BlockCall,
    GradProjection,
    ModuleSnapshot,
    RandomMatrices,
    RankRunRecord,
    ShardFunction,
    clone_if_small,
    compare_comm_points,
    compare_param_grads,
    find_hidden_states,
    identity,
    run_backward,
    sequence_shard,
)
from meshwright.analysis.run_conditions import fresh_leaves, leaf_copy, relative_difference, set_seed
from meshwright.analysis.trace_log import PerHeadInput


class SplitCase(NamedTuple):
    """A split of a block: `regions` over `ranks` tensor ranks. `sequence`: whether the hidden state is also split along
    the sequence.
    """

    regions: Sequence[RegionCandidate]
    ranks: int
    sequence: bool = False


class SimulatedBlockRuns:
    """Runs the block at `path`, in full and on simulated ranks, with the inputs `reached` that the block received in
    the model. `shares` are arguments that an earlier block has already sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        reached: BlockCall,
        shares: Sequence[tuple[PerHeadInput, frozenset[str]]],
        matrices: RandomMatrices,
    ) -> None:
        self.matrices = matrices
        self.model, self.path, self.call, self.sharded_args = model, path, reached, shares
        self.block = model.get_submodule(path)
        self.is_meta = any(tensor.is_meta for tensor in self.block.parameters())
        self.large = {
            name: tensor
            for name, tensor in self._tensors().items()
            if tensor.numel() > MAX_COMPARED_NUMEL and not tensor.is_meta
        }
        self.full_run: RankRunRecord | None = None
        self.sharded_output_dims: dict[int, list[int]] = {}
        """Maps the index of each output, except the hidden state, to the dimensions along which a rank returns a
        shard.
        """

    def compare(self, cases: Sequence[SplitCase], gradients: bool) -> list[str | None]:
        """Returns, for each of `cases`, why the block cannot be split in this way, None if it can. All cases must have
        equal regions. `gradients`: whether gradients are compared too.
        """
        slices = {
            case.ranks: [self._local_tensors(case, rank) for rank in range(case.ranks)] for case in reversed(cases)
        }
        before, self.full_run = ModuleSnapshot(self.block), None
        try:
            known = self._run(cases[0]._replace(ranks=1, sequence=False), 0, {}, gradients)
            splits = splits_of_case(cases[0])
            after = {
                name: known.written.get(name, tensor) for name, tensor in self._tensors().items() if name in splits
            }
        except Exception as error:
            before.restore()
            return [_describe_run_failure(error)] * len(cases)
        self.full_run = known
        try:
            return [self._compare_case(each, known, slices[each.ranks], before, after, gradients) for each in cases]
        finally:
            before.restore()
            self.full_run = None

    def _compare_case(
        self,
        case: SplitCase,
        known: RankRunRecord,
        slices: Sequence[Mapping[str, torch.Tensor]],
        before: ModuleSnapshot,
        after: Mapping[str, torch.Tensor],
        gradients: bool,
    ) -> str | None:
        ranks = []
        for rank, each in enumerate(slices):
            before.restore()
            local = {name: clone_if_small(tensor) for name, tensor in each.items()}
            try:
                ranks.append(self._run(case, rank, local, gradients))
            except Exception as error:
                return _describe_run_failure(error)
            if (why := self._compare_writes(case, rank, local, after, ranks[-1], known)) is not None:
                return why
        return self._compare_runs(case, known, ranks, gradients)

    # --- tensors
    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers of the block by full name. A tied tensor has only its first name."""
        return {
            f"{self.path}.{name}": tensor
            for name, tensor in (*self.block.named_parameters(), *self.block.named_buffers())
        }

    def _local_tensors(self, case: SplitCase, rank: int) -> dict[str, torch.Tensor]:
        """Returns the shards of `rank` of the split tensors by name: copies of small tensors, and views of large
        tensors.
        """
        splits, found = splits_of_case(case), {}
        for name, tensor in self._tensors().items():
            if name in splits:
                share = shard_view(tensor.detach(), splits[name], rank, case.ranks)
                local = share if name in self.large else share.clone(memory_format=torch.contiguous_format)
                found[name] = nn.Parameter(local, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else local
        return found

    def _compare_writes(
        self,
        case: SplitCase,
        rank: int,
        local: Mapping[str, torch.Tensor],
        after: Mapping[str, torch.Tensor],
        mine: RankRunRecord,
        known: RankRunRecord,
    ) -> str | None:
        """Returns a message that names the first parameter or buffer whose values after the run of the rank and after
        the full run differ. Returns None if there is no difference.

        `local` has the shards of the rank after its run. `after` has the full tensors after the full run.
        """
        if self.is_meta:
            return None
        splits = splits_of_case(case)
        for name, tensor in local.items():
            if name in self.large and name not in mine.written and name not in known.written:
                continue
            there = shard_view(after[name].detach(), splits[name], rank, case.ranks)
            if relative_difference(mine.written.get(name, tensor.detach()), there) is not None:
                return f"its forward writes other values to {name} on a rank than in the full block"
        for name in dict.fromkeys([*mine.written, *known.written]):
            before, now = (record.written.get(name, self.large.get(name)) for record in (known, mine))
            if (
                name not in splits
                and before is not None
                and now is not None
                and relative_difference(now, before) is not None
            ):
                part = "for a part of the sequence" if case.sequence else "on a rank"
                return f"its forward writes other values to {name} {part} than in the full block"
        return None

    # --- one run
    def _run(self, case: SplitCase, rank: int, local: Mapping[str, torch.Tensor], gradients: bool) -> RankRunRecord:
        record, times_reached = RankRunRecord(), dict[str, int]()
        part = sequence_shard(rank, case.ranks) if case.sequence else identity

        def cut(
            what: str, tensor: torch.Tensor, contributed_shard: ShardFunction, received_shard: ShardFunction
        ) -> torch.Tensor:
            key = (what, times_reached.get(what, 0))
            times_reached[what] = key[1] + 1
            record.contributed[key] = (tensor.clone(), contributed_shard)  # later code may write to the tensor itself
            source = tensor if self.full_run is None else self.full_run.contributed[key][0]
            leaf = leaf_copy(source if received_shard is None else received_shard(source))
            record.received[key] = (leaf, received_shard)
            return leaf.clone()

        set_seed(0)
        with ExitStack() as stack:
            state = {name: local.get(name, tensor) for name, tensor in self.large.items()}
            writes = stack.enter_context(ParamWriteRecorder(storage_spans(state)) if state else nullcontext())
            stack.enter_context(self._with_local_tensors(local))
            projected = stack.enter_context(self._grad_projection(case, gradients))
            stack.enter_context(_comm_hooks(self.model, case, rank, part, cut))
            args, kwargs = self._inputs(case, rank, part, record)
            with torch.enable_grad() if gradients else torch.no_grad():
                output = self.block(*args, **kwargs)
            tensors = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
            for number, value in enumerate(tensors):
                own = part if number == 0 else self._output_shard(number, value, rank, case)
                record.contributed["the output of the block" if not number else f"output {number} of the block", 0] = (
                    value,
                    own,
                )
            if gradients:
                parameters = {f"{self.path}.{name}": one for name, one in self.block.named_parameters()}
                run_backward(record, self.full_run or record, parameters, projected)
        if not self.is_meta:
            wrote = writes.before.keys() if writes is not None else ()
            state = {**self._tensors(), **local}
            record.written = {
                name: one.detach().clone() for name, one in state.items() if name not in self.large or name in wrote
            }
        if writes is not None:
            writes.restore()
        return record

    def _grad_projection(self, case: SplitCase, gradients: bool) -> GradProjection:
        """Returns the projection that replaces the gradients of large matrices in this run."""
        state = self._tensors() if gradients else {}
        return GradProjection(
            {name: state[name] for name in self.large.keys() & state.keys() if state[name].ndim == 2},
            splits_of_case(case),
            self.matrices,
        )

    def _output_shard(self, number: int, value: torch.Tensor, rank: int, case: SplitCase) -> ShardFunction:
        """Returns the function that slices the shard of `rank` out of output `number`, which is not the hidden state.

        If the output of a rank has the full shape, it is compared in full. Otherwise the only dimension that differs is
        sharded. Runs without sequence parallelism determine this dimension.
        """
        if self.full_run is None:
            return identity
        if not case.sequence:
            there = self.full_run.contributed.get((f"output {number} of the block", 0), (value, identity))[0]
            self.sharded_output_dims[number] = [
                dim for dim, (one, two) in enumerate(zip(value.shape, there.shape, strict=False)) if one != two
            ]
        odd = self.sharded_output_dims.get(number, [])
        return (lambda tensor: tensor.chunk(case.ranks, odd[0])[rank]) if len(odd) == 1 else identity

    def _inputs(
        self, case: SplitCase, rank: int, part: Callable[[torch.Tensor], torch.Tensor], record: RankRunRecord
    ) -> tuple[Any, Any]:
        args, kwargs = fresh_leaves(self.call.inputs)
        hidden = find_hidden_states(args, kwargs)
        owns: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {id(hidden): part}
        weights = frozenset().union(*(one.weights for one in case.regions))
        for given, columns in self.sharded_args if case.ranks > 1 else ():
            if columns & weights:
                value = args[given.argument] if isinstance(given.argument, int) else kwargs[given.argument]
                slice_of = PerHeadArg(self.path, given.argument, given.dim, given.size)
                owns[id(value)] = LocalHeadsHook(
                    slice_of, case.ranks, lambda tensor, dim: tensor.chunk(case.ranks, dim)[rank]
                ).cut
        leaves, form = tree_flatten((args, kwargs))
        mine: dict[int, torch.Tensor] = {}
        for number, value in enumerate(leaves):
            if isinstance(value, torch.Tensor):
                own = owns.get(id(value), identity)
                mine.setdefault(id(value), value if own is identity else leaf_copy(own(value)))
                if (
                    value is hidden
                    or number >= len(self.call.inputs_require_grad)
                    or self.call.inputs_require_grad[number]
                ):
                    record.received[f"input {number} of the block", 0] = (mine[id(value)], own)
        handed = {key: leaf.clone() for key, leaf in mine.items()}  # a block may write to its inputs
        return tree_unflatten(
            [handed[id(value)] if isinstance(value, torch.Tensor) else value for value in leaves], form
        )

    @contextmanager
    def _with_local_tensors(self, local: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Replaces tensors of the block by the shards `local`, under all names of each tensor, and sets the matching
        layer sizes. Restores the block on exit.
        """
        of = {id(tensor): local[name] for name, tensor in self._tensors().items() if name in local}
        undo: list[tuple[dict[str, Any], str, Any]] = []
        sizes = [(module, vars(module).copy()) for module in self.block.modules()] if local else []
        try:
            for module in self.block.modules():
                for entries in (module._parameters, module._buffers):
                    for name, tensor in entries.items():
                        if id(tensor) in of:
                            undo.append((entries, name, tensor))  # type: ignore[arg-type]
                            entries[name] = of[id(tensor)]  # type: ignore[index,assignment]
                            update_layer_sizes(module)
            yield
        finally:
            for entries, name, tensor in undo:
                entries[name] = tensor
            for module, values in sizes:
                for name in values.keys() & set(rule_of(module).size_attributes(module)):
                    vars(module)[name] = values[name]

    # --- comparison
    def _compare_runs(
        self, case: SplitCase, known: RankRunRecord, ranks: Sequence[RankRunRecord], gradients: bool
    ) -> str | None:
        part = "on a slice of the sequence" if case.sequence else f"on {case.ranks} tensor ranks"
        why = compare_comm_points(known, ranks, part, self.is_meta)
        if why is not None or self.is_meta or not gradients:
            return why
        splits, partial = splits_of_case(case), {name for found in case.regions for name in found.partial}
        tensors = self._tensors()
        total: dict[str, torch.Tensor] = {}
        for rank, record in enumerate(ranks):
            for name, gradient in record.param_grads.items():
                if name in splits:
                    if name not in total:
                        sizes = list(gradient.shape)
                        sizes[splits[name].dim] = tensors[name].shape[splits[name].dim]
                        total[name] = gradient.new_zeros(sizes)
                    add_shard_gradient(total[name], gradient, splits[name], rank, case.ranks)
                elif name in partial or case.sequence:
                    total[name] = total[name] + gradient if name in total else gradient
        for record in ranks:
            record.param_grads = {**record.param_grads, **total}
        return compare_param_grads(known, ranks, part)


EnteredTensors = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Maps the id of each hidden state at an entry to the hidden state and the tensor with which the rank continues."""


def _entry_hook(what: str, part: Callable[[torch.Tensor], torch.Tensor], cut: Any, entered: EnteredTensors) -> Any:
    """Returns a pre-hook that cuts the run at the hidden state of its module. If several layers read the same tensor,
    the run is cut only once.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = find_hidden_states(args, kwargs)
        if id(hidden) not in entered:
            entered[id(hidden)] = hidden, cut(what, hidden, part, None)
        inside = entered[id(hidden)][1]
        return tuple(inside if value is hidden else value for value in args), {
            name: inside if value is hidden else value for name, value in kwargs.items()
        }

    return hook


def _row_hook(path: str, bias: nn.Parameter | None, part: Callable[[torch.Tensor], torch.Tensor], cut: Any) -> Any:
    """Returns a hook that replaces the output of a row layer by its sum over ranks and then adds the bias."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        total = cut(f"the output of {path}", output, None, part)
        if bias is None:
            return total  # type: ignore[no-any-return]
        return rule_of(module).add_bias(total, bias)

    return hook


@contextmanager
def _comm_hooks(
    model: nn.Module, case: SplitCase, rank: int, part: Callable[[torch.Tensor], torch.Tensor], cut: Any
) -> Iterator[None]:
    """Registers hooks at the communication points and sets the head counts of `rank`. On exit removes the hooks and
    restores the counts.
    """
    undo: list[Any] = []
    handles: list[Any] = []
    biases: list[tuple[nn.Module, nn.Parameter]] = []
    entered: EnteredTensors = {}
    pre: dict[str, Any] = {"with_kwargs": True, "prepend": True}
    at = model.get_submodule
    try:
        for found in case.regions:
            region = found.region
            undo.append(set_local_heads(model, region, case.ranks))
            readers = [
                path
                for path in region.columns
                if path not in region.inner_columns and not isinstance(at(path), nn.Embedding)
            ]
            for path in (region.module,) if region.module else region.entries or readers:
                entry = _entry_hook(f"the input of {path}", part, cut, entered)
                handles.append(at(path).register_forward_pre_hook(entry, **pre))
            for path in region.mla_inputs:
                inflow = lambda module, args, output, path=path: cut(f"the output of {path}", output, part, None)
                handles.append(at(path).register_forward_hook(inflow))
            for path in region.rows:
                module = at(path)
                bias = module._parameters.get("bias")
                if bias is not None:
                    biases.append((module, bias))
                    module._parameters["bias"] = torch.zeros_like(bias, requires_grad=False)  # type: ignore[assignment]
                handles.append(module.register_forward_hook(_row_hook(path, bias, part, cut)))
            for one in region.per_head_args:
                handles.append(at(one.path).register_forward_pre_hook(_make_heads_hook(one, case, rank, cut), **pre))
        yield
    finally:
        for module, bias in biases:
            module._parameters["bias"] = bias
        for handle in handles:
            handle.remove()
        for each in reversed(undo):
            restore_attributes(each)


def _make_heads_hook(one: PerHeadArg, case: SplitCase, rank: int, cut: Any) -> LocalHeadsHook:
    """Returns a pre-hook that cuts the run at the argument `one` of a module and passes the heads of `rank` to the
    module.
    """
    own = lambda tensor, dim: tensor.chunk(case.ranks, dim)[rank]
    what = f"argument {one.argument} of {one.path}"
    ranks = case.ranks if case.ranks > 1 else 0
    return LocalHeadsHook(one, ranks, lambda tensor, dim: cut(what, tensor, identity, lambda value: own(value, dim)))


def splits_of_case(case: SplitCase) -> dict[str, TpSplit]:
    """Returns the splits of all regions of `case` by parameter name."""
    return {name: split for found in case.regions for name, split in found.splits.items()}


def _describe_run_failure(error: Exception) -> str:
    return f"it does not run when sharded ({(str(error).splitlines() or [type(error).__name__])[0][:100]})"


def add_shard_gradient(total: torch.Tensor, gradient: torch.Tensor, split: TpSplit, rank: int, ranks: int) -> None:
    """Adds `gradient`, the gradient of the shard of `rank`, to `total`, the gradient of the full tensor, in place."""
    begin = 0
    for start, stop in shard_intervals(split.parts or total.shape[split.dim], rank, ranks, split.ways):
        total.narrow(split.dim, start, stop - start).add_(gradient.narrow(split.dim, begin, stop - start))
        begin += stop - start
