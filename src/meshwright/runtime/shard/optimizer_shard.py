"""The optimizer's shard of a flat parameter group: its weights or a float32 copy of them (main weights), and the
optimizer states.

An optimizer reads its parameters once per operation. On one thread torch's AdamW took 92 ms for 18 million elements as
one tensor, and 27 ms in pieces that stay in the cache. On a CPU the optimizer therefore gets such pieces
(`ShardParam`). On an accelerator it gets one tensor, which needs one launch. A piece contains either matrices or
vectors (biases, norms) of one optimizer group (optim/param_groups.py), so that a rule can treat them differently.
Elementwise states are stored as one tensor each, and the optimizer has views of them: checkpoints do not depend on the
pieces.

Scalar states, such as the step count, are read, saved and restored with their exact type. With a different type, they
and the update would round differently.

[Note: skipped parameters] torch's optimizers skip a parameter whose gradient is None: its weights, states and step
count stay. A parameter that is skipped for the first time gets separate pieces (`ShardParam.isolated`). These pieces
have no gradient in such an update, so torch itself skips them. A piece that every update so far has skipped has no
states: torch creates them in the first update that has a gradient for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.runtime.backend import backend_of
from meshwright.spec.layout import CHUNK_ELEMENTS


class ScalarState(NamedTuple):
    """A scalar state. `kind` is the dtype of a 0-dimensional tensor, or `int`, `float`, `bool` of Python."""

    value: float
    kind: str = "float32"

    def create(self, device: torch.device) -> Any:
        """Creates the state.

        >>> ScalarState(3.0, "int").create(torch.device("cpu")), ScalarState(0.5, "float64").create(torch.device("cpu"))
        (3, tensor(0.5000, dtype=torch.float64))
        """
        if self.kind in PYTHON_SCALAR_TYPES:
            return PYTHON_SCALAR_TYPES[self.kind](self.value)
        return torch.tensor(self.value, dtype=getattr(torch, self.kind), device=device)


PYTHON_SCALAR_TYPES: Mapping[str, type] = MappingProxyType({"int": int, "float": float, "bool": bool})

ScalarValues = Mapping[str, ScalarState | float]

ScalarValuesByParam = Mapping[int, ScalarValues]
"""Scalar states by the identity of parameters."""

NO_SCALARS: ScalarValuesByParam = MappingProxyType({})


def scalar_states(optimizer: torch.optim.Optimizer, run: ShardParam) -> Iterator[tuple[str, float]]:
    """Yields the scalar states of `run`."""
    for key, value in optimizer.state.get(run, {}).items():
        if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, run):
            yield key, float(value)


def scalar_types(optimizer: torch.optim.Optimizer, run: ShardParam) -> dict[str, str]:
    """Returns the type of each scalar state, as `ScalarState.kind`."""
    state = optimizer.state.get(run, {})
    return {
        key: scalar_type(value)
        for key, value in state.items()
        if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, run)
    }


def scalar_type(value: Any) -> str:
    """Returns the type of a scalar state, as `ScalarState.kind`.

    >>> scalar_type(3), scalar_type(True), scalar_type(torch.tensor(3.0))
    ('int', 'bool', 'float32')
    """
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return next(name for name in ("bool", "int", "float") if isinstance(value, PYTHON_SCALAR_TYPES[name]))


def make_scalar_states(optimizer: torch.optim.Optimizer, run: torch.Tensor, scalars: ScalarValues) -> dict[str, Any]:
    """Creates scalar states on the device where the update of `run` reads them."""
    group = (
        {}
        if backend_of(run.device).memory_is_host
        else next(group for group in optimizer.param_groups if any(each is run for each in group["params"]))
    )
    states = {key: value if isinstance(value, ScalarState) else ScalarState(value) for key, value in scalars.items()}
    return {key: state.create(scalar_device(key, group, run.device)) for key, state in states.items()}


def scalar_device(key: str, group: dict[str, Any], device: torch.device) -> torch.device:
    """Returns where torch stores a scalar state of weights on `device` (as `Optimizer.load_state_dict` does): the step
    count on the host, except for kernels that read it themselves.

    >>> cuda = torch.device("cuda", 1)
    >>> scalar_device("step", {"fused": True}, cuda), scalar_device("step", {"capturable": True}, cuda)
    (device(type='cuda', index=1), device(type='cuda', index=1))
    >>> scalar_device("eta", {}, cuda)
    device(type='cuda', index=1)
    >>> scalar_device("step", {"fused": None}, cuda)
    device(type='cpu')
    """
    return device if key != "step" or group.get("fused") or group.get("capturable") else torch.device("cpu")


def is_elementwise(value: Any, run: torch.Tensor) -> bool:
    """Whether a state has one element per weight of `run`."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == run.shape


SHARD_PARAM_ELEMENTS = 1 << 17
"""Elements that an optimizer updates at a time on a CPU."""


class ShardParam(nn.Parameter):
    """A flat parameter of the optimizer. `is_matrix`: it contains elements of tensors with two or more dimensions.
    `path` is the name of one of the tensors; all are in its optimizer group."""

    is_matrix: bool
    path: str
    isolated: bool
    """Whether it contains elements of `path` only, because an update has skipped that tensor."""
    skipped: bool
    """Whether the last update that began has no gradient for it."""
    stateless: bool
    """Whether every update before the last has skipped it."""

    def __new__(cls, data: torch.Tensor, is_matrix: bool, path: str = "", isolated: bool = False) -> ShardParam:
        param = super().__new__(cls, data)
        param.is_matrix, param.path, param.isolated = is_matrix, path, isolated
        param.skipped = param.stateless = False
        return param

    @property
    def has_no_state(self) -> bool:
        """Whether the parameter has no states, because no update has had a gradient for it."""
        return self.stateless and self.skipped

    @property
    def needs_new_state(self) -> bool:
        """Whether this update is the first with a gradient for the parameter, after updates that skipped it."""
        return self.stateless and not self.skipped


class ParamRun(NamedTuple):
    """A segment of the shard, elements [start, stop), of tensors of one kind and optimizer group. `path` is the name of
    its first tensor. `isolated`: the segment contains only this tensor."""

    start: int
    stop: int
    is_matrix: bool
    path: str
    isolated: bool = False

    def clip(self, first: int, last: int) -> ParamRun:
        """Returns the part of the segment inside [first, last), relative to `first`."""
        return self._replace(start=max(self.start, first) - first, stop=min(self.stop, last) - first)


class TensorExtent(NamedTuple):
    """The elements [start, stop) of the tensor `name`, including the padding after the tensor."""

    start: int
    stop: int
    name: str


class ShardChunk(NamedTuple):
    """A few parameters, and their elements in the shard."""

    runs: slice
    elements: slice


FULL_SHARD = ShardChunk(slice(None), slice(None))


def make_shard_params(flat: torch.Tensor, runs: Sequence[ParamRun]) -> list[ShardParam]:
    """Returns views of `flat`, which `runs` cover, as parameters for an optimizer."""
    longest = SHARD_PARAM_ELEMENTS if backend_of(flat.device).memory_is_host else max(flat.numel(), 1)
    sizes = list(_run_sizes(runs, longest)) or [(flat.numel(), ParamRun(0, 0, True, ""))]
    parts = flat.split([size for size, _ in sizes])
    return [
        ShardParam(part, run.is_matrix, run.path, run.isolated) for part, (_, run) in zip(parts, sizes, strict=True)
    ]


class OptimizerShard:
    """The optimizer's shard of a parameter group. `params` are views of the tensor `flat`."""

    isolated: Sequence[ShardParam] = ()
    """The parameters of tensors that an update has skipped ([Note: skipped parameters])."""

    def __init__(self, flat: torch.Tensor, runs: Sequence[ParamRun]) -> None:
        self._flat, self.params, self._runs = flat, make_shard_params(flat, runs), list(runs)
        self._states: dict[str, torch.Tensor] = {}
        self.compute_dtype = flat.dtype
        """The dtype of an update."""
        self._linked_numel = 0
        """Number of elements whose states are stored in the flat states."""

    @property
    def flat(self) -> torch.Tensor:
        """The main weights as one flat tensor."""
        return self._flat

    @property
    def parts(self) -> list[torch.Tensor]:
        """The main weights where they are stored, in order."""
        return [self.flat]

    def state_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
        """Returns the elementwise states where they are stored, in the same parts."""
        return {key: [whole] for key, whole in self.states(optimizer).items()}

    def _split(self, flat: torch.Tensor, selected: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        """Splits `flat` into the elements of the `selected` parameters."""
        return flat.split([run.numel() for run in self.params[selected]])

    def commit_loaded_states(self) -> None:
        """Call after states were written by a checkpoint."""

    def state_bytes(self) -> int:
        """Returns the bytes of states in addition to the optimizer's own."""
        return 0

    def bytes(self) -> int:
        """Returns the bytes of the main weights on the device."""
        return self.flat.numel() * self.flat.element_size()

    # --- gradients
    # ------------------------------------------------------------------------------------------------------------

    def isolate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        """Cuts parameters so that each of `tensors` in `names` has a separate parameter. Updates states and groups of
        the optimizer."""
        before, self._runs = self.params, isolate_tensors(self._runs, tensors, names)
        self.params = make_shard_params(self._flat, self._runs)
        self.isolated = replace_params(optimizer, before, self.params)

    def set_grad(self, gradient: torch.Tensor, selected: slice = slice(None)) -> None:
        """Sets the gradients of the `selected` parameters for the optimizer's next step."""
        for run, part in zip(self.params[selected], self._split(gradient, selected), strict=True):
            run.grad = None if run.skipped else part

    def clear_grad(self, selected: slice = slice(None)) -> None:
        """Clears the gradients of the `selected` parameters."""
        for run in self.params[selected]:
            run.grad = None

    # --- a few runs at a time
    # ---------------------------------------------------------------------------------------------------

    def iter_chunks(self) -> Iterator[ShardChunk]:
        """Yields all parameters in chunks; on an accelerator all are one chunk."""
        longest = CHUNK_ELEMENTS if backend_of(self.flat.device).memory_is_host else max(self.flat.numel(), 1)
        first = start = end = 0
        for at, run in enumerate(self.params, 1):
            end += run.numel()
            if end % longest == 0 or at == len(self.params):
                yield ShardChunk(slice(first, at), slice(start, end))
                first, start = at, end

    def upcast(self, optimizer: torch.optim.Optimizer, step: int, chunk: ShardChunk) -> None:
        """Prepares the chunk for the update in step number `step`."""

    def downcast(self, optimizer: torch.optim.Optimizer, chunk: ShardChunk) -> None:
        """Stores the states that the update of the chunk has created."""
        if chunk.elements.stop > self._linked_numel or (
            self.isolated and any(run.needs_new_state for run in self.params[chunk.runs])
        ):
            self.link_states(optimizer, chunk)
            self._linked_numel = max(self._linked_numel, chunk.elements.stop)

    # --- states
    # ---------------------------------------------------------------------------------------------------------------

    def link_new_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Stores the states that the optimizer created in its first step."""
        if not self._states:
            self.states(optimizer)

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Returns the elementwise states by name, each as long as `flat`. The optimizer's states
        become views of them."""
        if not self._are_linked(optimizer):
            self.link_states(optimizer)
        return self._states

    def link_states(self, optimizer: torch.optim.Optimizer, selected: ShardChunk = FULL_SHARD) -> None:
        """Copies the optimizer's states of `selected` into the flat ones and makes them views of these. Parameters
        without states have zeros."""
        example = next((run for run in self.params[selected.runs] if not run.has_no_state), self.params[0])
        for key, first in sorted(optimizer.state.get(example, {}).items()):
            if is_elementwise(first, example):
                if key not in self._states:
                    allocate = torch.zeros_like if self.isolated else torch.empty_like
                    self._states[key] = allocate(self.flat, dtype=first.dtype)
                for run, view in zip(
                    self.params[selected.runs],
                    self._split(self._states[key][selected.elements], selected.runs),
                    strict=True,
                ):
                    if run.has_no_state:
                        continue
                    state = optimizer.state[run]
                    if state[key].data_ptr() != view.data_ptr():
                        state[key] = view.copy_(state[key])

    def _are_linked(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's states are views of the flat states. Since this runs in every step, it compares only
        addresses, for the first and the last parameter with states."""
        begin, end = self.params[0], self.params[-1]
        if self.isolated:
            begin = next((run for run in self.params if not run.has_no_state), begin)
            end = next((run for run in reversed(self.params) if not run.has_no_state), end)
        for key, first in optimizer.state.get(begin, {}).items():
            if not is_elementwise(first, begin):
                continue
            if key not in self._states:
                return False
            last = optimizer.state.get(end, {}).get(key)
            pairs = ((begin, first), (end, last))
            if last is None or any(
                state.data_ptr() != element_address(run, self.flat, self._states[key]) for run, state in pairs
            ):
                return False
        return True

    def scalar_states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, float]]:
        """Yields the scalar states of tensors that no update has skipped."""
        run = next((run for run in self.params if not run.isolated), None)
        if run is not None:
            yield from scalar_states(optimizer, run)

    def init_states(
        self,
        optimizer: torch.optim.Optimizer,
        dtypes: dict[str, str],
        scalars: ScalarValues,
        others: ScalarValuesByParam = NO_SCALARS,
    ) -> None:
        """Creates states of these dtypes filled with zeros, and these scalars, for a checkpoint to fill. `others` gives
        the scalars of parameters that differ. Parameters that all updates have skipped lose their states."""
        self._states = {key: torch.zeros_like(self.flat, dtype=getattr(torch, dtype)) for key, dtype in dtypes.items()}
        parts = {key: self._split(whole) for key, whole in self._states.items()}
        for at, run in enumerate(self.params):
            set_param_state(optimizer, run, {key: views[at] for key, views in parts.items()}, scalars, others)


class FrozenShard(OptimizerShard):
    """Frozen weights, which are stored in several parts."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        super().__init__(parts[0], ())
        self._parts = parts

    @property
    def parts(self) -> list[torch.Tensor]:
        """The frozen weights of each part."""
        return self._parts


def _run_sizes(runs: Sequence[ParamRun], longest: int) -> Iterator[tuple[int, ParamRun]]:
    """Yields the sizes of parameters and their segments. Parameters also end at each multiple of `longest`, so that
    chunk boundaries are always equal.

    >>> runs = [ParamRun(0, 4, True, "a"), ParamRun(4, 7, False, "b"), ParamRun(7, 10, True, "c")]
    >>> [size for size, _ in _run_sizes(runs, 3)]
    [3, 1, 2, 1, 2, 1]
    """
    for run in runs:
        first = run.start
        while first < run.stop:
            size = min(longest - first % longest, run.stop - first)
            yield size, run
            first += size


def element_address(run: torch.Tensor, flat: torch.Tensor, full: torch.Tensor) -> int:
    """Returns the address in `full` of the elements of `run`, which is a view of `flat`; `full` is as
    long as `flat`."""
    return full.data_ptr() + (run.data_ptr() - flat.data_ptr()) // flat.element_size() * full.element_size()


def set_param_state(
    optimizer: torch.optim.Optimizer,
    run: ShardParam,
    elementwise: dict[str, torch.Tensor],
    scalars: ScalarValues,
    others: ScalarValuesByParam,
) -> None:
    """Sets the optimizer's states of `run`, or removes them, as `OptimizerShard.init_states` says."""
    optimizer.state.pop(run, None)
    state: dict[str, Any] = elementwise | make_scalar_states(optimizer, run, others.get(id(run), scalars))
    if state and not run.has_no_state:
        optimizer.state[run] = state


def isolate_tensors(
    runs: Sequence[ParamRun], tensors: Sequence[TensorExtent], names: Collection[str]
) -> list[ParamRun]:
    """Returns `runs`, cut so that each of `tensors` (in order, without gaps) in `names` has a separate segment.

    >>> tensors = [TensorExtent(0, 4, "a"), TensorExtent(4, 7, "b"), TensorExtent(7, 9, "c"), TensorExtent(9, 12, "d")]
    >>> runs = [ParamRun(0, 9, True, "a"), ParamRun(9, 12, False, "d")]
    >>> [each[:2] + each[3:] for each in isolate_tensors(runs, tensors, {"b", "d"})]
    [(0, 4, 'a', False), (4, 7, 'b', True), (7, 9, 'c', False), (9, 12, 'd', True)]
    """
    result: list[ParamRun] = []
    for old in runs:
        inside = [each for each in tensors if each.start < old.stop and each.stop > old.start]
        for name, group in groupby(inside, key=lambda each: each.name if each.name in names else ""):
            parts = list(group)
            start, stop = max(parts[0].start, old.start), min(parts[-1].stop, old.stop)
            result.append(ParamRun(start, stop, old.is_matrix, parts[0].name, old.isolated or bool(name)))
    return result


def replace_params(
    optimizer: torch.optim.Optimizer, before: Sequence[ShardParam], after: Sequence[ShardParam]
) -> list[ShardParam]:
    """Replaces the parameters `before` of the optimizer and of nested optimizers by their parts `after`, with their
    states. Returns the isolated parameters."""
    news = iter(after)
    parts: dict[int, list[ShardParam]] = {}
    for old in before:
        parts[id(old)] = new = [next(news)]
        while sum(each.numel() for each in new) < old.numel():
            new.append(next(news))
    for inner in nested_optimizers(optimizer):
        for old in before:
            state = inner.state.pop(old, None)
            if state is not None:
                inner.state.update(
                    zip(
                        parts[id(old)], _split_state(state, old, [each.numel() for each in parts[id(old)]]), strict=True
                    )
                )
        for group in inner.param_groups:
            group["params"] = [new for old in group["params"] for new in parts.get(id(old), [old])]
    return [run for run in after if run.isolated]


def _split_state(state: dict[str, Any], old: ShardParam, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yields the states of the parts of a parameter: views of elementwise states, copies of all others."""
    split = {key: value.split(sizes) for key, value in state.items() if is_elementwise(value, old)}
    for at in range(len(sizes)):
        yield {key: split[key][at] if key in split else deepcopy(value) for key, value in state.items()}


def nested_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns an optimizer and its nested optimizers, which are its attributes or in lists of attributes."""
    optimizers: list[torch.optim.Optimizer] = []
    queue: list[Any] = [optimizer]
    while queue:
        each = queue.pop()
        if isinstance(each, torch.optim.Optimizer) and all(each is not other for other in optimizers):
            optimizers.append(each)
            queue += [
                part
                for value in vars(each).values()
                for part in (value if isinstance(value, list | tuple) else [value])
            ]
    return optimizers
