"""Records the dataflow of one training forward, on the meta device or with real tensors. The runtime uses the record to
build pipeline stages and to gather weights.

[Note: recording] The model runs one forward on its example, with gradients enabled and with each module in its own
train or eval mode. For every torch function the record contains the storages that the function reads and writes, the
calling module, and the number of blocks that had begun. For every block it contains the arguments and results. Three
results follow from the record: the modules that read each parameter, the tensors that blocks receive
(runtime/pipeline/block_wrapper.py), and what each pipeline stage computes (dataflow.py).

[Note: real tensors] The model runs on the meta device first. If the forward reads tensor values (`tolist`, `nonzero`,
numpy), it runs again with real tensors, provided the model is small enough to be copied. If neither run succeeds, the
model is not analysed, and plans that depend on the analysis are refused. A forward runs with several seeds if its
Python code uses random numbers: it reads the value of a random tensor, as in `if torch.rand(()) < p`, or draws from
Python's or numpy's generator. All seeds must call the same blocks in the same order.

The record follows storages, not tensors. So it covers views, in-place operations and functions with a custom backward.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.analysis.block_lists import hidden_of
from meshwright.analysis.code_state import CONTAINER_TYPES, ContainerSnapshot
from meshwright.analysis.dataflow import (
    VALUE_EXTRACTING_OPS,
    BlockEntry,
    BlockExit,
    BlockInput,
    DataflowRecord,
    Obstacle,
    TracedOp,
    WeightUse,
)
from meshwright.analysis.dry_run import call_with_tensors, dry_run, external_failure, limit_analysis_time
from meshwright.analysis.example_inputs import (
    DATA_DEPENDENT_OPS,
    ExampleInputs,
    answer_data_dependent_op,
    call_arguments,
    describe_inputs,
    make_example,
    max_integer_value,
)
from meshwright.analysis.expert_modules import pass_through_experts
from meshwright.analysis.propagation import FIRST_INPUT_OPS, tensors_of
from meshwright.analysis.recompute_tape import active_saved_tensor_hooks
from meshwright.analysis.run_conditions import CHECK_VOCAB_ROWS, random_weights, set_seed
from meshwright.analysis.value_changes import ValueChange, ValueChangeRecorder
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.printable_text import reason_of

MAX_PARAMS_REAL_TENSORS = 1 << 24
"""Maximum number of parameter elements of a model that is recorded with real tensors. Recording a model of this size
takes between 1 and 2 s.
"""

SEEDED_RUNS = 4
"""Number of recordings, each with a different seed, of a forward whose Python code uses random numbers."""

RANDOM_OPS = frozenset(
    {
        "rand",
        "randn",
        "randint",
        "randperm",
        "bernoulli",
        "normal",
        "uniform_",
        "normal_",
        "bernoulli_",
        "random_",
        "multinomial",
    }
)


class DataflowRecorder(TorchFunctionMode):
    """Records every torch function while a model runs ([Note: recording])."""

    def __init__(
        self,
        record: DataflowRecord,
        parameters: Sequence[torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        on_meta: bool,
    ) -> None:
        super().__init__()
        self.record, self.on_meta = record, on_meta
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []
        self.reads: dict[str, set[WeightUse]] = defaultdict(set)
        self.paths, self.running_blocks, self.begun = [""], [-1], 0
        self.last_block = -1
        self.returned: set[int] = set()
        self.values_requested: set[str] = set()
        self.random_storages: set[int] = set()
        self.is_random = False
        self.hooks_before = active_saved_tensor_hooks()
        self.values: ValueChangeRecorder | None = None
        self.given: dict[int, ContainerSnapshot] = {}
        """The containers that each running block was given."""
        self.buffers: list[tuple[str, dict[str, torch.Tensor | None], str]] = []
        """The buffers outside of the blocks: name, and where the module stores it."""
        self.stored_buffers: dict[str, torch.Tensor | None] = {}
        for number, tensor in enumerate(parameters):
            assert self.storage_id(tensor) == number
            record.made_from[number] = 1 << number
        record.buffer_names = {self.storage_id(tensor): name for name, tensor in buffers.items()}

    # --- storage ids
    def storage_id(self, tensor: torch.Tensor) -> int:
        """Returns the index of the storage of `tensor`. The recorder references all tensors, so that no storage is
        freed and no index is reused.
        """
        try:
            place = tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # some tensors have no storage, such as those inside torch.func
            place = -id(tensor)
        if place not in self.numbers:
            self.numbers[place] = len(self.numbers)
            self.alive.append(tensor)
        return self.numbers[place]

    def _register(self, tensor: torch.Tensor) -> None:
        """Registers a tensor. If it requires a gradient and no recorded function made it, it counts as dependent on all
        parameters that the forward has read so far.
        """
        before = len(self.numbers)
        if self.storage_id(tensor) == before and tensor.requires_grad:
            self._record("unknown", [], [tensor], is_unknown=True)

    # --- torch functions
    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        given = tensors_of((args, kwargs))
        versions = [_tensor_version(tensor) for tensor in given]
        for tensor in given:
            self._register(tensor)
        if self.on_meta and name in DATA_DEPENDENT_OPS:
            result = answer_data_dependent_op(name, function, args, kwargs)
        elif self.on_meta and name in RANDOM_OPS and not given and "device" not in kwargs:
            result = _draw_with_value(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        changed = [
            tensor for tensor, version in zip(given, versions, strict=True) if _tensor_version(tensor) != version
        ]
        made = tensors_of(result)
        if name in VALUE_EXTRACTING_OPS or (name == "where" and len(given) == 1):
            self.values_requested.add(name)
            self.is_random |= any(self.storage_id(tensor) in self.random_storages for tensor in given)
        if made or changed or name in VALUE_EXTRACTING_OPS:
            is_form = name.endswith("_like") or name.startswith("new_")
            self._record(
                name, [] if is_form else given[:1] if name in FIRST_INPUT_OPS else given, [*made, *changed], changed
            )
        if name in RANDOM_OPS or any(self.storage_id(tensor) in self.random_storages for tensor in given):
            self.random_storages.update(self.storage_id(tensor) for tensor in made if tensor.numel() < 2)
        return result

    def _record(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        changed: Sequence[torch.Tensor] = (),
        is_unknown: bool = False,
    ) -> None:
        reads, writes = (
            tuple(dict.fromkeys(self.storage_id(tensor) for tensor in tensors)) for tensors in (given, made)
        )
        record, path = self.record, self.paths[-1]
        mark = 0
        for storage in reads:
            mark |= record.made_from.get(storage, 0)
            if storage < len(record.names):
                self.reads[record.names[storage]].add(WeightUse(path, self.begun))
        if is_unknown:
            mark = sum(1 << record.names.index(name) for name in self.reads)
        for storage in writes:
            if mark:
                record.made_from[storage] = record.made_from.get(storage, 0) | mark
        overwritten = tuple(dict.fromkeys(self.storage_id(tensor) for tensor in changed))
        record.events.append(
            TracedOp(name, reads, writes, self.running_blocks[-1], self.begun, path, overwritten, is_unknown)
        )

    # --- modules
    def attach(self, model: nn.Module, blocks: Sequence[str]) -> list[Any]:
        """Registers hooks that track the running modules. Returns the hook handles.

        If an argument of a block depends on parameters or comes from another block, the block receives a copy of the
        argument. The code around the block continues to use the original.
        """
        numbers = {path: number for number, path in enumerate(blocks)}
        self.values = ValueChangeRecorder(model, blocks)
        inside = tuple(f"{path}." for path in blocks)
        self.buffers = [
            (f"{path}.{key}" if path else key, module._buffers, key)
            for path, module in model.named_modules()
            for key in module._buffers
            if not f"{path}.".startswith(inside)
        ]
        handles: list[Any] = [
            model.register_forward_pre_hook(lambda *_: self._note_buffers()),
            model.register_forward_hook(lambda *_: self._compare_values()),
        ]
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(self._enter(path)))
            if path in numbers:
                handles.append(module.register_forward_pre_hook(self._begin(numbers[path]), with_kwargs=True))
                handles.append(module.register_forward_hook(self._end(numbers[path], path)))
            if path:
                handles.append(module.register_forward_hook(lambda *_: self.paths.pop() and None))
        return handles

    def _note_buffers(self) -> None:
        self.stored_buffers = {name: buffers.get(key) for name, buffers, key in self.buffers}

    def _compare_values(self) -> None:
        """Assigns the changes of Python values since the previous call to the code that has run since."""
        assert self.values is not None
        with torch._C.DisableTorchFunction():
            self.values.compare(self.last_block, is_inside=self.running_blocks[-1] >= 0)
            for name, buffers, key in self.buffers:
                if buffers.get(key) is not self.stored_buffers.get(name):
                    self.stored_buffers[name] = buffers.get(key)
                    self.record.replaced_after.setdefault(name, set()).add(self.last_block)
        self.record.value_changes = frozenset(self.values.found)

    def _enter(self, path: str) -> Any:
        return lambda *_: self.paths.append(path)

    def _begin(self, block: int) -> Any:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            record = self.record
            self._compare_values()
            found: dict[Obstacle, bool] = {
                "no_grad": not torch.is_grad_enabled(),
                "again": active_saved_tensor_hooks() is not self.hooks_before,
            }
            for what, applies in found.items():
                if applies and record.obstacle is None:
                    record.obstacle = what, block
            hidden = hidden_of(args, kwargs) if args or kwargs else None
            values, form = tree_flatten((args, kwargs))
            leaves: dict[int, BlockInput] = {}
            with torch._C.DisableTorchFunction():
                for place, value in enumerate(values):
                    if not isinstance(value, torch.Tensor):
                        continue
                    self._register(value)
                    storage, is_float = self.storage_id(value), value.is_floating_point() or value.is_complex()
                    mark = record.made_from.get(storage, 0)
                    if not (mark or value.requires_grad or storage in self.returned or (value is hidden and is_float)):
                        continue
                    copied = value.clone()
                    self._record("clone", [value], [copied])
                    leaves[place] = BlockInput(id(value), storage, self.storage_id(copied), mark, is_float)
                    self.alive.append(value)
                    values[place] = copied
            record.events.append(BlockEntry(block, leaves))
            self.begun += 1
            self.last_block = block
            self.running_blocks.append(block)
            args, kwargs = tree_unflatten(values, form)
            given = [each for each in (*args, *kwargs.values()) if type(each) in CONTAINER_TYPES]
            self.given[block] = ContainerSnapshot(given, set())
            return args, kwargs

        return begin

    def _end(self, block: int, path: str) -> Any:
        def end(module: nn.Module, args: Any, output: Any) -> None:
            assert self.values is not None
            if self.given.pop(block).is_changed:
                self.values.found.add(ValueChange(f"an argument of {path}", block, True))
            with torch._C.DisableTorchFunction():
                writes = tuple(self.storage_id(tensor) for tensor in tensors_of(output))
            self._compare_values()
            self.returned.update(writes)
            self.record.events.append(BlockExit(block, writes, len(output) if isinstance(output, tuple) else 0))
            self.running_blocks.pop()

        return end


@limit_analysis_time()
def record_dataflow(model: nn.Module, blocks: Sequence[str], example: ExampleInputs | None = None) -> DataflowRecord:
    """Returns the dataflow record of one forward of `model` on its example. `blocks` are the paths of its blocks. The
    model does not change.

    Raises:
        InputError: the model runs neither on the meta device nor with real tensors. The message has the reason and the
            remedy.
    """
    found = make_example(model, example)
    record: DataflowRecord | None = None
    failed: Exception | None = None
    needs_values = True
    try:
        record, needs_values = _record_over_seeds(model, blocks, found, True)
    except Exception as error:
        failed = error
    if needs_values and sum(parameter.numel() for parameter in model.parameters()) <= MAX_PARAMS_REAL_TENSORS:
        try:
            with random_weights(model, lambda path: True, max(CHECK_VOCAB_ROWS, max_integer_value(found) + 1)):
                record, _ = _record_over_seeds(model, blocks, found, False)
        except Exception as error:
            failed = error
    if record is None:
        assert failed is not None
        raise InputError(_describe_failed_run(failed, found))
    return record


def _describe_failed_run(error: Exception, example: ExampleInputs) -> Message:
    reason = reason_of(error)
    if (external := external_failure(error)) is not None:
        return Message(
            "the model was not analysed, because its forward fails to read a file or the network{where} ({reason}): "
            "{advice}",
            where=external.where,
            reason=reason,
            advice=external.advice,
        )
    return Message(
        "the model was not analysed, because it does not run with {inputs} ({reason}): give parallelize a batch with "
        "which it runs (example=...), or use pp1 with z2 at most",
        inputs=describe_inputs(example),
        reason=reason,
    )


def _record_over_seeds(
    model: nn.Module, blocks: Sequence[str], example: ExampleInputs, on_meta: bool
) -> tuple[DataflowRecord, bool]:
    """Returns the record with seed 0, and whether the forward read tensor values.

    A forward whose Python code uses random numbers also runs with other seeds. If the calls of blocks then differ from
    those with seed 0, the record gets an obstacle, unless it already has one. The obstacle is at the first block that
    only one of the two forwards calls, or at block 0 if only the order differs.
    """
    record, watch = _record_once(model, blocks, example, on_meta, 0)
    for seed in range(1, SEEDED_RUNS) if watch.is_random else ():
        other, _ = _record_once(model, blocks, example, on_meta, seed)
        if other.calls != record.calls and record.obstacle is None:
            record.obstacle = "random", min(set(other.calls) ^ set(record.calls), default=0)
    return record, bool(watch.values_requested)


def _record_once(
    model: nn.Module, blocks: Sequence[str], example: ExampleInputs, on_meta: bool, seed: int
) -> tuple[DataflowRecord, DataflowRecorder]:
    device = "meta" if on_meta else "cpu"
    vocabulary = min((one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)), default=2)
    parameters = {name: _copy_on_device(tensor, device) for name, tensor in model.named_parameters()}
    buffers = {name: _copy_on_device(tensor, device) for name, tensor in model.named_buffers()}
    record = DataflowRecord(tuple(example), model.training, tuple(parameters))
    watch = DataflowRecorder(record, [*parameters.values()], buffers, on_meta)
    args, kwargs = call_arguments(example, None, device, vocabulary)
    with dry_run(model, as_it_trains=True), torch.enable_grad(), torch.device(device), fixed_seeds(seed) as is_drawn:
        handles = watch.attach(model, blocks)
        handles.append(
            model.register_forward_hook(lambda *_: setattr(record, "replaced", _replaced_buffers(model, buffers)))
        )
        try:
            with pass_through_experts(model) if on_meta else nullcontext(), watch:
                output = call_with_tensors(model, {**parameters, **buffers}, args, kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if record.value_changes:
            again = ValueChangeRecorder(model, blocks)
            with pass_through_experts(model) if on_meta else nullcontext():
                call_with_tensors(model, {**parameters, **buffers}, args, kwargs)
            again.compare(-1, is_inside=False)
            record.repeated_changes = frozenset(change.name for change in again.found)
        watch.is_random |= is_drawn()
    leaves = [*tensors_of(_logits(output)), *tensors_of(output)]
    record.outputs = tuple(watch.storage_id(leaf) for leaf in leaves)
    record.reads = dict(watch.reads)
    record.params_without_grad = _params_without_gradient(parameters, leaves)
    return record, watch


def _copy_on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    trained = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    if device == "meta":
        return torch.empty_like(tensor, device="meta", requires_grad=trained)
    found = torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device, copy=True)
    return found.requires_grad_(trained)


def _replaced_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> frozenset[str]:
    return frozenset(name for name, buffer in model.named_buffers() if buffer is not buffers.get(name))


def _params_without_gradient(parameters: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor]) -> frozenset[str]:
    """Returns the names of the parameters that get no gradient from any of the outputs `leaves`."""
    weights = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
    nodes = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    reached = {id(leaf) for leaf in leaves}
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        reached.add(id(getattr(node, "variable", None)))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return frozenset(name for name, tensor in weights.items() if id(tensor) not in reached)


@contextmanager
def fixed_seeds(seed: int) -> Iterator[Callable[[], bool]]:
    """Seeds all generators of the host with `seed` and restores their states on exit.

    Yields a function that returns whether a number was drawn from Python's or numpy's generator.
    """
    numpy: Any = sys.modules.get("numpy")
    python, others = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        set_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        begun = (
            random.getstate(),
            numpy.random.get_state()[1].tobytes() if numpy else b"",
            numpy.random.get_state()[2] if numpy else 0,
        )

        def is_drawn() -> bool:
            state = numpy.random.get_state() if numpy else None
            return begun != (random.getstate(), state[1].tobytes() if state else b"", state[2] if state else 0)

        try:
            yield is_drawn
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(others)


def _draw_with_value(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns the random tensor that `function` draws. A tensor of one element is drawn on the CPU, so that it has a
    value.
    """
    found = function(*args, **kwargs)
    return (
        function(*args, **{**kwargs, "device": "cpu"})
        if isinstance(found, torch.Tensor) and found.numel() == 1
        else found
    )


def _tensor_version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _logits(output: Any) -> Any:
    if isinstance(output, tuple | list):
        return output[:1]
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
