"""Computes the loss and the gradients of the user's model on rank 0, as on one device. Only the weights of one block
are in memory at a time. A proof (proof_run.py) compares the plan with this reference run.

The skeleton is a copy of the model that was made before `parallelize`. Its parameters have no storage. In a reference
run, the forward of a block requests the block's full weights from the ranks (runtime/gather_service.py) and drops them
at its end. The block runs under non-reentrant activation recompute (`torch.utils.checkpoint`), so backward requests the
weights again. Each complete gradient is passed to the function `compare` and dropped. Autograd first adds up the
gradients of all uses of a shared parameter.

Large modules outside of the blocks (embeddings, heads) are treated as blocks. If such a module is torch's Linear or
Embedding and is called once in forward, it requests its weight in ranges of rows (streamed_weights.py). Rank 0 stores
all other weights for the whole run.

[Note: absent weights] A weight that is not in memory is NaN. If a model or a loss reads a block's weights outside of
the block's forward, the result is therefore NaN instead of a wrong number. The run is then repeated with a lower
`StreamingLevel`, at which rank 0 stores more weights for the whole run.

`use_float64` turns a model's own casts to float32 (in norms, softmax, rotary tables) into casts to float64. The plan
and the reference both use it if they are compared to 1e-10: float32 sums over shards and over full tensors differ in
their last bits. It wraps each block separately, so that a recompute in backward equals the forward.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.checkpoint import checkpoint

from meshwright.analysis.block_lists import find_block_lists
from meshwright.analysis.model_copy import ModelCopy, ParamAccessGuard
from meshwright.analysis.nf4 import nan_scalar
from meshwright.analysis.own_generators import GeneratorStates, own_generators
from meshwright.analysis.random_projection import ChunkedProjection, random_projection
from meshwright.models.model_io import IGNORE_INDEX
from meshwright.runtime.activation_recompute import with_function_modes
from meshwright.runtime.engine import Engine
from meshwright.runtime.expert_parallel.load_balancing import (
    CAPACITY_ATTRIBUTE,
    aux_loss_coefficient,
    drop_over_capacity,
)
from meshwright.runtime.float8 import apply_float8
from meshwright.runtime.gather_service import ElementRange, GatherService, without_torch_modes
from meshwright.runtime.loss import Batch, LossHead, extract_logits, num_rows, shift_labels
from meshwright.train.proof.streamed_weights import can_stream_rows, stream_rows


class Float64Mode(TorchFunctionMode):
    """While this mode is active, torch functions receive torch.float64 in place of each argument torch.float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "float":
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return function(
            *args, **{key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        )


def use_float64(model: nn.Module) -> nn.Module:
    """Changes `model` in place so that its own casts to float32 become casts to float64. Returns it. The weights must
    already be float64."""
    for module in (
        model,
        *(block for path in find_block_lists(model) for block in model.get_submodule(path).children()),
    ):
        module.forward = _in_float64(module.forward)  # type: ignore[method-assign]
    return model


def _in_float64(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with Float64Mode():
                return forward(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return run


CompareGradient = Callable[[ElementRange, torch.Tensor], Callable[[int, torch.Tensor], None] | None]
"""A function that gets a range of a gradient and the reference values of this range. It returns a function that gets
the plan's values (index of the first element, elements), or None if the plan's values are not needed."""
FINGERPRINT_TOLERANCE = 1e-4
"""If the fingerprint of a weight differs by more than this fraction, the ranks have wrong values of the weight."""
MAX_PENDING_GRADIENT_ELEMENTS = 1 << 20
"""Gradients are buffered until they have this number of elements, and then compared. A module outside of the blocks is
treated as a block if it has at least this number of parameters."""


class StreamingLevel(IntEnum):
    """The weights that rank 0 stores only while their module runs. NOTHING: none. BLOCKS: the weights of blocks.
    MODULES: also the weights of large modules outside of blocks. ROWS: as MODULES, but for large linear layers and
    embeddings only a range of rows at a time."""

    NOTHING, BLOCKS, MODULES, ROWS = range(4)


@dataclass
class ReferenceOptions:
    """The options of a reference run. `dtype`: the dtype of its weights. `high`: whether `dtype` has a higher precision
    than the plan's computation. `streamed`: which weights are streamed."""

    dtype: torch.dtype
    high: bool = False
    streamed: StreamingLevel = StreamingLevel.ROWS


class ReferenceRun:
    """One forward and backward of the skeleton on rank 0. Rank 0 calls `forward` and then `backward`, while the other
    ranks serve its requests for weights (`GatherService.serve`)."""

    def __init__(self, skeleton: ModelCopy, engine: Engine, tensors: GatherService, side: ReferenceOptions) -> None:
        self.engine, self.tensors, self.side = engine, tensors, side
        device = engine.mesh.device
        # Each parameter expands its own NaN scalar. With a shared scalar, torch would count a write to one parameter as
        # a write to all of them.
        copied = skeleton.with_parameters(self._absent)
        self.model, self.loss = copied.model, copied.loss
        self.parameters = dict(self.model.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._prepare(device)
        self.blocks = _weights_by_block(self.model, side.streamed)
        by_rows = (
            _range_streamed_weights(self.model, self.blocks)
            if side.streamed == StreamingLevel.ROWS and not aux_loss_coefficient(self.model)
            else {}
        )
        self.blocks = {path: names for path, names in self.blocks.items() if path not in by_rows}
        self.rows = [stream_rows(self.model.get_submodule(path), name, self) for path, name in by_rows.items()]
        self.open: str = ""
        self.reached: list[str] = []
        self._waiting: dict[str, torch.Tensor] = {}
        self.compare: CompareGradient | None = None
        self.expected: dict[str, torch.Tensor] = {}
        """Fingerprints (random projections) that the weights must have, by name. The caller sets them if the weights
        have not changed since `parallelize`. Each is checked once."""
        self.access_guard = ParamAccessGuard(engine.model)
        self.misplaced: list[str] = []
        """The names of weights with a wrong fingerprint."""
        self._projections: dict[str, ChunkedProjection] = {}
        self.entered: set[str] = set()
        for path in self.blocks:
            self._wrap(path)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._taker(name))

    def _prepare(self, device: torch.device) -> None:
        """Prepares the copied model: copies the current buffers of the trained model, and turns off key-value caches
        and the model's own activation recompute. If this run has a higher precision than the plan, it applies no
        float8, and in float64 the model's casts to float32 become casts to float64. Otherwise it applies float8 where
        the plan does."""
        engine, model, kind = self.engine, self.model, self.side.dtype
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "use_cache"):
                config.use_cache = False
            if isinstance(getattr(module, "gradient_checkpointing", None), bool):
                module.gradient_checkpointing = False  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    widened = buffer.is_floating_point() and (
                        kind == torch.float64 or (self.side.high and buffer.itemsize < 4)
                    )
                    module._buffers[name] = buffer.to(device, kind if widened else None)
        live = self.tensors.live_buffers()
        with torch.no_grad():
            for name, buffer in model.named_buffers(remove_duplicate=False):
                if name in live:
                    buffer.copy_(live[name])
        if self.side.high and kind == torch.float64:
            use_float64(model)
        if not self.side.high:
            apply_float8(model, engine.anatomy, engine.recipe)

    # --- weights ----------------------------------------------------------------------------------

    def _absent(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the value of `parameter` while its weight is not in memory."""
        dtype = self.side.dtype if parameter.is_floating_point() else parameter.dtype
        return nan_scalar(dtype, self.engine.mesh.device).expand(parameter.shape)

    def _wrap(self, path: str) -> None:
        block = self.model.get_submodule(path)
        inner = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self._open(path)
            return inner(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            modes, states = function_modes(), GeneratorStates(own_generators(self.model))
            again = partial(
                checkpoint,
                run,
                use_reentrant=False,
                context_fn=lambda: (nullcontext(), with_function_modes(modes, states)),
            )
            output = again(*args, **kwargs) if torch.is_grad_enabled() else run(*args, **kwargs)
            self._close()
            return output

        block.forward = forward  # type: ignore[method-assign]

    def _open(self, path: str) -> None:
        """Loads the weights of the block at `path` and drops those of the previous block. Tensors that backward still
        needs stay alive through autograd."""
        self._close()
        self.entered.add(path)
        self._fill(self.blocks[path])
        self.open = path

    def _close(self) -> None:
        for name in self.blocks.get(self.open, ()):
            parameter = self.parameters[name]
            parameter.data = self._absent(parameter)
        self.open = ""

    def _fill(self, names: Sequence[str]) -> None:
        found = self.tensors.weights(names, self.side.dtype)
        for name, whole in found.items():
            if name in self.expected:
                with without_torch_modes():
                    self._check_place(name, random_projection(name, whole).cpu())
            # Bytes of frozen weights in 4 bits are sent as numbers below 256, which every compute dtype represents.
            parameter = self.parameters[name]
            parameter.data = whole if parameter.is_floating_point() else whole.to(parameter.dtype)

    def _check_place(self, name: str, projected: torch.Tensor) -> None:
        expected = self.expected.pop(name)
        off = (projected - expected).norm() / expected.norm().clamp_min(1e-300)
        self.misplaced += [name] if not float(off) <= FINGERPRINT_TOLERANCE else []

    # --- rows of large weights --------------------------------------------------------------------

    def weight_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Returns the rows [first, last) of a weight that is streamed by rows. Ranges are requested in order. When
        forward has requested the last range, the fingerprint of the weight is checked."""
        rows, columns = self.parameters[name].shape
        with without_torch_modes():
            found = self.tensors.weight_range(ElementRange(name, first * columns, last * columns), self.side.dtype)
            if name in self.expected:
                projection = self._projections.setdefault(name, ChunkedProjection(name, rows * columns))
                projection.add(first * columns, found)
                if last == rows:
                    self._check_place(name, projection.found)
        return found.view(-1, columns)

    def pass_gradient(self, name: str, first: int, gradient: torch.Tensor) -> None:
        """Compares the gradient rows from row `first` on with the plan's gradient."""
        assert self.compare is not None
        columns = self.parameters[name].shape[1]
        self.reached += [name] if not first else []
        where = ElementRange(name, first * columns, first * columns + gradient.numel())
        with without_torch_modes():
            if take := self.compare(where, gradient):
                self.tensors.gradient_range(where, lambda _, start, planned: take(start, planned))

    # --- passes -----------------------------------------------------------------------------------

    def forward(self, batch: Batch, scale: float) -> tuple[float, int]:
        """Returns the mean loss over the valid labels of `batch`, and the number of these labels. `backward` later
        differentiates the loss times `scale`."""
        streamed = {name for names in self.blocks.values() for name in names} | {each.name for each in self.rows}
        self._fill([name for name in self.parameters if name not in streamed])
        uncast = getattr(self.loss, "uncast_entries", ())
        batch = {name: self._moved(value, name in uncast) for name, value in batch.items()}
        objective = LossHead(self.model, self.loss, None)
        labels = objective.count(batch)
        with self.access_guard, torch.enable_grad():
            total = self._mean(objective, batch, labels)
        self._total = total * scale
        return float(total.detach()), labels

    def _mean(self, objective: LossHead, batch: Batch, labels: int) -> torch.Tensor:
        capacity = getattr(self.model, CAPACITY_ATTRIBUTE, None)
        if capacity is not None:
            length = next(
                value.shape[1] for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim > 1
            )
            drop_over_capacity(self.model, self.engine.anatomy.experts, length)
        coefficient = aux_loss_coefficient(self.model)
        if self.loss is not None or not coefficient:
            return self._sum(objective, batch, self.model(**objective.inputs(batch))) / (
                1 if self.loss is not None else max(labels, 1)
            )
        size, rows = self.engine.mesh.plan.micro_batch, num_rows(batch)
        total = torch.zeros((), device=self.engine.mesh.device)
        for at in range(0, rows, size):  # the load-balancing loss is defined per micro-batch
            part = {
                name: value[at : at + size] if isinstance(value, torch.Tensor) and value.ndim else value
                for name, value in batch.items()
            }
            output = self.model(**objective.inputs(part))
            total = (
                total
                + self._sum(objective, part, output) / max(labels, 1)
                + coefficient * output.aux_loss / (rows / size)
            )
        return total

    def _sum(self, objective: LossHead, batch: Batch, output: Any) -> torch.Tensor:
        """Returns the sum of torch's cross-entropy over the valid labels, computed a row at a time to save memory. With
        a user's loss, it returns this loss (a mean over rows)."""
        if self.loss is not None:
            return self.loss(output, batch)
        logits = extract_logits(output)
        assert logits is not None, "the plan's side has refused a model without logits"
        labels = shift_labels(batch["labels"]) if objective.shift else batch["labels"]
        rows = 1 if logits.ndim > 2 and len(logits) == len(labels) else max(len(logits), 1)
        total = torch.zeros((), device=logits.device)
        for part, wanted in zip(logits.split(rows), labels.split(rows) if rows == 1 else (labels,), strict=True):
            total = total + checkpoint(_loss_sum, part, wanted, use_reentrant=False, preserve_rng_state=False)
        return total

    def backward(self, compare: CompareGradient) -> None:
        """Runs backward and passes each gradient to `compare` as soon as it is complete, nearest to the loss first."""
        self.compare = compare
        with self.access_guard:
            self._total.backward()
        self._flush()
        self.close()

    def close(self) -> None:
        """Drops the weights and the saved activations. They would otherwise stay in memory until garbage collection,
        since the model and this object refer to each other."""
        self._close()
        self._total = torch.full((), math.nan, device=self.engine.mesh.device)
        for parameter in self.parameters.values():
            parameter.data = self._absent(parameter)

    def _taker(self, name: str) -> Callable[[torch.Tensor], None]:
        """Returns the hook that takes the gradient of the parameter `name`. It refers to this object weakly: Python's
        garbage collection does not see the references of hooks of parameters, so a strong one would keep this object
        and its engine in memory for ever."""
        this = weakref.ref(self)

        def take(parameter: torch.Tensor) -> None:
            run = this()
            assert run is not None and parameter.grad is not None
            run.reached.append(name)
            run._waiting[name] = parameter.grad
            parameter.grad = None
            if sum(gradient.numel() for gradient in run._waiting.values()) >= MAX_PENDING_GRADIENT_ELEMENTS:
                run._flush()

        return take

    def _flush(self) -> None:
        assert self.compare is not None
        waiting, self._waiting = self._waiting, {}
        with without_torch_modes():
            found = {name: self.compare(ElementRange(name, 0, each.numel()), each) for name, each in waiting.items()}
            takers = {name: take for name, take in found.items() if take}
            self.tensors.gradients(list(takers), lambda name, start, planned: takers[name](start, planned))

    @property
    def is_absent(self) -> bool:
        """Returns whether absent weights may have been read: the forward of a block was not called, or a module that
        streams rows was not called exactly once."""
        return self.entered != set(self.blocks) or any(each.calls != 1 for each in self.rows)

    def _moved(self, value: Any, is_uncast: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        cast = value.is_floating_point() and not is_uncast
        return value.to(self.engine.mesh.device, self.side.dtype if cast else None)


def _loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the cross-entropy over valid labels, in float32 or a higher precision."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def _weights_by_block(model: nn.Module, streamed: StreamingLevel) -> dict[str, tuple[str, ...]]:
    """Returns, by module path, the parameters that rank 0 needs only while the module runs. The modules are the blocks
    of the block lists and, from level MODULES on, large modules without children. Parameters that other modules also
    use are excluded. The parameters of blocks with hooks or parametrizations are excluded too, since a hook may read
    weights outside of the block's forward."""
    if not streamed:
        return {}
    paths = [
        f"{path}.{name}" for path in find_block_lists(model) for name, _ in model.get_submodule(path).named_children()
    ]
    if streamed >= StreamingLevel.MODULES:
        blocks = tuple(f"{path}." for path in paths)
        paths += [
            path
            for path, module in model.named_modules()
            if _is_large_module(module) and not f"{path}.".startswith(blocks)
        ]
    inside = {id(parameter) for path in paths for parameter in model.get_submodule(path).parameters()}
    prefixes = tuple(f"{path}." for path in paths)
    outside = {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not name.startswith(prefixes)
    } & inside
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[str, ...]] = {}
    for path in paths:
        block = model.get_submodule(path)
        if block._forward_pre_hooks or block._forward_hooks or nn.utils.parametrize.is_parametrized(block):
            outside |= {id(parameter) for parameter in block.parameters()}
    for path in paths:
        stored = tuple(
            names[id(parameter)] for parameter in model.get_submodule(path).parameters() if id(parameter) not in outside
        )
        if stored:
            found[path] = stored
    return found


def _range_streamed_weights(model: nn.Module, blocks: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns a dictionary from the path of each module that can stream rows to the name of its weight. Weights that
    several modules share are left out."""
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {path: model.get_submodule(path) for path in blocks}
    return {
        path: names[id(each.weight)]
        for path, each in found.items()
        if can_stream_rows(each) and owners[id(each.weight)] == 1
    }


def _is_large_module(module: nn.Module) -> bool:
    return (
        not any(True for _ in module.children())
        and sum(parameter.numel() for parameter in module.parameters()) >= MAX_PENDING_GRADIENT_ELEMENTS
    )
