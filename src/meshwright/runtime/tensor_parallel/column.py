"""Implements column layers and their common input, the entry of a tensor-parallel region (layers.py). In backward the
reduction of the input's gradient overlaps with the computation of a weight gradient.

[Note: region input] The column layers of a region have one common input tensor (`RegionInput`). In backward, each
column layer adds its gradient of this tensor to a common buffer. The layer whose backward runs last starts to reduce
the buffer over the ranks, and computes its weight gradient during the reduction. Under sequence parallelism the
gathered input is not saved for backward. Each rank saves only its slice and gathers again in backward (Korthikanti et
al., Reducing Activation Recomputation, 2022, section 4.2.2). So the saved input of a region is also divided by the
tensor-parallel degree.

If the model applies an operation between the entry and a column layer, the input of this layer is not the common
tensor. Then autograd computes the layer's gradients as usual, and `RegionInput.finish` adds autograd's gradient to the
buffer. A `RegionInput` belongs to one forward, which may be a recompute, and drops its tensors at the end of the
corresponding backward.

[Note: joint regions] If the tensor ranks do not share memory, the entry of a region computes the outputs of all its
column layers together (joint_columns.py), and each column layer returns its output. So collectives overlap with the
products of all these layers. This requires that all column layers are in a block and plain matrix products, and not in
float8. Other consumers of the region's input read the first result of the same function.

[Note: compiled regions] If torch.compile traces a block, the entry does the same with one operator, for all kinds of
groups. Other consumers then read a second tensor, with collectives as operators of the graph
(comm/graph_collectives.py). The compiler drops these collectives if there are no such consumers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.async_collectives import CollectiveWork
from meshwright.runtime.comm.graph_collectives import sum_gradient
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.float8 import (
    Float8Layer,
    float8_layer,
    gradient_factor,
    input_factor,
    scaled_product,
    weight_factor,
)
from meshwright.runtime.tensor_parallel import collectives
from meshwright.runtime.tensor_parallel.chunks import network_backends
from meshwright.runtime.tensor_parallel.joint_columns import JointColumns, column_layers, joint_columns
from meshwright.runtime.weight_gradients import WgradSink, is_functorch_tensor, matmul_forward


class RegionInput:
    """The input of a region in one forward and its backward. `readers` is the number of column layers that read the
    input. `unread` starts at `readers`, decreases with each of their forwards, and then increases with each of their
    backwards."""

    def __init__(self, hidden: torch.Tensor, group: CommGroup, sequence_parallel: bool, readers: int) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.readers = self.unread = readers
        self.hidden: torch.Tensor | None = hidden
        self.entered: torch.Tensor | None = _EnterRegion.apply(hidden, self)
        self.whole: torch.Tensor | None = None
        self.gathering: tuple[torch.Tensor, CollectiveWork] | None = None
        self.buffer: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.pending: CollectiveWork | None = None

    def saved_input(self) -> torch.Tensor | None:
        """Returns the tensor that a column layer saves for backward: the input, or this rank's slice of it under
        sequence parallelism."""
        return self.hidden if self.sequence_parallel else self.entered

    def read(self) -> None:
        """Counts the forward of one more consumer of the input. After the last forward, drops the references to the
        input."""
        self.unread -= 1
        if not self.unread:
            self.hidden = self.entered = None

    def recompute_input(self, saved: torch.Tensor) -> torch.Tensor:
        """Returns the input of the column layers in backward: `saved` (a result of `saved_input`), gathered under
        sequence parallelism."""
        if not self.sequence_parallel:
            return saved
        self.start_gather(saved)
        if self.whole is None:
            assert self.gathering is not None
            pieces, work = self.gathering
            work.wait()
            self.whole = pieces.movedim(0, 1).flatten(1, 2)
        self.gathering = None
        return self.whole

    def start_gather(self, saved: torch.Tensor) -> None:
        """Starts the gather of `recompute_input`, which overlaps with the products until its result is needed."""
        if self.sequence_parallel and self.whole is None and self.gathering is None:
            pieces = torch.empty(self.group.size, *saved.shape, dtype=saved.dtype, device=saved.device)
            work = async_collectives.all_gather(pieces.view(-1), saved.contiguous().view(-1), self.group)
            self.gathering = pieces, work

    def add(self, gradient: torch.Tensor, weight: torch.Tensor, shape: torch.Size) -> None:
        """Adds gradient (N, out) x weight (out, in) to the gradient of the input, which has the shape `shape`. After
        the last column layer, starts the reduction."""
        if self.buffer is None:
            self.buffer = gradient @ weight
        else:
            self.buffer.addmm_(gradient, weight)
        self._count(self.buffer, shape)

    def add_product(self, product: torch.Tensor, shape: torch.Size) -> None:
        """Adds `product` (N, in), which no other code uses, like `add`."""
        self.buffer = product if self.buffer is None else self.buffer.add_(product)
        self._count(self.buffer, shape)

    def _count(self, buffer: torch.Tensor, shape: torch.Size) -> None:
        self.unread += 1
        if self.unread == self.readers:
            self._start(buffer.view(shape))

    def _start(self, gradient: torch.Tensor) -> None:
        if not self.sequence_parallel:
            self.reduced = gradient
            self.pending = async_collectives.all_reduce(gradient, self.group)
            return
        parts = collectives.stack_slices(gradient, self.group, 1)
        self.reduced = torch.empty_like(parts[0])
        self.pending = async_collectives.reduce_scatter(parts.view(-1), self.reduced.view(-1), self.group)

    def finish(self, brought: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
        """Returns the gradient of the hidden state, summed over ranks. `brought` is the part of the gradient that
        autograd has computed because some consumers of the input are not column layers. None without such consumers."""
        result = self._finished()
        # The reduction of `buffer` has not started yet if some consumers are not column layers, or if the output of a
        # column layer was not used.
        if self.buffer is not None and result is None:
            total = self.buffer.view(shape)
            self._start(total if brought is None else total.add_(brought))
            result, brought = self._finished(), None
        if brought is not None:
            self._start(brought.contiguous())
            rest = self._finished()
            result = rest if result is None or rest is None else result + rest
        self.buffer = self.whole = None
        return result

    def _finished(self) -> torch.Tensor | None:
        if self.pending is not None:
            self.pending.wait()
        result, self.reduced, self.pending = self.reduced, None, None
        return result


class JointRegion:
    """A region whose column layers are computed together: the hidden state, the input of the region, the outputs of its
    column layers, and the number of modules and layers that have not read it yet."""

    def __init__(self, hidden: torch.Tensor, entered: torch.Tensor, outputs: list[torch.Tensor], unread: int) -> None:
        self.hidden, self.entered, self.outputs, self.unread = hidden, entered, outputs, unread


class RegionEntryHook:
    """A forward pre-hook that replaces the hidden state among a module's arguments by the input of the region. Modules
    with the same hidden state tensor get one common `RegionInput` or `JointRegion`."""

    is_traceable = True

    def __init__(
        self, group: CommGroup, sequence_parallel: bool, readers: int, modules: int = 1, in_block: bool = True
    ) -> None:
        """`modules` is the number of modules that the hook is registered on. `in_block`: whether the weights of all
        column layers are present at the entry, as ZeRO 3 gathers the weights of a whole block."""
        self.group, self.sequence_parallel, self.readers = group, sequence_parallel, readers
        self.crossing: RegionInput | None = None
        self.modules = modules
        self.columns: list[ColumnLinear] = []
        self.joint: JointRegion | None = None
        """The joint region that has begun, until all modules and column layers have read it."""
        self.may_join = in_block and bool(network_backends(group))

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = (kwargs.get("hidden_states"), *args, *kwargs.values())
        hidden = next(value for value in given if isinstance(value, torch.Tensor))
        # Attention may receive `hidden` three times: as query, key and value.
        is_joint = torch.compiler.is_compiling() or self._is_joint(hidden)
        entered = self._enter_together(hidden) if is_joint else self._cross(hidden)
        return tuple(entered if value is hidden else value for value in args), {
            name: entered if value is hidden else value for name, value in kwargs.items()
        }

    def was_read(self, module: nn.Module, args: Any, output: Any) -> None:
        """Counts the forward of a consumer whose forward is not replaced, and whose gradient autograd computes. This
        method is registered as a forward hook of the consumer."""
        if self.crossing is not None and not torch.compiler.is_compiling():
            self.crossing.read()

    def _is_joint(self, hidden: torch.Tensor) -> bool:
        return (
            self.may_join
            and len(self.columns) == self.readers
            and all(float8_layer(column.module) is None for column in self.columns)
            and not is_functorch_tensor(hidden)
        )

    def _enter_together(self, hidden: torch.Tensor) -> torch.Tensor:
        joint = self.joint
        if joint is None or joint.hidden is not hidden:
            entered, outputs = self._in_graph(hidden) if torch.compiler.is_compiling() else self._in_function(hidden)
            joint = self.joint = JointRegion(hidden, entered, outputs, self.modules + len(outputs))
        self._has_read(joint)
        return joint.entered

    def _in_graph(self, hidden: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        entered = enter_in_graph(hidden, self.group, self.sequence_parallel)
        is_float8 = any(float8_layer(column.module) is not None for column in self.columns)
        weights = [] if is_float8 else [column.local_weight() for column in self.columns]
        outputs = column_layers(hidden, weights, self.group.key, self.sequence_parallel) if weights else []
        return entered, outputs

    def _in_function(self, hidden: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        modules = [column.module for column in self.columns]
        sinks = [getattr(module, "put_off", None) for module in modules]
        columns = JointColumns(self.group, self.sequence_parallel, [column.linear for column in self.columns], sinks)
        weights: list[Any] = [module._parameters["weight"] for module in modules]
        biases = [module._parameters.get("bias") for module in modules]
        entered, *outputs = joint_columns(hidden, weights, biases, columns)
        return entered, outputs

    def _has_read(self, joint: JointRegion) -> None:
        joint.unread -= 1
        if not joint.unread:
            self.joint = None

    def joint_output(self, x: torch.Tensor, column: int) -> torch.Tensor | None:
        """Returns the output of the column layer with index `column`, if its input `x` is the input of a joint
        region."""
        joint = self.joint
        if joint is None or not joint.outputs or x is not joint.entered:
            return None
        output = joint.outputs[column]
        self._has_read(joint)
        return output

    def _cross(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.crossing is None or self.crossing.hidden is not hidden:
            self.crossing = RegionInput(hidden, self.group, self.sequence_parallel, self.readers)
        assert self.crossing.entered is not None
        return self.crossing.entered


class ReplicatedInputHook:
    """A forward hook of a replicated layer whose output is used only inside the region. The hook makes this output an
    input of the region."""

    is_traceable = True

    def __init__(self, group: CommGroup, sequence_parallel: bool) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return enter_in_graph(output, self.group, self.sequence_parallel)
        crossing = RegionInput(output, self.group, self.sequence_parallel, 1)
        entered = crossing.entered
        assert entered is not None
        crossing.read()
        return entered


class ColumnLinear:
    """Replaces the forward of a column layer. Returns this rank's output features: the product with the local weight,
    plus the local bias. `linear`: whether the weight is (out, in) instead of (in, out)."""

    is_traceable = True

    def __init__(self, module: nn.Module, entry: RegionEntryHook, linear: bool) -> None:
        self.module, self.entry, self.linear = module, entry, linear
        self.index = len(entry.columns)
        entry.columns.append(self)

    def local_weight(self) -> torch.Tensor:
        """Returns the local weight (out, in)."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight if self.linear else weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.module._parameters["weight"], self.module._parameters.get("bias")
        products = float8_layer(self.module)
        if products is not None:
            rounded = self._float8_product(x, products)
            return rounded if bias is None else rounded + bias
        product = self.entry.joint_output(x, self.index)
        if torch.compiler.is_compiling():
            if product is None:
                return F.linear(x, self.local_weight(), bias)
            return product if bias is None else product + bias
        if product is not None:
            return product
        crossing = self.entry.crossing
        if crossing is None or x is not crossing.entered:
            return matmul_forward(self.module, x, bias, self.linear)
        leave = getattr(self.module, "put_off", None)
        output: torch.Tensor = _ColumnMatmul.apply(x, weight, bias, crossing, self.linear, leave)
        crossing.read()
        return output

    def _float8_product(self, x: torch.Tensor, products: Float8Layer) -> torch.Tensor:
        crossing = self.entry.crossing
        if torch.compiler.is_compiling() or crossing is None or x is not crossing.entered:
            return products.multiply(x)
        output: torch.Tensor = _Float8ColumnMatmul.apply(x, products.weight, crossing, products)
        crossing.read()
        return output


def enter_in_graph(hidden: torch.Tensor, group: CommGroup, sequence_parallel: bool) -> torch.Tensor:
    """Returns the input of a region for the hidden state `hidden` while torch.compile traces ([Note: compiled
    regions])."""
    return collectives.all_gather_dim(hidden, group, 1) if sequence_parallel else sum_gradient(hidden, group)


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, crossing: RegionInput) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.crossing = crossing
        whole = (
            collectives.all_gather_dim(hidden, crossing.group, 1)
            if crossing.sequence_parallel
            else hidden.view_as(hidden)
        )
        ctx.shape = whole.shape
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.crossing.finish(gradient, ctx.shape), None


class _ColumnMatmul(torch.autograd.Function):
    """Computes x W^T + b if `linear`, otherwise x W + b. Backward adds the gradient of x to the buffer of the
    `RegionInput`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        crossing: RegionInput,
        linear: bool,
        leave: WgradSink | None,
    ) -> torch.Tensor:
        ctx.crossing, ctx.linear, ctx.shape, ctx.leave = crossing, linear, x.shape, leave
        ctx.save_for_backward(crossing.saved_input(), weight)
        # Some products return an autograd view. `.data` allows later code to write to the result in place.
        return F.linear(x, weight if linear else weight.t(), bias).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        crossing: RegionInput = ctx.crossing
        saved, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        crossing.start_gather(saved)
        if ctx.needs_input_grad[0]:
            crossing.add(flat, weight if ctx.linear else weight.t(), ctx.shape)
        x = crossing.recompute_input(saved).flatten(0, -2)
        weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[1] and ctx.leave is not None:
            weight_gradient = ctx.leave(x, flat)
        elif ctx.needs_input_grad[1]:
            weight_gradient = flat.t() @ x if ctx.linear else x.t() @ flat
        if ctx.needs_input_grad[2]:
            bias_gradient = flat.sum(0)
        return None, weight_gradient, bias_gradient, None, None, None


class _Float8ColumnMatmul(torch.autograd.Function):
    """Computes x W^T in float8 (float8.py), and otherwise does what `_ColumnMatmul` does."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, crossing: RegionInput, products: Float8Layer
    ) -> torch.Tensor:
        stored, undo = products.operand()
        rows = input_factor(x.flatten(0, -2), products.input_keys)
        ctx.crossing, ctx.keys, ctx.shape = crossing, products.gradient_keys, x.shape
        ctx.save_for_backward(crossing.saved_input(), stored, undo, rows.undo)
        product = scaled_product(rows, weight_factor(stored, undo), x.dtype, fast=True)
        return product.reshape(*x.shape[:-1], -1).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        crossing: RegionInput = ctx.crossing
        saved, stored, undo, x_undo = ctx.saved_tensors
        factor = gradient_factor(gradient.flatten(0, -2), ctx.keys)
        crossing.start_gather(saved)
        if ctx.needs_input_grad[0]:
            product = scaled_product(factor, weight_factor(stored, undo).transposed, gradient.dtype)
            crossing.add_product(product.contiguous(), ctx.shape)
        x = crossing.recompute_input(saved).flatten(0, -2)
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            rows = input_factor(x, undo=x_undo)
            weight_gradient = scaled_product(factor.transposed, rows.transposed, gradient.dtype)
        return None, weight_gradient, None, None
