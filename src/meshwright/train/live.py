"""A person's own code by its name, `package.module:function`, from the folder of the command or installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.base.errors import InputError, did_you_mean


def live(name: str, what: str) -> Callable[..., Any]:
    """The function. Raises InputError, which says `what` it is of, where there is none."""
    module_name, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise InputError(f"{what} {name!r}: there is no module {error.name!r} here or installed") from None
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None:
        raise InputError(f"{what} {name!r}: module {module_name!r} has no {function!r}{did_you_mean(function, vars(module))}")
    return found
