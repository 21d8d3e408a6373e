"""Repeats an operation of the system that may fail for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def retry_os_error(
    do: Callable[[], ResultT], pauses: Iterable[float], failed: Callable[[OSError], None] = lambda error: None
) -> ResultT:
    """Returns `do()`. After an OSError, `failed` receives it, and `do` is called again after the next of `pauses`, in
    seconds.

    Raises: the OSError of the call after the last pause.

    >>> answers = iter([OSError("busy"), 5])
    >>> def ask():
    ...     if isinstance(answer := next(answers), OSError):
    ...         raise answer
    ...     return answer
    >>> retry_os_error(ask, [0.0])
    5
    """
    for pause in pauses:
        try:
            return do()
        except OSError as error:
            failed(error)
            time.sleep(pause)
    return do()
