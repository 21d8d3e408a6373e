"""Stores the optimizer's shard of a flat parameter group: the optimizer states, and the weights or a float32 copy of
them (main weights). The updater and checkpoints use the shards.

The optimizer gets the shard as consecutive parameters, which are called pieces here (`ShardParam`). A piece contains
either matrices or vectors (biases, norms), so that the optimizer can treat the two differently. All tensors of a piece
are in one optimizer group (optim/param_groups.py). On a CPU, pieces are also short enough to stay in the cache, because
the optimizer reads a parameter once per operation. On one thread, torch's AdamW took 92 ms for 18 million elements in
one tensor, and 27 ms in short pieces. On an accelerator pieces are as long as possible, because each piece needs kernel
launches. Each elementwise state is stored as one tensor, and the optimizer has views of this tensor. So checkpoints do
not depend on the pieces.

Scalar states, such as the step count, are saved and restored with their exact type. A different type would change the
rounding of the state and of the update.

[Note: skipped parameters] torch's optimizers skip a parameter whose gradient is None: its weights, states and step
count do not change. When a parameter of the model is skipped for the first time, it gets separate pieces
(`ShardParam.isolated`). In an update that skips the parameter, these pieces have no gradient, so torch skips them.
torch creates the states of a piece in the first update in which the piece has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.runtime.backend import backend_of
from meshwright.spec.layout import CHUNK_ELEMENTS


class ScalarState(NamedTuple):
    """A scalar optimizer state. `kind` is the dtype of a 0-dimensional tensor ('float32'), or the name of the Python
    type: 'int', 'float' or 'bool'."""

    value: float
    kind: str = "float32"

    def create(self, device: torch.device) -> Any:
        """Returns the state as a Python number or as a tensor on `device`.

        >>> ScalarState(3.0, "int").create(torch.device("cpu")), ScalarState(0.5, "float64").create(torch.device("cpu"))
        (3, tensor(0.5000, dtype=torch.float64))
        """
        if self.kind in PYTHON_SCALAR_TYPES:
            return PYTHON_SCALAR_TYPES[self.kind](self.value)
        return torch.tensor(self.value, dtype=getattr(torch, self.kind), device=device)


PYTHON_SCALAR_TYPES: Mapping[str, type] = MappingProxyType({"int": int, "float": float, "bool": bool})

ScalarValues = Mapping[str, ScalarState | float]

ScalarValuesByParam = Mapping[int, ScalarValues]
"""Maps the `id` of each parameter to its scalar states by name."""

ReadScalar = Callable[[Any], Any]
NO_SCALARS: ScalarValuesByParam = MappingProxyType({})


def scalar_states(optimizer: torch.optim.Optimizer, run: ShardParam, read: ReadScalar = float) -> Iterator[Any]:
    """Yields the name and the value of each scalar state of `run`. `read` returns the values of numbers and tensors."""
    for key, value in optimizer.state.get(run, {}).items():
        if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, run):
            yield key, read(value)


def scalar_types(optimizer: torch.optim.Optimizer, run: ShardParam) -> dict[str, str]:
    """Returns the type of each scalar state of `run` by name, in the form of `ScalarState.kind`."""
    state = optimizer.state.get(run, {})
    return {
        key: scalar_type(value)
        for key, value in state.items()
        if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, run)
    }


def scalar_type(value: Any) -> str:
    """Returns the type of a scalar state, in the form of `ScalarState.kind`.

    >>> scalar_type(3), scalar_type(True), scalar_type(torch.tensor(3.0))
    ('int', 'bool', 'float32')
    """
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return next(name for name in ("bool", "int", "float") if isinstance(value, PYTHON_SCALAR_TYPES[name]))


def make_scalar_states(optimizer: torch.optim.Optimizer, run: torch.Tensor, scalars: ScalarValues) -> dict[str, Any]:
    """Returns new scalar states with the values `scalars` by name, on the device from which the update of `run` reads
    them."""
    group = (
        {}
        if backend_of(run.device).memory_is_host
        else next(group for group in optimizer.param_groups if any(each is run for each in group["params"]))
    )
    states = {key: value if isinstance(value, ScalarState) else ScalarState(value) for key, value in scalars.items()}
    return {key: state.create(scalar_device(key, group, run.device)) for key, state in states.items()}


def scalar_device(key: str, group: dict[str, Any], device: torch.device) -> torch.device:
    """Returns the device on which torch stores the scalar state `key` of weights on `device`. As in
    `Optimizer.load_state_dict`, the step count is on the CPU, unless a fused or capturable kernel reads it on the
    device.

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
    """Returns whether the state `value` has one element per weight of `run`."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == run.shape


SHARD_PARAM_ELEMENTS = 1 << 17
"""Maximum number of elements of a piece on a CPU."""


class ShardParam(nn.Parameter):
    """A flat parameter of the optimizer: a piece of the shard. `is_matrix`: whether the tensors of the piece have two
    or more dimensions. `path` is the name of one tensor of the piece."""

    is_matrix: bool
    path: str
    isolated: bool
    """Whether the piece contains only the tensor `path`, because an update has skipped this tensor."""
    skipped: bool
    """Whether the current update has no gradient for the piece."""
    stateless: bool
    """Whether all earlier updates have skipped the piece."""

    def __new__(cls, data: torch.Tensor, is_matrix: bool, path: str = "", isolated: bool = False) -> ShardParam:
        param = super().__new__(cls, data, data.is_floating_point())  # bytes of frozen weights have no gradient
        param.is_matrix, param.path, param.isolated = is_matrix, path, isolated
        param.skipped = param.stateless = False
        return param

    @property
    def has_no_state(self) -> bool:
        """Whether the piece still has no states after the current update, because no update had a gradient for it."""
        return self.stateless and self.skipped

    @property
    def needs_new_state(self) -> bool:
        """Whether the current update is the first with a gradient for the piece, after updates that skipped it."""
        return self.stateless and not self.skipped


class ParamRun(NamedTuple):
    """A segment of the shard: elements [start, stop). Its tensors are either all matrices or all vectors, and all are
    in one optimizer group. `path` is the name of the first tensor. `isolated`: whether the segment contains only this
    tensor because an update has skipped it."""

    start: int
    stop: int
    is_matrix: bool
    path: str
    isolated: bool = False

    def clip(self, first: int, last: int) -> ParamRun:
        """Returns the part of the segment inside [first, last). The `start` and `stop` of this part count from
        `first`."""
        return self._replace(start=max(self.start, first) - first, stop=min(self.stop, last) - first)


class TensorExtent(NamedTuple):
    """The elements [start, stop) of a shard that belong to the tensor `name`, including the padding after the
    tensor."""

    start: int
    stop: int
    name: str


class ShardChunk(NamedTuple):
    """Consecutive pieces that are updated together: their indices in `OptimizerShard.params`, and their elements in the
    shard."""

    runs: slice
    elements: slice


FULL_SHARD = ShardChunk(slice(None), slice(None))


def make_shard_params(flat: torch.Tensor, runs: Sequence[ParamRun]) -> list[ShardParam]:
    """Returns consecutive views of `flat`: the pieces for the optimizer. `runs` are the segments of `flat` in order."""
    longest = SHARD_PARAM_ELEMENTS if backend_of(flat.device).memory_is_host else max(flat.numel(), 1)
    sizes = list(_run_sizes(runs, longest)) or [(flat.numel(), ParamRun(0, 0, True, ""))]
    parts = flat.split([size for size, _ in sizes])
    return [
        ShardParam(part, run.is_matrix, run.path, run.isolated) for part, (_, run) in zip(parts, sizes, strict=True)
    ]


class OptimizerShard:
    """The optimizer's shard of a parameter group. `params` are the pieces, which are consecutive views of the tensor
    `flat`."""

    isolated: Sequence[ShardParam] = ()
    """The pieces of the tensors that an update has skipped ([Note: skipped parameters])."""

    def __init__(self, flat: torch.Tensor, runs: Sequence[ParamRun]) -> None:
        self._flat, self.params, self._runs = flat, make_shard_params(flat, runs), list(runs)
        self._states: dict[str, torch.Tensor] = {}
        self.compute_dtype = flat.dtype
        """The dtype in which the update computes."""
        self._linked_numel = 0
        """Number of elements whose states are views of the flat states."""

    @property
    def flat(self) -> torch.Tensor:
        """Returns the main weights as one flat tensor."""
        return self._flat

    @property
    def parts(self) -> list[torch.Tensor]:
        """Returns the tensors that store the main weights, in order."""
        return [self.flat]

    def state_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
        """Returns for each elementwise state the tensors that store it, one for each tensor in `self.parts`."""
        return {key: [whole] for key, whole in self.states(optimizer).items()}

    def _split(self, flat: torch.Tensor, selected: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        """Returns views of `flat`, one for each of the `selected` pieces. `flat` must consist of the elements of
        these pieces.
        """
        return flat.split([run.numel() for run in self.params[selected]])

    def commit_loaded_states(self) -> None:
        """Stores states that were loaded into the tensors of `states`. Does nothing here, because these tensors are
        the storage."""

    def state_bytes(self) -> int:
        """Returns the number of bytes of states that are not counted in the optimizer's own state."""
        return 0

    def bytes(self) -> int:
        """Returns the number of bytes of the main weights on the device."""
        return self.flat.numel() * self.flat.element_size()

    # --- gradients
    # ------------------------------------------------------------------------------------------------------------

    def isolate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        """Splits the pieces so that each of `tensors` whose name is in `names` has separate pieces. Also splits the
        optimizer's states, and replaces the pieces in the optimizer's groups."""
        before, self._runs = self.params, isolate_tensors(self._runs, tensors, names)
        self.params = make_shard_params(self._flat, self._runs)
        self.isolated = replace_params(optimizer, before, self.params)

    def set_grad(self, gradient: torch.Tensor, selected: slice = slice(None)) -> None:
        """Sets the gradients of the `selected` pieces for the optimizer's next step. `gradient` consists of the
        gradients of these pieces."""
        for run, part in zip(self.params[selected], self._split(gradient, selected), strict=True):
            run.grad = None if run.skipped else part

    def clear_grad(self, selected: slice = slice(None)) -> None:
        """Clears the gradients of the `selected` pieces."""
        for run in self.params[selected]:
            run.grad = None

    # --- chunks

    def iter_chunks(self) -> Iterator[ShardChunk]:
        """Yields chunks that cover all pieces in order. On an accelerator there is one chunk."""
        longest = CHUNK_ELEMENTS if backend_of(self.flat.device).memory_is_host else max(self.flat.numel(), 1)
        first = start = end = 0
        for at, run in enumerate(self.params, 1):
            end += run.numel()
            if end % longest == 0 or at == len(self.params):
                yield ShardChunk(slice(first, at), slice(start, end))
                first, start = at, end

    def upcast(self, optimizer: torch.optim.Optimizer, step: int, chunk: ShardChunk) -> None:
        """Converts the chunk to the dtype of the update of step `step`. Does nothing here, because this class stores
        weights and states in that dtype."""

    def downcast(self, optimizer: torch.optim.Optimizer, chunk: ShardChunk) -> None:
        """Stores the states that the update of the chunk created."""
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
        """Returns the elementwise states by name, each as one tensor with the shape of `flat`. If necessary, replaces
        the optimizer's states by views of these tensors."""
        if not self._are_linked(optimizer):
            self.link_states(optimizer)
        return self._states

    def link_states(self, optimizer: torch.optim.Optimizer, selected: ShardChunk = FULL_SHARD) -> None:
        """Copies the states of the `selected` pieces from the optimizer into the flat states, and replaces them in the
        optimizer by views of the flat states. For pieces without states, the flat states are zeros."""
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
        """Returns whether the optimizer's states are views of the flat states. To be fast enough for every step,
        compares only the addresses of the first and the last piece with states."""
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

    def scalar_states(self, optimizer: torch.optim.Optimizer, read: ReadScalar = float) -> Iterator[Any]:
        """Yields the name and the value of each scalar state (`scalar_states`). The values are equal for all pieces
        that no update has skipped."""
        run = next((run for run in self.params if not run.isolated), None)
        if run is not None:
            yield from scalar_states(optimizer, run, read)

    def init_states(
        self,
        optimizer: torch.optim.Optimizer,
        dtypes: dict[str, str],
        scalars: ScalarValues,
        others: ScalarValuesByParam = NO_SCALARS,
    ) -> None:
        """Creates elementwise states of zeros with `dtypes`, which a checkpoint then fills, and the scalar states
        `scalars`. `others` contains the scalar states of those pieces whose scalar states differ from `scalars`. A
        piece that every update has skipped gets no states."""
        self._states = {key: torch.zeros_like(self.flat, dtype=getattr(torch, dtype)) for key, dtype in dtypes.items()}
        parts = {key: self._split(whole) for key, whole in self._states.items()}
        for at, run in enumerate(self.params):
            set_param_state(optimizer, run, {key: views[at] for key, views in parts.items()}, scalars, others)


class FrozenShard(OptimizerShard):
    """The weights of a frozen parameter group that are stored in several tensors."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        super().__init__(parts[0], ())
        self._parts = parts

    @property
    def parts(self) -> list[torch.Tensor]:
        """Returns the tensors that store the frozen weights."""
        return self._parts


def _run_sizes(runs: Sequence[ParamRun], longest: int) -> Iterator[tuple[int, ParamRun]]:
    """Yields the size and the segment of each piece. Pieces end where a segment ends, and at every multiple of
    `longest`. So pieces never cross a chunk boundary, and chunk boundaries do not depend on the segments.

    >>> runs = [ParamRun(0, 4, True, "a"), ParamRun(4, 7, False, "b"), ParamRun(7, 10, True, "c")]
    >>> [size for size, _ in _run_sizes(runs, 3)]  # the pieces end at 3, 4, 6, 7, 9 and 10
    [3, 1, 2, 1, 2, 1]
    """
    for run in runs:
        first = run.start
        while first < run.stop:
            size = min(longest - first % longest, run.stop - first)
            yield size, run
            first += size


def element_address(run: torch.Tensor, flat: torch.Tensor, full: torch.Tensor) -> int:
    """Returns the address of `full[i]`, where i is the index in `flat` of the first element of `run`. `run` is a view
    of `flat`."""
    return full.data_ptr() + (run.data_ptr() - flat.data_ptr()) // flat.element_size() * full.element_size()


def set_param_state(
    optimizer: torch.optim.Optimizer,
    run: ShardParam,
    elementwise: dict[str, torch.Tensor],
    scalars: ScalarValues,
    others: ScalarValuesByParam,
) -> None:
    """Sets the optimizer's states of `run`, or removes them. The arguments are those of
    `OptimizerShard.init_states`.
    """
    optimizer.state.pop(run, None)
    state: dict[str, Any] = elementwise | make_scalar_states(optimizer, run, others.get(id(run), scalars))
    if state and not run.has_no_state:
        optimizer.state[run] = state


def isolate_tensors(
    runs: Sequence[ParamRun], tensors: Sequence[TensorExtent], names: Collection[str]
) -> list[ParamRun]:
    """Returns `runs`, split so that each tensor in `names` has its own segment. `tensors`: all tensors of the shard, in
    order.

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
    """Replaces the pieces `before` by the shorter pieces `after`, in the optimizer and in its nested optimizers, and
    splits the states accordingly. Returns the isolated pieces."""
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
    """Yields the states of each part of the piece `old`. Elementwise states are views of those in `state`. All other
    states are copies."""
    split = {key: value.split(sizes) for key, value in state.items() if is_elementwise(value, old)}
    for at in range(len(sizes)):
        yield {key: split[key][at] if key in split else deepcopy(value) for key, value in state.items()}


def nested_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizer and all nested optimizers. A nested optimizer is the value of an attribute of another
    optimizer, or is in a list or tuple that is the value of an attribute."""
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
