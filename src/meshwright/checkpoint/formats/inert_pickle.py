"""Reads pickled data without executing code. Readers of checkpoints of other systems use it.

A pickle names classes and functions, which an ordinary reader imports and calls. This reader imports and calls nothing
that a pickle names. Each allowed name becomes a new empty class, whose objects only store what the pickle puts into
them (`PickledRecord`). Any other name is refused. `load_tensors` reads files of `torch.save` with the restricted reader
of torch (weights_only), which gets the same empty classes for the allowed names.

Sources: Python's `pickle` documentation, 'Restricting Globals'; `torch/_weights_only_unpickler.py`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

MAX_SHOWN_NAME = 100
READ_ERRORS = (
    pickle.UnpicklingError, ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError,
    MemoryError, OSError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile,
)  # fmt: skip
"""The exceptions that reading a damaged pickle raises."""


class PickledRecord:
    """An object of a pickle, as data. `kind` is the full name of its class, `values` are the arguments with which the
    pickle creates the object, and `fields` is the state that the pickle sets."""

    __slots__ = ("fields", "values")
    kind = ""
    values: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *values: Any) -> Self:
        """Stores the arguments. A pickle creates an object by a call of its class or by this method alone."""
        made = super().__new__(cls)
        made.values, made.fields = values, {}
        return made

    def __setstate__(self, state: Any) -> None:
        """Stores the state of the object. A state that is not a mapping is stored under the key 'state'."""
        self.fields = state if isinstance(state, dict) else {"state": state}

    def __hash__(self) -> int:
        return id(self)


def record_class(kind: str) -> type[PickledRecord]:
    """Returns a new empty class for the class or function `kind` of a pickle."""
    return type("PickledRecord", (PickledRecord,), {"kind": kind, "__slots__": ()})


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle of any protocol. The names `allowed` become records, any other name raises UnsafePickle."""

    def __init__(self, data: bytes, allowed: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> type[PickledRecord]:
        """Returns an empty class for an allowed name. Nothing is imported."""
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise UnsafePickle(full)
        return record_class(full)


class UnsafePickle(Exception):
    """Reports that a pickle names a class or function that is not allowed. Its argument is the name."""


def refuse_global(path: Path, name: str) -> NoReturn:
    """Raises the InputError for a pickle that names the disallowed class or function `name`."""
    raise InputError(
        Message(
            "{path} names {name}, which is not among the classes of such a checkpoint: the file is refused and nothing "
            "of it was executed; save the checkpoint again with tensors and numbers only, or export safetensors",
            path=path,
            name=name[:MAX_SHOWN_NAME],
        )
    )


def refuse_damaged(path: Path, error: Exception) -> NoReturn:
    """Raises the InputError for a file that cannot be read because of `error`."""
    reason = " ".join(str(error).split()) or type(error).__name__
    raise InputError(
        Message("{path} cannot be read: {reason}; the file is damaged or incomplete", path=path, reason=reason[:200])
    ) from None


def read_inert_pickle(path: Path, allowed: Collection[str]) -> Any:
    """Returns the data of the pickle file `path`, with a `PickledRecord` for each object of the classes `allowed`.

    Raises:
        InputError: the file is missing or damaged, or names another class or function. Nothing is executed.
    """
    try:
        return InertUnpickler(path.read_bytes(), allowed).load()
    except UnsafePickle as error:
        refuse_global(path, error.args[0])
    except READ_ERRORS as error:
        refuse_damaged(path, error)


def load_tensors(file: Path | IO[bytes], path: Path, allowed: re.Pattern[str] | None = None, mmap: bool = False) -> Any:
    """Returns the content of a file of `torch.save`, on the CPU. Objects whose full class name matches `allowed` become
    records.

    `path` is the file that messages name. With `mmap`, tensors are mapped from the file and read when they are used.

    Raises:
        InputError: the file is damaged or names another class or function. Nothing is executed.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if allowed is not None else []
        if not isinstance(file, Path):
            file.seek(0)
        stand_ins: list[Any] = [(record_class(name), name) for name in names if allowed and allowed.fullmatch(name)]
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols that it may refuse
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap or None)
    except READ_ERRORS as error:
        if (name := _first_unsafe_global(file, allowed)) is not None:
            refuse_global(path, name)
        refuse_damaged(path, ValueError(str(error).partition("WeightsUnpickler error: ")[2] or str(error)))


def _first_unsafe_global(file: Path | IO[bytes], allowed: re.Pattern[str] | None) -> str | None:
    """Returns the first name in the pickle of a file of `torch.save` that is not allowed, None if there is none."""
    safe = {"collections", "torch", "torch._utils", "torch._tensor", "torch.storage", "torch.nn.parameter",
            "torch.serialization", "_codecs"}  # fmt: skip
    try:
        with zipfile.ZipFile(file) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            words: list[str] = []
            for opcode, value, _ in pickletools.genops(archive.read(pickled)):
                if isinstance(value, str):
                    words.append(value)
                found = " ".join(words[-2:]) if opcode.name == "STACK_GLOBAL" else value
                if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
                    module, _, attribute = str(found).partition(" ")
                    full = f"{module}.{attribute}"
                    if module not in safe and not (allowed and allowed.fullmatch(full)):
                        return full
    except (StopIteration, *READ_ERRORS):
        return None
    return None
