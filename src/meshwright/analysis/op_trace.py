"""Traces one training forward on the meta device (shapes only) and records how the weights are used. analyze.py runs
the trace, and regions.py builds tensor-parallel regions from the log.

[Note: columns and rows] Inside a block, a matrix product that reads full features can be column-parallel. Its output is
then sharded by features, and so is everything that is computed from this output. A product that reads a sharded tensor
is row-parallel. Its output, summed over ranks, is full again (Shoeybi et al., Megatron-LM, 2019, section 3). So one
forward separates column layers from row layers in any model, without knowing names. Some column layers must stay
unsharded: those whose sharded output leaves the block, or enters an operation over all features such as a norm.
`TraceLog.problems` has the reason for each such weight. The next trace receives these weights in `whole`.

[Note: consumers] A region consists of column layers and the row layers that read their outputs. It may begin at the
input of a module only if its column layers are the only consumers of this input. A residual connection inside the
module also consumes the input, but its gradient must not be summed over ranks.

[Note: full operands] An operation on a sharded tensor may have a full tensor as another operand. There are four cases:

- A parameter with one entry for each sharded feature or head is sharded like the features or heads.
- A parameter that all features or heads use gets a partial gradient on each rank.
- An argument with one entry for each head, such as a position bias, is sliced: each rank takes its heads.
- Any other tensor that requires a gradient would get only a partial gradient. So the column layers stay unsharded,
  unless the tensor comes from an MLA input ([Note: MLA inputs] in trace_log.py). To know which tensors require a
  gradient, the trace runs with gradients enabled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.analysis.dry_run import MetaTwins, call_with_tensors
from meshwright.analysis.example_inputs import (
    DATA_DEPENDENT_OPS,
    EXAMPLE_BATCH,
    ExampleInputs,
    MetaRunMode,
    answer_data_dependent_op,
    call_arguments,
    make_example,
    without_drops,
)
from meshwright.analysis.expert_modules import pass_through_experts
from meshwright.analysis.layer_rules.rule import rule_of
from meshwright.analysis.propagation import (
    MATMUL_OPS,
    RESHAPE_OPS,
    SLICE_OPS,
    TRANSPOSE_OPS,
    NotShardable,
    OpCall,
    ShardedTensorInfo,
    aligned_dim,
    propagate_sharding,
)
from meshwright.analysis.recompute_tape import active_saved_tensor_hooks
from meshwright.analysis.trace_log import (
    AttentionScores,
    HiddenStateUse,
    MlaInputTracker,
    ModuleArguments,
    ParamDependence,
    PerHeadInput,
    TraceLog,
    WeightProduct,
)
from meshwright.core.messages import Message, mark_msgid

METADATA_OPS = frozenset(
    {"size", "dim", "numel", "is_contiguous", "stride", "__len__", "get_device", "is_floating_point", "type"}
)
PRODUCT_OPS = frozenset({"linear", "addmm", "matmul", "mm", "__matmul__", "conv1d", "conv2d", "conv3d"})
ATTENTION_SCORE_OPS = MATMUL_OPS | {"scaled_dot_product_attention", "einsum"}
VIEW_OPS = RESHAPE_OPS | TRANSPOSE_OPS | SLICE_OPS | {"to", "long", "int", "float", "double", "type_as"}


def trace_ops(
    model: nn.Module,
    lists: list[str],
    whole: frozenset[str] = frozenset(),
    example: ExampleInputs | None = None,
    dtype: torch.dtype | None = None,
) -> TraceLog:
    """Runs `model` once on meta tensors, with each module in its own train or eval mode, and returns the log.

    `lists` are the paths of the lists of blocks. The weights `whole` stay unsharded. `dtype` replaces the
    floating-point dtype of the model, None preserves it. Exceptions of the model propagate.
    """
    twins = MetaTwins(model, dtype)
    state, buffers = twins.parameters, twins.buffers
    args, kwargs = call_arguments(make_example(model, example), dtype)
    watch = OpTracer(
        twins.names, {id(tensor): name for name, tensor in buffers.items()}, whole, [*nested_tensors((args, kwargs))]
    )
    watch.trace.batch_coupling.begin(nested_tensors((args, kwargs)))
    watch.shapes = {name: tensor.shape for name, tensor in state.items()}
    inside = [
        (name, module) for name, module in model.named_modules() if any(name.startswith(f"{path}.") for path in lists)
    ]
    depths = {
        name: name.count(".") - next(path.count(".") for path in lists if name.startswith(f"{path}."))
        for name, _ in inside
    }
    handles = [handle for name, module in inside for handle in watch.attach(name, module, depths[name])]
    handles += watch.trace.vocabulary.attach(model)
    try:
        with pass_through_experts(model), torch.enable_grad(), torch.device("meta"), watch:
            call_with_tensors(model, {**state, **buffers}, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if (written := twins.written_parameter()) is not None:
        watch.trace.obstacles["writes"] = written
    for layer, inflow in watch.mla_inputs.entry_inputs().items():
        if inflow.rejected:
            watch.reject(
                inflow.needed,
                Message("they use the output of {layer}, and {rejected}", layer=layer, rejected=inflow.rejected),
            )
        else:
            watch.trace.mla_inputs[layer] = inflow
    return watch.trace


def find_written_parameter(
    model: nn.Module, example: ExampleInputs | None = None, dtype: torch.dtype | None = None
) -> str | None:
    """Runs `model` as `trace_ops` does, but without a log. Returns the name of a parameter that its forward writes to,
    None if there is none.
    """
    twins = MetaTwins(model, dtype)
    args, kwargs = call_arguments(make_example(model, example), dtype)
    with pass_through_experts(model), torch.enable_grad(), torch.device("meta"), MetaRunMode():
        call_with_tensors(model, {**twins.parameters, **twins.buffers}, args, kwargs)
    return twins.written_parameter()


def nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor in a nested structure of arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from nested_tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from nested_tensors(item)


ALL_FEATURES_TEXT = mark_msgid("{stack} uses {name} on all features")
REPLICATED_TEXT = mark_msgid("{stack} combines it with a replicated tensor ({call})")


class OpTracer(TorchFunctionMode):
    """Traces every torch function while the model runs ([Note: columns and rows])."""

    def __init__(
        self, names: dict[int, str], buffers: dict[int, str], whole: frozenset[str], inputs: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self.trace = TraceLog()
        self.names, self.buffers, self.whole = names, buffers, whole
        self.shapes: dict[str, torch.Size] = {}
        self.ids = {id(tensor) for tensor in inputs if not tensor.is_floating_point()}
        self.stack: list[str] = []
        self.plain: dict[str, str | None] = {}  # maps each layer that ran and adds its bias last to the bias name
        self.sharded: dict[int, ShardedTensorInfo] = {}
        # `from_params` maps each tensor that is computed from parameters alone to the names of these parameters.
        self.from_params: dict[int, tuple[str, ...]] = {id_: (name,) for id_, name in names.items()}
        self.transposed: dict[int, str] = {}  # maps the id of a transposed view to the name of the parameter
        self.arguments = ModuleArguments()
        self.returned: set[int] = set()  # ids of the outputs of blocks
        self.repeat_depth = 0  # is not 0 inside a block that has run before
        self.mla_inputs, self.param_dependence = MlaInputTracker(), ParamDependence(names)
        self.nothing, self.hooks_before = torch.empty(0), active_saved_tensor_hooks()
        self.trace.alive.append(inputs)

    # --- modules
    def attach(self, name: str, module: nn.Module, depth: int) -> list[Any]:
        """Registers hooks that track the running modules and record their inputs. `depth` is 1 for a block."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if depth == 1:
                self.repeat_depth += name in self.trace.blocks
                self.trace.begin(name, active_saved_tensor_hooks() != self.hooks_before)
            self.stack.append(name)
            if not self.repeat_depth:
                self._enter(name, module, args, kwargs, depth == 1)

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if not self.repeat_depth:
                self._leave(name, result, depth == 1)
            self.stack.pop()
            if depth == 1:
                self.repeat_depth = 0

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True),
        ]

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any, is_block: bool) -> None:
        if rule_of(module).adds_bias_last:
            self.plain[name] = f"{name}.bias" if module._parameters.get("bias") is not None else None
        self.trace.inputs[name] = kwargs.get("hidden_states", next(nested_tensors((args, kwargs)), self.nothing))
        self.trace.alive.append((args, kwargs))
        for key, value in [*enumerate(args), *kwargs.items()]:
            extra = [
                one
                for one in nested_tensors(value)
                if is_block and id(one) not in {id(self.trace.inputs[name]), *self.returned}
            ]
            if any(tensor.requires_grad or tensor in self.param_dependence for tensor in extra):
                names = [*inspect.signature(module.forward).parameters]
                self.trace.extra_args.setdefault(
                    names[key] if isinstance(key, int) and key < len(names) else str(key), name
                )
            if not isinstance(value, torch.Tensor):
                continue
            self.arguments.positions[id(value)].append((name, key))
            info = self.sharded.get(id(value))
            if info is not None and is_block and info.dim is not None:
                self.trace.sharded_args[name].append(
                    (PerHeadInput(name, key, info.dim, value.shape[info.dim]), info.columns)
                )

    def _leave(self, name: str, result: Any, is_block: bool) -> None:
        given = self.trace.inputs[name]
        hidden = next(nested_tensors(result), self.nothing)
        if is_block:
            count = len(result) if isinstance(result, tuple | list) else 0
            self.trace.hidden_uses[name] = HiddenStateUse(
                hidden.shape == given.shape, id(given) in self.returned, count
            )
            self.returned.add(id(hidden))  # the only output of the block that later stages receive
            for tensor in nested_tensors(result):
                self.mla_inputs.reject(self.mla_inputs.sources(tensor), Message("it leaves the block"))
            info = self.sharded.pop(id(hidden), None)  # only other outputs, such as attention weights, may stay sharded
            self.reject(info.columns if info else frozenset(), Message("its output leaves the block"))
        elif any(tensor is given for tensor in nested_tensors(result)):
            self.trace.uses[id(given)].append((tuple(self.stack), ""))

    # --- torch functions
    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in DATA_DEPENDENT_OPS:
            return answer_data_dependent_op(name, function, args, kwargs)
        is_property = name == "__get__"
        if is_property:
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        result = function(*args, **kwargs)
        if name == "rand" and result.numel() == 1:
            return without_drops(name, result)
        if isinstance(result, torch.Tensor) or not (is_property or name in METADATA_OPS):
            self.record(OpCall(name, function, args, kwargs), list(nested_tensors(result)))
        return result

    def record(self, call: OpCall, outputs: list[torch.Tensor]) -> None:
        """Records one operation with its outputs."""
        name = call.name
        given = list(nested_tensors((call.args, call.kwargs)))
        self.trace.alive.extend(outputs)
        self.param_dependence.follow(name, given, outputs)
        self.trace.follow(call, given, outputs, self.names, self.stack)
        weights = list(dict.fromkeys(weight for tensor in given for weight in self.from_params.get(id(tensor), ())))
        for weight in weights:
            self.trace.order.setdefault(weight, len(self.trace.order))
        fixed = all(
            id(tensor) in self.from_params or (id(tensor) in self.buffers and tensor.is_floating_point())
            for tensor in given
        )
        if weights and fixed and not _is_layer_call(name, given, self.names, self.stack):
            self.from_params.update({id(tensor): tuple(weights) for tensor in outputs})
            if name in TRANSPOSE_OPS and id(given[0]) in self.names and given[0].ndim == 2:
                self.transposed[id(outputs[0])] = self.names[id(given[0])]
            return
        if name in VIEW_OPS and given:
            if id(given[0]) in self.ids:
                self.ids.update(id(tensor) for tensor in outputs)
            self.arguments.add_views(given[0], outputs)
        matrix = next(
            (t for t in reversed(given) if t.ndim >= 2 and (id(t) in self.names or id(t) in self.transposed)), None
        )
        is_product = name in PRODUCT_OPS and matrix is not None and (given[0] is not matrix or name == "addmm")
        reads_ids = any(id(tensor) in self.ids for tensor in given)
        if name == "embedding" and weights and reads_ids:
            self.trace.vocabulary.embeddings.append(weights[0])
        if is_product and not self.stack:
            self.trace.vocabulary.outside_products.append((self._weight(matrix), outputs[0].shape[-1]))
        if not self.stack or self.repeat_depth:
            return
        if is_product and matrix is not None:
            self.record_product(call, given, matrix, weights, outputs[0])
        elif name == "embedding" and matrix is not None and not reads_ids and self._weight(matrix) not in self.whole:
            self.record_column(
                WeightProduct(
                    self._weight(matrix), None, self.stack[-1], 1, outputs[0].shape[-1], given[0], frozenset(), True
                ),
                outputs[0],
                outputs[0].ndim - 1,
            )
        else:
            for tensor in given:
                self.trace.uses[id(tensor)].append((tuple(self.stack), ""))
            self.propagate(call, given, weights, outputs)
        shares = {id(tensor): self.sharded[id(tensor)].columns for tensor in outputs if id(tensor) in self.sharded}
        self.mla_inputs.follow(name, given, outputs or given[:1] * (name == "__setitem__"), shares, self.from_params)

    def _weight(self, matrix: torch.Tensor | None) -> str:
        return self.names.get(id(matrix)) or self.transposed[id(matrix)]

    # --- matrix products
    def record_product(
        self, call: OpCall, given: list[torch.Tensor], matrix: torch.Tensor, weights: list[str], result: torch.Tensor
    ) -> None:
        """Records a matrix product with a weight as a column layer, a row layer or an unsharded layer."""
        weight = self._weight(matrix)
        owner, is_conv = weight.rpartition(".")[0], call.name.startswith("conv")
        read = next((tensor for tensor in given if id(tensor) not in self.from_params), given[0])
        info = self.sharded.get(id(read))
        if is_conv and call.argument(6, "groups", 1) > 1:
            if info is not None:
                self.trace.grouped[self.stack[-1], "groups"] = (call.argument(6, "groups"), info.columns)
            self.propagate(call, given, weights, [result])
            return
        is_called = self.stack[-1] == owner
        self.trace.uses[id(read)].append((tuple(self.stack), weight))
        if weight in self.whole:
            if info is not None:
                self.reject(info.columns, Message("{owner} is not sharded and reads it", owner=owner))
            elif is_called and owner in self.plain:
                self.mla_inputs.begin(owner, result)
            return
        if not is_called:
            read_columns = (info.columns if info else frozenset()) | {weight}
            self.reject(read_columns, Message("the weight of {owner} is read outside of its forward", owner=owner))
        bias = self.plain.get(owner) if is_called else None
        bias = bias or next((other for other in weights if other != weight), None)
        dim = int((call.name == "linear" or is_conv) == (id(matrix) in self.transposed))
        size = result.shape[1] if is_conv else result.shape[-1]
        source = self.trace.inputs[owner] if is_called else read
        columns = info.columns if info else frozenset()
        block = self.trace.inputs.get(self.block, self.nothing)
        has_sequence = source.ndim == 3 and not is_conv and block.ndim == 3
        product = WeightProduct(
            weight, bias, owner, dim, size, source, columns, False, has_sequence, self.mla_inputs.sources(read)
        )
        if info is None:
            self.record_column(product, result, 1 if is_conv else result.ndim - 1)
            return
        if info.dims and (info.dim != (1 if is_conv else read.ndim - 1) or info.inner > 1):
            self.reject(columns, Message("{owner} reads features that were rearranged", owner=owner))
        self.trace.products[self.block].append(product)

    def record_column(self, product: WeightProduct, result: torch.Tensor, dim: int) -> None:
        """Records a column layer and its sharded output."""
        self.trace.products[self.block].append(product)
        self.sharded[id(result)] = ShardedTensorInfo(frozenset({product.weight}), (dim,), 1, (0, product.size))

    @property
    def block(self) -> str:
        """Returns the path of the block that is running."""
        return self.stack[0]

    def reject(self, columns: frozenset[str], why: str) -> None:
        """Records the reason `why` the column layers `columns` must stay unsharded."""
        time = max(self.trace.problem_times.values(), default=0) + 1
        for column in columns:
            self.trace.problems.setdefault(column, why)
            self.trace.problem_times.setdefault(column, time)

    # --- sharded tensors

    def propagate(
        self, call: OpCall, given: list[torch.Tensor], weights: list[str], outputs: list[torch.Tensor]
    ) -> None:
        """Propagates sharding from the sharded inputs of an operation to its outputs."""
        shares = [tensor for tensor in given if id(tensor) in self.sharded]
        if not shares:
            return
        first = next((tensor for tensor in shares if self.sharded[id(tensor)].dims), shares[0])
        info = self.sharded[id(first)]
        columns = frozenset().union(*(self.sharded[id(tensor)].columns for tensor in shares))
        where, products = self.stack[-1], self.trace.products[self.block]
        for tensor in given:
            if id(tensor) not in self.sharded:
                self.check_operand(call, tensor, first, info, columns)
        if call.name in ("group_norm", "batch_norm"):
            self._record_norm(call, info, columns)
        if call.name in ATTENTION_SCORE_OPS and len(shares) > 1:
            self.record_scores(shares, columns)
            _record_shared_heads(self.trace.products[self.block], [self.sharded[id(one)] for one in shares], shares)
        try:
            after = propagate_sharding(call, info, first, outputs)
        except NotShardable as lost:
            self.reject(columns, Message("{where} {lost}", where=where, lost=lost))
            after = [ShardedTensorInfo(columns, ()) for _ in outputs]
        # The input of a slice of a fused projection is not yet reshaped to heads. So its head count is not recorded.
        for tensor in shares if all(share.product_slice in (None, info.product_slice) for share in after) else ():
            _record_slices(products, call, self.sharded[id(tensor)], self.sharded[id(tensor)], tensor)
        for tensor, share in zip(outputs, after, strict=True):
            part = share.product_slice if len(columns) == 1 else None
            self.sharded[id(tensor)] = ShardedTensorInfo(columns, share.dims, share.inner, part)
            _record_slices(products, call, info, self.sharded[id(tensor)], tensor)

    def check_operand(
        self, call: OpCall, tensor: torch.Tensor, share: torch.Tensor, info: ShardedTensorInfo, columns: frozenset[str]
    ) -> None:
        """Handles the full operand `tensor` of an operation on the sharded tensor `share` ([Note: full operands])."""
        is_own = id(tensor) in self.names or id(tensor) in self.buffers
        names = self.from_params.get(id(tensor)) or ((self.buffers[id(tensor)],) if is_own else ())
        if names and names[0] in {product.bias for product in self.trace.products[self.block]}:
            return
        size = share.shape[info.dims[0]] // info.inner if info.dims else 0
        along = aligned_dim(call, tensor, share, info) if size > 1 else None
        if len(names) == 1 and along is not None:
            shape = tensor.shape if is_own else self.shapes[names[0]]
            dims = [dim for dim, length in enumerate(shape) if length == size]
            if dims:
                self.trace.following[names[0]] = (along if is_own and along in dims else dims[0], info)
                return
        if names:
            is_flat = bool(info.dims) and info.dims[0] == share.ndim - 1
            if is_flat and size > 1 and tensor.ndim and tensor.shape[-1] > 1 and call.name not in ATTENTION_SCORE_OPS:
                self.reject(columns, Message(ALL_FEATURES_TEXT, stack=self.stack[-1], name=names[0]))
            self.trace.partial_params.update(
                {name: self.trace.partial_params.get(name, frozenset()) | columns for name in names}
            )
            return
        source, place = self.arguments.find(tensor, self.stack)
        if along is not None and place is not None:
            dims = [dim for dim, length in enumerate(source.shape) if length == size]
            dims = dims or [dim for dim, length in enumerate(source.shape) if length == EXAMPLE_BATCH * size]
            if dims:
                self.trace.per_head_args[PerHeadInput(*place, dims[0], size)] = columns
                return
        if tensor.requires_grad and not self.mla_inputs.can_serve(tensor, columns):
            self.reject(columns, Message(REPLICATED_TEXT, stack=self.stack[-1], call=call.name))

    def _record_norm(self, call: OpCall, info: ShardedTensorInfo, columns: frozenset[str]) -> None:
        if info.dims[:1] != (1,):
            self.reject(columns, Message("{stack} needs all features for {call}", stack=self.stack[-1], call=call.name))
        elif call.name == "group_norm":
            self.trace.grouped[self.stack[-1], "num_groups"] = (call.args[1], columns)

    def record_scores(self, factors: list[torch.Tensor], columns: frozenset[str]) -> None:
        """Records the product of queries and keys. The shape of the queries `factors[0]` shows the number of heads."""
        info, query = self.sharded[id(factors[0])], factors[0]
        if any(seen.columns & columns for seen in self.trace.attentions[self.block]) or not info.dims or query.ndim < 3:
            return
        self.trace.attentions[self.block].append(AttentionScores(columns, query.shape[info.dims[0]] // info.inner))


def _record_slices(
    products: list[WeightProduct],
    call: OpCall,
    before: ShardedTensorInfo,
    share: ShardedTensorInfo,
    tensor: torch.Tensor,
) -> None:
    """Records at which features a fused product is sliced, and into how many heads the slice is reshaped. Does nothing
    unless `tensor` is a slice of one product.
    """
    if len(share.columns) != 1 or share.product_slice is None:
        return
    (weight,) = share.columns
    product = next((product for product in products if product.weight == weight), None)
    if product is None or product.size < share.product_slice[1]:
        return
    if share.product_slice != before.product_slice:
        product.cuts |= set(share.product_slice)
    if share.dims and share.inner == 1 and call.name not in RESHAPE_OPS | TRANSPOSE_OPS:
        product.grains[share.product_slice] = min(
            product.grains.get(share.product_slice, 1 << 60), tensor.shape[share.dims[0]]
        )


def _record_shared_heads(
    products: list[WeightProduct], infos: list[ShardedTensorInfo], factors: list[torch.Tensor]
) -> None:
    """Records keys or values without a head dimension as one head, because all query heads share them."""
    for factor, info in zip(factors, infos, strict=True):
        if info.dims and info.dims[0] >= factor.ndim - 2 and info.product_slice is not None and factor.ndim > 2:
            (weight,) = info.columns
            for product in products:
                if product.weight == weight:
                    product.grains[info.product_slice] = 1


def _is_layer_call(name: str, given: list[torch.Tensor], names: dict[int, str], stack: list[str]) -> bool:
    """Returns whether the call is the product of the running module with its own weight. The other operand may be
    computed from parameters too, such as a table of positions.
    """
    return (
        name in PRODUCT_OPS and bool(stack) and any(names.get(id(t), "").rpartition(".")[0] == stack[-1] for t in given)
    )
