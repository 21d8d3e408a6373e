"""Records the code paths of models whose Python code reads tensor values: `if x.norm() < c`, `.item()`, `.tolist()`,
`nonzero`, numpy.

In a later step such code may take a branch that no checked step has taken. During checks and proofs, all calls of torch
functions in every forward and in the loss are recorded. A record contains the call site in the user's code, and which
plain number arguments of the call are zero. If the user's code reads tensor values, training passes are recorded too.
If a pass has a new set of call sites, the check runs again with its micro-batch before the step counts
(train/step/invariants.py). If a call site of the pass is still unchecked after that, it is refused.

The record is a set of call sites without their order. So a loop over the experts that have tokens gives the same record
for any number of these experts. Of a plain number only whether it is zero is recorded, because a factor of 0 hides what
it multiplies.

If no value is read, there is no cost. Otherwise the cost is some microseconds for each torch function of the forward.
Passes of compiled blocks are not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode

from meshwright.analysis.dataflow import VALUE_EXTRACTING_OPS

MODELS = "meshwright.models."
"""Prefix of this project's own models, whose code counts as users' code."""
NUMBERS = (bool, int, float)


class Place(NamedTuple):
    """A call site of a torch function in the user's code: the id of the code object (`code`), the position in its
    bytecode (`at`), and which plain number arguments are zero (`zeros`)."""

    code: int
    at: int
    zeros: tuple[bool, ...]


Path = frozenset[Place]


class CodePaths:
    """Records the code paths of one rank.

    `asks`: whether the user's code reads tensor values. `known`: the sets of call sites of checked passes, by stage.
    """

    def __init__(self) -> None:
        self.asks = False
        self.learns = False
        self.known: set[tuple[int, Path]] = set()
        self.places: set[Place] = set()
        """Call sites that a check has reached."""
        self._taken: list[tuple[int, int, Path]] = []
        """The passes of this step: the id of the micro-batch, the stage, and the set of call sites."""
        self._codes: dict[int, tuple[CodeType, int]] = {}
        """For the id of each code object: the object, and whose code it is (USERS, LAYERS or OURS)."""

    def begin_step(self) -> None:
        """Discards the passes of the previous step, except during a check."""
        if not self.learns:  # during a proof the passes of the step are kept
            self._taken = []

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Treats the passes inside the context as passes of a check."""
        before, self.learns = self.learns, True
        try:
            yield
        finally:
            self.learns = before

    def recorded(self, stage: int, batch: object, compiles: bool) -> AbstractContextManager[Any]:
        """Records one pass of `stage` inside the context, if the user's code reads tensor values or a check is
        running."""
        if not (self.learns or (self.asks and not compiles)):
            return nullcontext()
        return self._recorded(stage, batch)

    @contextmanager
    def _recorded(self, stage: int, batch: object) -> Iterator[None]:
        recorder = Recorder(self._codes)
        try:
            with recorder:
                yield
        finally:
            self.asks |= recorder.asks
            path = frozenset(recorder.places)
            if self.learns:
                self.known.add((stage, path))
                self.places |= path
            else:
                self._taken.append((id(batch), stage, path))

    def unknown(self, batches: Sequence[Any]) -> tuple[str, int]:
        """Returns a call site of a pass of this step that no check has run, and the index of the pass's micro-batch.
        Returns ('', -1) if all passes are known."""
        for batch, stage, path in self._taken:
            if (stage, path) not in self.known:
                new = path - self.places or path
                return self._shown(new), next((at for at, each in enumerate(batches) if id(each) == batch), 0)
        return "", -1

    def unrepeated(self) -> str:
        """Returns a call site of this step that no check has reached, '' if there is none."""
        new = {place for _, _, path in self._taken for place in path} - self.places
        return self._shown(frozenset(new)) if new else ""

    def accept(self) -> None:
        """Marks the passes of this step as checked."""
        self.known |= {(stage, path) for _, stage, path in self._taken}

    def _shown(self, places: Path) -> str:
        """Returns the file and line of the first of the call sites `places`.

        >>> CodePaths()._shown(frozenset())
        "the user's code"
        """
        found = [(self._codes[place.code][0], place.at) for place in places if place.code in self._codes]
        shown = sorted((code.co_filename.rpartition("/")[2], line_of(code, at)) for code, at in found)
        return f"{shown[0][0]}:{shown[0][1]}" if shown else "the user's code"


USERS, LAYERS, OURS = range(3)
LAYERS_OF = ("torch.", "meshwright.runtime.tensor_parallel.")
"""Modules whose functions count as part of their caller: the layers of torch, and the layers that replace them. All
other code of this project is not user code."""


class Recorder(TorchFunctionMode):
    """Records the call sites of one pass."""

    def __init__(self, codes: dict[int, tuple[CodeType, int]]) -> None:
        super().__init__()
        self.codes, self.places, self.asks = codes, set[Place](), False

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":  # the accessor of a property, such as the shape
            return function(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while (owner := self._owner(frame)) == LAYERS and frame.f_back is not None:
            frame = frame.f_back
        if owner == USERS:
            given = (*args, *kwargs.values()) if kwargs else args
            self.places.add(
                Place(id(frame.f_code), frame.f_lasti, tuple(not each for each in given if type(each) in NUMBERS))
            )
            self.asks |= name in VALUE_EXTRACTING_OPS or (name == "where" and len(given) == 1)
        return function(*args, **(kwargs or {}))

    def _owner(self, frame: Any) -> int:
        code = frame.f_code
        known = self.codes.get(id(code))
        if known is None:
            name = f"{frame.f_globals.get('__name__', '')}."
            ours = name.startswith("meshwright.") and not name.startswith(MODELS)
            known = self.codes[id(code)] = (code, LAYERS if name.startswith(LAYERS_OF) else OURS if ours else USERS)
        return known[1]


def line_of(code: CodeType, at: int) -> int:
    """Returns the source line of the instruction at bytecode position `at`.

    >>> line_of(compile("1\\n2", "", "exec"), 0) in (0, 1)
    True
    """
    return next(
        (line for start, stop, line in code.co_lines() if start <= at < stop and line is not None), code.co_firstlineno
    )
