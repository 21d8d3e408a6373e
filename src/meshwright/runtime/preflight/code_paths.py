"""Records the code paths of models whose Python code reads tensor values: `if x.norm() < c`, `.item()`, `.tolist()`,
`nonzero`, numpy. The records are used by the preflight checks, and by proofs, which compare a training step with one
device (train/proof/).

In a later step such code may take a branch that no checked step has taken. During checks and proofs, all calls of torch
functions in every forward and in the loss are recorded. For each call, the record contains the call site in the user's
code, and which of the arguments that are Python numbers are zero. If the user's code reads tensor values, training
passes are recorded too. If a training pass has a new set of call sites, the checks run again with the micro-batch of
this pass, before the weights are updated. If a call site is then still unchecked, the plan is refused.

The record is a set of call sites without their order. So a loop over the experts that have tokens gives the same record
for any number of such experts. Zeros are recorded because a factor of 0 hides the value that it multiplies.

If the code reads no tensor values, training steps have no extra cost. Otherwise each call of a torch function in the
forward costs some microseconds. Passes of compiled blocks are not recorded.
"""

from __future__ import annotations

import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from meshwright.analysis.dataflow import VALUE_EXTRACTING_OPS

MODELS = "meshwright.models."
"""Prefix of this project's own models, whose code counts as users' code."""
NUMBERS = (bool, int, float)


class CallSite(NamedTuple):
    """A call site of a torch function in the user's code. `code`: the `id` of the code object. `at`: the position in
    the bytecode. `zeros`: for each argument that is a Python number, whether the number is zero, or the number itself
    (train/step/row_counts.py)."""

    code: int
    at: int
    zeros: tuple[float, ...]


Path = frozenset[CallSite]
StagePath = tuple[int, int, int]
"""A stage, and checksums of a path and of the numbers that it computes with, which are equal on all ranks."""
ARITHMETIC = frozenset({"mul", "add", "sub", "rsub", "div", "rdiv", "truediv", "pow", "rpow", "lerp", "where", "clamp"})
"""Functions whose plain numbers are recorded, also the operators with these names between underscores."""


class CodePaths:
    """Records the code paths of one rank.

    `asks`: whether the user's code reads tensor values. `learns`: whether a check or a proof is running. `known`: the
    stage and the set of call sites of each checked pass.
    """

    def __init__(self) -> None:
        self.asks = False
        self.learns = False
        self.known: set[tuple[int, Path]] = set()
        self.places: set[CallSite] = set()
        """Call sites that a check has reached."""
        self._taken: list[tuple[int, int, Path]] = []
        """For each pass of this step: the `id` of the micro-batch, the stage, and the set of call sites."""
        self._numbers: list[frozenset[Any]] = []
        """For each pass of this step: the plain numbers that it computes with, by call site."""
        self._codes: dict[int, tuple[CodeType, int]] = {}
        """Maps the `id` of each code object to the object and its owner (USERS, LAYERS or OURS)."""
        self._checksums: dict[Path, int] = {}

    def begin_step(self) -> None:
        """Discards the recorded passes of the previous step, except during a check or a proof."""
        if not self.learns:  # during a proof, the passes of the training step must stay recorded
            self._taken, self._numbers = [], []

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Records the passes inside the context as checked."""
        before, self.learns = self.learns, True
        try:
            yield
        finally:
            self.learns = before

    def recorded(self, stage: int, batch: object, compiles: bool) -> AbstractContextManager[Any]:
        """Records one pass of `stage` inside the context if a check or a proof is running. Otherwise records it only if
        the user's code reads tensor values and blocks are not compiled. `compiles`: whether blocks are compiled."""
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
                self._numbers.append(frozenset(recorder.numbers))

    def taken(self, batches: Sequence[Any]) -> dict[StagePath, int]:
        """Maps each path of this step to the index in `batches` of a micro-batch that took it. It is empty if the
        user's code reads no tensor values."""
        index = {id(batch): at for at, batch in enumerate(batches)}
        found: dict[StagePath, int] = {}
        for (batch, stage, path), numbers in zip(self._taken, self._numbers, strict=True) if self.asks else ():
            if path not in self._checksums:
                self._checksums[path] = self._checksum(path)
            found.setdefault((stage, self._checksums[path], self._checksum(numbers)), index.get(batch, 0))
        return found

    def _checksum(self, places: Iterable[Any]) -> int:
        """Returns a checksum of tuples that begin with the `id` of a code object and a position in it."""
        codes = [(self._codes[code][0], rest) for code, *rest in places]
        return zlib.crc32(repr(sorted((code.co_filename, code.co_firstlineno, rest) for code, rest in codes)).encode())

    def unknown(self, batches: Sequence[Any]) -> tuple[str, int]:
        """Finds a pass of this step whose set of call sites no checked pass of the same stage had. Returns one of its
        call sites ('file:line'), and the index of its micro-batch in `batches`. Returns ('', -1) if there is no such
        pass."""
        for batch, stage, path in self._taken:
            if (stage, path) not in self.known:
                new = path - self.places or path
                return describe_path(self._codes, new), next(
                    (at for at, each in enumerate(batches) if id(each) == batch), 0
                )
        return "", -1

    def unrepeated(self) -> str:
        """Returns a call site of this step ('file:line') that no check has reached, or '' if there is none."""
        new = {place for _, _, path in self._taken for place in path} - self.places
        return describe_path(self._codes, frozenset(new)) if new else ""

    def accept(self) -> None:
        """Marks the passes of this step as checked."""
        self.known |= {(stage, path) for _, stage, path in self._taken}


USERS, LAYERS, OURS = range(3)
LAYERS_OF = ("torch.", "meshwright.runtime.tensor_parallel.")
"""Name prefixes of modules whose functions count as part of their caller (LAYERS): torch, and the layers that replace
torch's layers under tensor parallelism. All other code of this project counts as OURS, except `MODELS`."""


IGNORED_FUNCTIONS = frozenset({"__get__", "_set_grad_enabled"})
"""Functions that do not describe a code path: the accessors of properties such as the shape, and what restores the
gradient mode, whose argument depends on whether the pass has a backward."""


class Recorder(TorchFunctionMode):
    """Records the call sites of one pass. `codes` caches the owner of each code object. `shapes`: for each call site,
    the shapes of the results of each call."""

    def __init__(self, codes: dict[int, tuple[CodeType, int]], records_shapes: bool = False) -> None:
        super().__init__()
        self.records_shapes = records_shapes
        self.codes, self.places, self.asks = codes, set[CallSite](), False
        self.numbers = set[tuple[int, int, tuple[float, ...]]]()
        self.shapes: dict[tuple[int, int], list[list[torch.Size]]] = {}

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in IGNORED_FUNCTIONS:
            return function(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while (owner := self._owner(frame)) == LAYERS and frame.f_back is not None:
            frame = frame.f_back
        if owner == USERS:
            given = (*args, *kwargs.values()) if kwargs else args
            numbers = tuple(each for each in given if type(each) in NUMBERS)
            self.places.add(CallSite(id(frame.f_code), frame.f_lasti, tuple(not each for each in numbers)))
            if numbers and name.strip("_") in ARITHMETIC:
                self.numbers.add((id(frame.f_code), frame.f_lasti, numbers))
            self.asks |= name in VALUE_EXTRACTING_OPS or (name == "where" and len(given) == 1)
        result = function(*args, **(kwargs or {}))
        if self.records_shapes and owner == USERS:
            results = result if isinstance(result, tuple | list) else (result,)
            shapes = [each.shape for each in results if isinstance(each, torch.Tensor)]
            self.shapes.setdefault((id(frame.f_code), frame.f_lasti), []).append(shapes)
        return result

    def _owner(self, frame: Any) -> int:
        known = self.codes.get(id(frame.f_code))
        if known is None:
            known = self.codes[id(frame.f_code)] = (frame.f_code, owner_of(frame))
        return known[1]


def owner_of(frame: Any) -> int:
    """Returns the owner of the code of a frame: USERS, LAYERS or OURS."""
    name = f"{frame.f_globals.get('__name__', '')}."
    ours = name.startswith("meshwright.") and not name.startswith(MODELS)
    return LAYERS if name.startswith(LAYERS_OF) else OURS if ours else USERS


MODE_METHODS = frozenset({"__torch_function__", "__torch_dispatch__"})


def in_users_code(error: BaseException, of_torch: bool = False) -> bool:
    """Returns whether a call of the user's code raised `error`. Calls of torch functions pass through modes of this
    project, which do not count. `of_torch`: whether a torch function must have raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    passing = [frame.f_code.co_name in MODE_METHODS or owner_of(frame) == LAYERS for frame in frames]
    last = next((frame for frame, passes in zip(reversed(frames), reversed(passing), strict=True) if not passes), None)
    return last is not None and owner_of(last) == USERS and (passing[-1] or not of_torch)


def describe_path(codes: Mapping[int, tuple[CodeType, int]], places: Path) -> str:
    """Returns the file and line of one of the call sites `places`: the first in order of file and line. `codes` is the
    cache of the recorder.

    >>> describe_path({}, frozenset())
    "the user's code"
    """
    found = [(codes[place.code][0], place.at) for place in places if place.code in codes]
    shown = sorted((code.co_filename.rpartition("/")[2], line_of(code, at)) for code, at in found)
    return f"{shown[0][0]}:{shown[0][1]}" if shown else "the user's code"


def line_of(code: CodeType, at: int) -> int:
    """Returns the source line of the instruction at bytecode position `at`.

    >>> line_of(compile("1\\n2", "", "exec"), 0) in (0, 1)
    True
    """
    return next(
        (line for start, stop, line in code.co_lines() if start <= at < stop and line is not None), code.co_firstlineno
    )
