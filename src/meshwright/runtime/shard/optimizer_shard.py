"""States of an optimizer that are one number for many weights, such as the count of steps: how they are read, saved and
made again as they were.

A count may be a tensor of any type or a number of Python: made again as another one it would be rounded otherwise, and
the update with it.

What the optimizer updates of a flat unit: the own run of its weights, or a float32 copy of it, and the optimizer's
states beside it.

An optimizer passes over its parameters once for each of its operations. 18 million elements of torch's AdamW took 92 ms
as one tensor on one
thread and 27 ms in runs that stay in the cache, so on a CPU the optimizer is given such runs; an accelerator gets one
tensor, one launch.
A run holds either matrices or vectors (biases, norms), and tensors of one group alone (update/groups.py), so that a
rule can treat them apart. States with an element for each weight lie whole
here, the optimizer holds views of them: what a checkpoint writes does not know of runs.

[Note: skipped parameters] torch's optimizers skip a parameter whose gradient is None: its weights, its states and its
count of steps stay. A parameter
that is skipped for the first time gets runs of its own ([Run.single], zero/skipped.py), which have no gradient in such
an update, so that torch itself
skips them. A run that has been skipped in every update so far has no states: torch makes them in the first update that
has a gradient for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from meshwright.runtime.backend import backend_of

if TYPE_CHECKING:
    from meshwright.runtime.optim.full_tensor import FullTensorStep


class ScalarState(NamedTuple):
    """One number of a state. `kind`: the type of a tensor without dimensions, or `int`, `float`, `bool` of Python."""

    value: float
    kind: str = "float32"

    def create(self, device: torch.device) -> Any:
        """The state itself.

        >>> ScalarState(3.0, "int").made(torch.device("cpu")), ScalarState(0.5, "float64").made(torch.device("cpu"))
        (3, tensor(0.5000, dtype=torch.float64))
        """
        if self.kind in PYTHON_SCALAR_TYPES:
            return PYTHON_SCALAR_TYPES[self.kind](self.value)
        return torch.tensor(self.value, dtype=getattr(torch, self.kind), device=device)


PYTHON_SCALAR_TYPES: Mapping[str, type] = MappingProxyType({"int": int, "float": float, "bool": bool})

ScalarValues = Mapping[str, ScalarState | float]

ScalarValuesByParam = Mapping[int, ScalarValues]
"""Scalars of states by the identity of runs."""

NO_SCALARS: ScalarValuesByParam = MappingProxyType({})


def scalar_states(optimizer: torch.optim.Optimizer, run: ShardParam) -> Iterator[tuple[str, float]]:
    """States of `run` that have one number for all of its elements."""
    for key, value in optimizer.state.get(run, {}).items():
        if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, run):
            yield key, float(value)


def scalar_types(optimizer: torch.optim.Optimizer, run: ShardParam) -> dict[str, str]:
    """What each of `scalar_states` is, as `ScalarState.kind` says it."""
    held = optimizer.state.get(run, {})
    return {
        key: scalar_type(value)
        for key, value in held.items()
        if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, run)
    }


def scalar_type(value: Any) -> str:
    """
    >>> scalar_type(3), scalar_type(True), scalar_type(torch.tensor(3.0))
    ('int', 'bool', 'float32')
    """
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return next(name for name in ("bool", "int", "float") if isinstance(value, PYTHON_SCALAR_TYPES[name]))


def make_scalar_states(optimizer: torch.optim.Optimizer, run: torch.Tensor, scalars: ScalarValues) -> dict[str, Any]:
    """One number each, where the update of `run` reads it."""
    group = (
        {}
        if backend_of(run.device).memory_is_host
        else next(group for group in optimizer.param_groups if any(each is run for each in group["params"]))
    )
    numbers = {key: value if isinstance(value, ScalarState) else ScalarState(value) for key, value in scalars.items()}
    return {key: number.create(scalar_device(key, group, run.device)) for key, number in numbers.items()}


def scalar_device(key: str, group: dict[str, Any], device: torch.device) -> torch.device:
    """Where torch's rules hold a number of weights on `device` (`OptimizerConfig.load_state_dict` lays it there too):
    the count of steps on the host,
    but for kernels that read it themselves.

    >>> cuda = torch.device("cuda", 1)
    >>> scalar_device("step", {"fused": True}, cuda), scalar_device("step", {"capturable": True}, cuda), scalar_device("eta", {}, cuda)
    (device(type='cuda', index=1), device(type='cuda', index=1), device(type='cuda', index=1))
    >>> scalar_device("step", {"fused": None}, cuda)
    device(type='cpu')
    """
    return device if key != "step" or group.get("fused") or group.get("capturable") else torch.device("cpu")


def is_elementwise(value: Any, run: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == run.shape


SHARD_PARAM_ELEMENTS = 1 << 17
"""Elements that an optimizer updates at a time on a CPU."""

CHUNK_ELEMENTS = 4 * SHARD_PARAM_ELEMENTS
"""Elements that are updated between two looks at what an update needs besides: 2 MiB of each kind of float32 state."""


class ShardParam(nn.Parameter):
    """A flat parameter that the optimizer is given. `is_matrix`: it holds elements of tensors of two or more
    dimensions. `path`: one of these; all
    are of its group."""

    is_matrix: bool
    path: str
    isolated: bool
    """Whether it holds elements of `path` alone, because an update has skipped that tensor."""
    skipped: bool
    """Whether the last update that began has no gradient for it."""
    stateless: bool
    """Whether every update before that one has skipped it."""

    def __new__(cls, data: torch.Tensor, is_matrix: bool, path: str = "", single: bool = False) -> ShardParam:
        made = super().__new__(cls, data)
        made.is_matrix, made.path, made.isolated = is_matrix, path, single
        made.skipped = made.stateless = False
        return made

    @property
    def has_no_state(self) -> bool:
        """Whether it has no states: no update has had a gradient for it."""
        return self.stateless and self.skipped

    @property
    def needs_new_state(self) -> bool:
        """Whether the update is the first that has a gradient for it, although others had theirs before."""
        return self.stateless and not self.skipped


class ParamRun(NamedTuple):
    """Elements `start` to `stop` are of tensors of one kind and group, the first of which is `path`. `single`: of this
    one alone."""

    start: int
    stop: int
    is_matrix: bool
    path: str
    isolated: bool = False

    def clip(self, first: int, last: int) -> ParamRun:
        """What of it lies from `first` to `last`, counted from there."""
        return self._replace(start=max(self.start, first) - first, stop=min(self.stop, last) - first)


class TensorExtent(NamedTuple):
    """Elements `start` to `stop` are of the tensor `name`, with the room behind it."""

    start: int
    stop: int
    name: str


class ShardChunk(NamedTuple):
    """A few runs, and which elements of the whole they are."""

    runs: slice
    elements: slice


FULL_SHARD = ShardChunk(slice(None), slice(None))


def make_shard_params(flat: torch.Tensor, stretches: Sequence[ParamRun]) -> list[ShardParam]:
    """Views of `flat`, which `stretches` cover, for an optimizer."""
    longest = SHARD_PARAM_ELEMENTS if backend_of(flat.device).memory_is_host else max(flat.numel(), 1)
    cuts = list(_run_sizes(stretches, longest)) or [(flat.numel(), ParamRun(0, 0, True, ""))]
    parts = flat.split([size for size, _ in cuts])
    return [ShardParam(part, of.is_matrix, of.path, of.isolated) for part, (_, of) in zip(parts, cuts, strict=True)]


class OptimizerShard:
    """`flat` is the whole tensor, `runs` are views of it."""

    full_tensor_step: FullTensorStep | None = None
    """What the optimizer is given instead of runs, where it needs whole tensors."""
    isolated: Sequence[ShardParam] = ()
    """Of `runs` those of tensors that an update has skipped ([Note: skipped parameters])."""

    def __init__(self, flat: torch.Tensor, stretches: Sequence[ParamRun]) -> None:
        self._flat, self.params, self._runs = flat, make_shard_params(flat, stretches), list(stretches)
        self._states: dict[str, torch.Tensor] = {}
        self.compute_dtype = flat.dtype
        """The type of an update."""
        self._linked_numel = 0
        """Elements whose states an update has laid here."""

    @property
    def flat(self) -> torch.Tensor:
        return self._flat

    @property
    def parts(self) -> list[torch.Tensor]:
        """`flat` where it lies, one part behind the other."""
        return [self.flat]

    def state_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
        """`states` where they lie, in the same parts."""
        return {key: [whole] for key, whole in self.states(optimizer).items()}

    def _split(self, flat: torch.Tensor, some: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        """What `some` runs have of `flat`, which is theirs."""
        return flat.split([run.numel() for run in self.params[some]])

    def commit_loaded_states(self) -> None:
        """After `states` were written from outside."""

    def state_bytes(self) -> int:
        """Held for states beside the optimizer's own."""
        return 0

    def bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    # --- gradients
    # ------------------------------------------------------------------------------------------------------------

    def isolate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        """Cut runs so that each of `tensors` whose name is in `names` has its own; states and groups of the optimizer
        follow."""
        before, self._runs = self.params, isolate_tensors(self._runs, tensors, names)
        self.params = make_shard_params(self._flat, self._runs)
        self.isolated = replace_params(optimizer, before, self.params)

    def set_grad(self, gradient: torch.Tensor, some: slice = slice(None)) -> None:
        """The optimizer's next step uses `gradient`, which is that of `some` runs."""
        for run, part in zip(self.params[some], self._split(gradient, some), strict=True):
            run.grad = None if run.skipped else part

    def clear_grad(self, some: slice = slice(None)) -> None:
        for run in self.params[some]:
            run.grad = None

    # --- a few runs at a time
    # ---------------------------------------------------------------------------------------------------

    def iter_chunks(self) -> Iterator[ShardChunk]:
        """All runs, some at a time; an accelerator updates them at once."""
        longest = CHUNK_ELEMENTS if backend_of(self.flat.device).memory_is_host else max(self.flat.numel(), 1)
        first = start = end = 0
        for at, run in enumerate(self.params, 1):
            end += run.numel()
            if end % longest == 0 or at == len(self.params):
                yield ShardChunk(slice(first, at), slice(start, end))
                first, start = at, end

    def upcast(self, optimizer: torch.optim.Optimizer, step: int, window: ShardChunk) -> None:
        """Before the optimizer updates the window in step number `step`."""

    def downcast(self, optimizer: torch.optim.Optimizer, window: ShardChunk) -> None:
        """After it: states that it has made are laid together."""
        if window.elements.stop > self._linked_numel or (
            self.isolated and any(run.needs_new_state for run in self.params[window.runs])
        ):
            self.link_states(optimizer, window)
            self._linked_numel = max(self._linked_numel, window.elements.stop)

    # --- states
    # ---------------------------------------------------------------------------------------------------------------

    def link_new_states(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step: states that the optimizer made in its first one are laid together."""
        if not self._states:
            self.states(optimizer)

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """By name, each as long as `flat`. The optimizer's own become views of them, where they are not yet."""
        if not self._are_linked(optimizer):
            self.link_states(optimizer)
        return self._states

    def link_states(self, optimizer: torch.optim.Optimizer, some: ShardChunk = FULL_SHARD) -> None:
        """The optimizer's states of `some` runs become views of those that lie whole here; zeros lie where a run has
        none."""
        of = next((run for run in self.params[some.runs] if not run.has_no_state), self.params[0])
        for key, first in sorted(optimizer.state.get(of, {}).items()):
            if is_elementwise(first, of):
                if key not in self._states:
                    room = torch.zeros_like if self.isolated else torch.empty_like
                    self._states[key] = room(self.flat, dtype=first.dtype)
                for run, view in zip(
                    self.params[some.runs], self._split(self._states[key][some.elements], some.runs), strict=True
                ):
                    if run.has_no_state:
                        continue
                    held = optimizer.state[run]
                    if held[key].data_ptr() != view.data_ptr():
                        held[key] = view.copy_(held[key])

    def _are_linked(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's states are the views of ours, which is looked at in every step: without making them,
        and by the first and
        the last run that have any, between which all are laid alike."""
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
                held.data_ptr() != element_address(run, self.flat, self._states[key]) for run, held in pairs
            ):
                return False
        return True

    def scalar_states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, float]]:
        """States that have one number for all weights, such as the count of steps, of tensors that no update has
        skipped."""
        run = next((run for run in self.params if not run.isolated), None)
        if run is not None:
            yield from scalar_states(optimizer, run)

    def init_states(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: dict[str, str],
        scalars: ScalarValues,
        others: ScalarValuesByParam = NO_SCALARS,
    ) -> None:
        """Empty states of these types, and these scalars, ready to be filled by loading. `others`: the scalars of each
        run that has other ones.
        Runs of tensors that all updates have skipped lose their states."""
        self._states = {key: torch.zeros_like(self.flat, dtype=getattr(torch, kind)) for key, kind in kinds.items()}
        parts = {key: self._split(whole) for key, whole in self._states.items()}
        for at, run in enumerate(self.params):
            set_param_state(optimizer, run, {key: views[at] for key, views in parts.items()}, scalars, others)


class FrozenShard(OptimizerShard):
    """Of weights that nobody updates, which lie in several places."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        super().__init__(parts[0], ())
        self._parts = parts

    @property
    def parts(self) -> list[torch.Tensor]:
        return self._parts


def _run_sizes(stretches: Sequence[ParamRun], longest: int) -> Iterator[tuple[int, ParamRun]]:
    """Sizes of runs and what they are of. Runs also end at each multiple of `longest`: whoever takes some of them at a
    time has the same.

    >>> [size for size, _ in _run_sizes([ParamRun(0, 4, True, "a"), ParamRun(4, 7, False, "b"), ParamRun(7, 10, True, "c")], 3)]
    [3, 1, 2, 1, 2, 1]
    """
    for of in stretches:
        first = of.start
        while first < of.stop:
            size = min(longest - first % longest, of.stop - first)
            yield size, of
            first += size


def element_address(run: torch.Tensor, flat: torch.Tensor, whole: torch.Tensor) -> int:
    """Where the elements of `run`, a view of `flat`, are in `whole`, which is as long as `flat`."""
    return whole.data_ptr() + (run.data_ptr() - flat.data_ptr()) // flat.element_size() * whole.element_size()


def set_param_state(
    optimizer: torch.optim.Optimizer,
    run: ShardParam,
    elementwise: dict[str, torch.Tensor],
    scalars: ScalarValues,
    others: ScalarValuesByParam,
) -> None:
    """Give the optimizer these states of `run`, or none, as `OptimizerShard.prepare` says."""
    optimizer.state.pop(run, None)
    state: dict[str, Any] = elementwise | make_scalar_states(optimizer, run, others.get(id(run), scalars))
    if state and not run.has_no_state:
        optimizer.state[run] = state


def isolate_tensors(
    stretches: Sequence[ParamRun], tensors: Sequence[TensorExtent], names: Collection[str]
) -> list[ParamRun]:
    """`stretches`, in which each of `tensors` (in order, without gaps between them) that is named has one of its own.

    >>> tensors = [TensorExtent(0, 4, "a"), TensorExtent(4, 7, "b"), TensorExtent(7, 9, "c"), TensorExtent(9, 12, "d")]
    >>> [each[:2] + each[3:] for each in isolate_tensors([ParamRun(0, 9, True, "a"), ParamRun(9, 12, False, "d")], tensors, {"b", "d"})]
    [(0, 4, 'a', False), (4, 7, 'b', True), (7, 9, 'c', False), (9, 12, 'd', True)]
    """
    found: list[ParamRun] = []
    for old in stretches:
        inside = [each for each in tensors if each.start < old.stop and each.stop > old.start]
        for name, alike in groupby(inside, key=lambda each: each.name if each.name in names else ""):
            parts = list(alike)
            start, stop = max(parts[0].start, old.start), min(parts[-1].stop, old.stop)
            found.append(ParamRun(start, stop, old.is_matrix, parts[0].name, old.isolated or bool(name)))
    return found


def replace_params(
    optimizer: torch.optim.Optimizer, before: Sequence[ShardParam], after: Sequence[ShardParam]
) -> list[ShardParam]:
    """Give the optimizer, and those that it is made of, the runs `after` in the places of those `before`, which they
    are parts of, with their states. Those
    that are single are returned."""
    news = iter(after)
    parts: dict[int, list[ShardParam]] = {}
    for old in before:
        parts[id(old)] = new = [next(news)]
        while sum(each.numel() for each in new) < old.numel():
            new.append(next(news))
    for one in nested_optimizers(optimizer):
        for old in before:
            held = one.state.pop(old, None)
            if held is not None:
                one.state.update(
                    zip(parts[id(old)], _split_state(held, old, [each.numel() for each in parts[id(old)]]), strict=True)
                )
        for group in one.param_groups:
            group["params"] = [new for old in group["params"] for new in parts.get(id(old), [old])]
    return [run for run in after if run.isolated]


def _split_state(held: dict[str, Any], old: ShardParam, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """The states `held` of a run, of its parts of these sizes: views of those with an element for each weight, copies
    of all others."""
    split = {key: value.split(sizes) for key, value in held.items() if is_elementwise(value, old)}
    for at in range(len(sizes)):
        yield {key: split[key][at] if key in split else deepcopy(value) for key, value in held.items()}


def nested_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer and those that it holds as attributes, or in lists of attributes."""
    found: list[torch.optim.Optimizer] = []
    left: list[Any] = [optimizer]
    while left:
        each = left.pop()
        if isinstance(each, torch.optim.Optimizer) and all(each is not other for other in found):
            found.append(each)
            left += [
                part
                for value in vars(each).values()
                for part in (value if isinstance(value, list | tuple) else [value])
            ]
    return found
