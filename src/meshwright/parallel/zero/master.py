"""What the optimizer updates of a flat unit: the own run of its weights, or a float32 copy of it, and the optimizer's states beside it.

An optimizer passes over its parameters once for each of its operations. 18 million elements of torch's AdamW took 92 ms as one tensor on one
thread and 27 ms in runs that stay in the cache, so on a CPU the optimizer is given such runs; an accelerator gets one tensor, one launch.
A run holds either matrices or vectors (biases, norms), and tensors of one group alone (update/groups.py), so that a rule can treat them apart. States with an element for each weight lie whole
here, the optimizer holds views of them: what a checkpoint writes does not know of runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from meshwright.parallel.update.whole import WholeUnit

RUN = 1 << 17
"""Elements that an optimizer updates at a time on a CPU."""

WINDOW = 4 * RUN
"""Elements that are updated between two looks at what an update needs besides: 2 MiB of each kind of float32 state."""


class Run(nn.Parameter):
    """A flat parameter that the optimizer is given. `is_matrix`: it holds elements of tensors of two or more dimensions. `path`: one of these; all
    are of its group."""

    is_matrix: bool
    path: str

    def __new__(cls, data: torch.Tensor, is_matrix: bool, path: str = "") -> Run:
        made = super().__new__(cls, data)
        made.is_matrix, made.path = is_matrix, path
        return made


class Stretch(NamedTuple):
    """Elements `start` to `stop` are of tensors of one kind and group, the first of which is `path`."""

    start: int
    stop: int
    is_matrix: bool
    path: str

    def of(self, first: int, last: int) -> Stretch:
        """What of it lies from `first` to `last`, counted from there."""
        return self._replace(start=max(self.start, first) - first, stop=min(self.stop, last) - first)


class Window(NamedTuple):
    """A few runs, and which elements of the whole they are."""

    runs: slice
    elements: slice


EVERYTHING = Window(slice(None), slice(None))


def runs_of(flat: torch.Tensor, stretches: Sequence[Stretch]) -> list[Run]:
    """Views of `flat`, which `stretches` cover, for an optimizer."""
    longest = RUN if flat.device.type == "cpu" else max(flat.numel(), 1)
    cuts = list(_cuts(stretches, longest)) or [(flat.numel(), Stretch(0, 0, True, ""))]
    parts = flat.split([size for size, _ in cuts])
    return [Run(part, of.is_matrix, of.path) for part, (_, of) in zip(parts, cuts, strict=True)]


class Master:
    """`flat` is the whole tensor, `runs` are views of it."""

    tensors: WholeUnit | None = None
    """What the optimizer is given instead of runs, where it needs whole tensors."""

    def __init__(self, flat: torch.Tensor, stretches: Sequence[Stretch]) -> None:
        self._flat, self.runs = flat, runs_of(flat, stretches)
        self._states: dict[str, torch.Tensor] = {}
        self.computed = flat.dtype
        """The type of an update."""
        self._kept = 0
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
        return flat.split([run.numel() for run in self.runs[some]])

    def loaded(self) -> None:
        """After `states` were written from outside."""

    def state_bytes(self) -> int:
        """Held for states beside the optimizer's own."""
        return 0

    def bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    # --- gradients ------------------------------------------------------------------------------------------------------------

    def give(self, gradient: torch.Tensor, some: slice = slice(None)) -> None:
        """The optimizer's next step uses `gradient`, which is that of `some` runs."""
        for run, part in zip(self.runs[some], self._split(gradient, some), strict=True):
            run.grad = part

    def take_back(self, some: slice = slice(None)) -> None:
        for run in self.runs[some]:
            run.grad = None

    # --- a few runs at a time ---------------------------------------------------------------------------------------------------

    def few_at_a_time(self) -> Iterator[Window]:
        """All runs, some at a time; an accelerator updates them at once."""
        longest = WINDOW if self.flat.device.type == "cpu" else max(self.flat.numel(), 1)
        first = start = end = 0
        for at, run in enumerate(self.runs, 1):
            end += run.numel()
            if end % longest == 0 or at == len(self.runs):
                yield Window(slice(first, at), slice(start, end))
                first, start = at, end

    def widen(self, optimizer: torch.optim.Optimizer, step: int, window: Window) -> None:
        """Before the optimizer updates the window in step number `step`."""

    def narrow(self, optimizer: torch.optim.Optimizer, window: Window) -> None:
        """After it: states that it has made are laid together."""
        if window.elements.stop > self._kept:
            self.lay(optimizer, window)
            self._kept = window.elements.stop

    # --- states ---------------------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step: states that the optimizer made in its first one are laid together."""
        if not self._states:
            self.states(optimizer)

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """By name, each as long as `flat`. The optimizer's own become views of them, where they are not yet."""
        if not self._lie_together(optimizer):
            self.lay(optimizer)
        return self._states

    def lay(self, optimizer: torch.optim.Optimizer, some: Window = EVERYTHING) -> None:
        """The optimizer's states of `some` runs become views of those that lie whole here."""
        for key, first in sorted(optimizer.state.get(self.runs[0], {}).items()):
            if is_elementwise(first, self.runs[0]):
                if key not in self._states:
                    self._states[key] = torch.empty_like(self.flat, dtype=first.dtype)
                for run, view in zip(self.runs[some.runs], self._split(self._states[key][some.elements], some.runs), strict=True):
                    held = optimizer.state[run]
                    if held[key].data_ptr() != view.data_ptr():
                        held[key] = view.copy_(held[key])

    def _lie_together(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's states are the views of ours, which is looked at in every step: without making them, and by the first and
        the last run, between which all are laid alike."""
        for key, first in optimizer.state.get(self.runs[0], {}).items():
            if not is_elementwise(first, self.runs[0]):
                continue
            if key not in self._states:
                return False
            at, last = self._states[key].data_ptr(), optimizer.state.get(self.runs[-1], {}).get(key)
            end = at + (self.flat.numel() - self.runs[-1].numel()) * first.element_size()
            if last is None or (first.data_ptr(), last.data_ptr()) != (at, end):
                return False
        return True

    def scalars(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, float]]:
        """States that have one number for all weights, such as the count of steps."""
        for key, value in optimizer.state.get(self.runs[0], {}).items():
            if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, self.runs[0]):
                yield key, float(value)

    def prepare(self, optimizer: torch.optim.Optimizer, kinds: dict[str, str], scalars: dict[str, float]) -> None:
        """Empty states of these types, and these scalars, ready to be filled by loading."""
        self._states = {key: torch.zeros_like(self.flat, dtype=getattr(torch, kind)) for key, kind in kinds.items()}
        parts = {key: self._split(whole) for key, whole in self._states.items()}
        for at, run in enumerate(self.runs):
            state: dict[str, Any] = {key: views[at] for key, views in parts.items()}
            state |= scalars_of(optimizer, run, scalars)
            if state:
                optimizer.state[run] = state


class Parted(Master):
    """Of weights that nobody updates, which lie in several places."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        super().__init__(parts[0], ())
        self._parts = parts

    @property
    def parts(self) -> list[torch.Tensor]:
        return self._parts


def _cuts(stretches: Sequence[Stretch], longest: int) -> Iterator[tuple[int, Stretch]]:
    """Sizes of runs and what they are of. Runs also end at each multiple of `longest`: whoever takes some of them at a time has the same.

    >>> [size for size, _ in _cuts([Stretch(0, 4, True, "a"), Stretch(4, 7, False, "b"), Stretch(7, 10, True, "c")], 3)]
    [3, 1, 2, 1, 2, 1]
    """
    for of in stretches:
        first = of.start
        while first < of.stop:
            size = min(longest - first % longest, of.stop - first)
            yield size, of
            first += size


def scalars_of(optimizer: torch.optim.Optimizer, run: torch.Tensor, scalars: dict[str, float]) -> dict[str, torch.Tensor]:
    """One number each, where the update of `run` reads it."""
    group = (
        {} if run.device.type == "cpu" else next(group for group in optimizer.param_groups if any(each is run for each in group["params"]))
    )
    return {key: torch.tensor(value, dtype=torch.float32, device=scalar_device(key, group, run.device)) for key, value in scalars.items()}


def scalar_device(key: str, group: dict[str, Any], device: torch.device) -> torch.device:
    """Where torch's rules hold a number of weights on `device` (`Optimizer.load_state_dict` lays it there too): the count of steps on the host,
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
