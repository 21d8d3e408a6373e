"""Stores the printed answers of `meshwright plan` in the user's cache folder, so that the same question is answered
without a second search.

The name of an answer is a digest of everything that the answer depends on: the job (model, cluster, workload, pins),
the options, the language, the width of the terminal, and the code. The digest of the code covers the name, size and
time of every file of the package, so an edit or another version makes all earlier answers unreachable. At most
MAX_ANSWERS answers are stored; the oldest are removed first.

Guarantees: an answer from the cache has the same bytes as the answer of the first search. A damaged, unreadable or
foreign file counts as no answer. A cache folder that is not writable is no error. If the environment variable
MESHWRIGHT_ANSWERS is 0, answers are neither read nor stored.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import xxhash

from meshwright.core.files import cache_folder
from meshwright.core.storage import list_names, make_folder, read_text, remove_if_possible, replace_file
from meshwright.core.version import __version__

ANSWERS_ENV = "MESHWRIGHT_ANSWERS"
MAX_ANSWERS = 200
"""Maximum number of stored answers, of about 5 KB each."""


class CachedAnswer(NamedTuple):
    """What a command printed on standard output, the best plan as JSON text, and the day of the search."""

    output: str
    plan: str
    day: str


def answer_key(*parts: str) -> str | None:
    """Returns the name of the answer to the question that `parts` describe, or None if answers are not stored."""
    if os.environ.get(ANSWERS_ENV) == "0":
        return None
    return xxhash.xxh3_128_hexdigest("\0".join((__version__, _code_digest(), *parts)).encode())


def _code_digest() -> str:
    """Returns a digest of the names, sizes and times of the files of this package."""
    rows, folders = [], [str(Path(__file__).parents[1])]
    while folders:
        with os.scandir(folders.pop()) as found:
            for entry in found:
                if entry.is_dir():
                    folders += [entry.path] if entry.name != "__pycache__" else []
                else:
                    state = entry.stat()
                    rows.append(f"{entry.path} {state.st_size} {state.st_mtime_ns}")
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(rows)).encode())


def _answer_folder() -> Path:
    return cache_folder() / "answers"


def load_answer(key: str | None) -> CachedAnswer | None:
    """Returns the stored answer with the name `key`, or None if there is none that can be read."""
    if key is None:
        return None
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = CachedAnswer(**json.loads(read_text(_answer_folder() / f"{key}.json") or "{}"))
        return found if all(isinstance(field, str) for field in found) else None
    return None


def save_answer(key: str | None, output: str, plan: str) -> CachedAnswer:
    """Stores an answer under the name `key`, and removes the oldest answers. Returns the answer."""
    answer = CachedAnswer(output, plan, datetime.now(UTC).strftime("%Y-%m-%d"))
    if key is None:
        return answer
    with contextlib.suppress(OSError):
        folder = _answer_folder()
        make_folder(folder)
        replace_file(folder / f"{key}.json", json.dumps(answer._asdict()), private=True)
        paths = [folder / name for name in list_names(folder)]
        for path in sorted(paths, key=_time_of)[:-MAX_ANSWERS]:
            remove_if_possible(path)
    return answer


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class PrintedAnswer(io.StringIO):
    """A text buffer that reports whether standard output is a terminal, so that lines have the terminal's width."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        """Returns whether standard output is a terminal."""
        return self._terminal


@contextlib.contextmanager
def recorded_output() -> Iterator[io.StringIO]:
    """Collects what is printed on standard output inside the context. Nothing is printed."""
    output = PrintedAnswer(sys.stdout.isatty())
    with contextlib.redirect_stdout(output):
        yield output
