"""A folder of checkpoints: which are there, which is the newest valid one, and which may go.

[Note: newest] A folder `step-N` is complete by construction (it got its name last). Newest is the one saved last, by
the `serial` in its manifest,
not the one of the highest step: a run that went back and took another way saves lower steps later. `latest` names it
for people and
other tools; nothing here trusts it. A folder `step-N.replaced.ID` is the old save of a step whose new save was cut
short.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.manifest import (
    MANIFEST_FILE,
    STEP_FOLDER_PATTERN,
    CorruptCheckpoint,
    parse_step,
    read_manifest,
)
from meshwright.checkpoint.verify import verify_checkpoint as problems_of
from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.printable_text import escape_terminal_controls

_SERIAL_PATTERN = re.compile(rb'"step":(\d{1,19}),"serial":(\d{1,19}),')


def list_checkpoints(folder: Path | str) -> list[Path]:
    """The checkpoints of `folder`, newest first ([Note: newest]); before them, highest step first, those whose place
    nobody can tell."""
    return list(_checkpoint_serials(Path(folder)))


def _checkpoint_serials(folder: Path) -> dict[Path, int | None]:
    """`checkpoints`, each with its serial as far as it can be read."""
    try:
        found = [
            folder / name
            for name in storage.list_names(folder)
            if STEP_FOLDER_PATTERN.fullmatch(name) and _may_be_checkpoint(folder / name)
        ]
    except NotADirectoryError:
        return {}
    except OSError as error:
        raise storage.StorageFailed(storage.describe_failure(error, folder)) from None
    serials = {path: _read_serial(path) for path in found}
    ordered = sorted(
        found, key=lambda path: (serials[path] is None, serials[path] or 0, parse_step(path) or 0), reverse=True
    )
    return {path: serials[path] for path in ordered}


def _may_be_checkpoint(path: Path) -> bool:
    """Whether `path` is a folder, or something of which the disk does not say what it is: then reading it says more."""
    try:
        return storage.is_folder(path)
    except OSError:
        return True


def _read_serial(path: Path) -> int | None:
    """The serial as the manifest's first lines say it. For order alone: nothing is trusted by it."""
    try:
        match = _SERIAL_PATTERN.search(storage.read_file(path / MANIFEST_FILE, most=512))
    except OSError:
        return None
    return int(match[2]) if match and int(match[1]) == parse_step(path) else None


def next_serial(folder: Path) -> int:
    """Above that of every checkpoint there, those included whose own cannot be read."""
    serials = list(_checkpoint_serials(folder).values())
    return 1 + max((serial or 0 for serial in serials), default=0) + serials.count(None)


def newest_checkpoint(folder: Path | str, verify: bool = True, say: Callable[[str], None] | None = None) -> Path | None:
    """The newest valid checkpoint, or None when `folder` has none at all. `verify` False trusts the data and checks the
    manifest alone.

    Each damaged one passed over is a sentence to `say` (default: a logged warning). Raises Damaged when there are some
    and none is valid:
    a run must not begin anew in silence.
    """
    say = _warning_function(say)
    found = _checkpoint_serials(Path(folder))
    first = ""
    valid: list[Path] = []
    for path, serial in found.items():
        problem = _first_problem(path, verify)
        if problem is None:
            valid.append(path)
            if serial is not None:
                break  # else its place could not be read before: it may be older than the next one
        else:
            first = first or problem
            say(f"checkpoint {path.name} is passed over: {problem}")
    if valid:
        return max(valid, key=lambda path: _read_serial(path) or 0)
    if found:
        raise CorruptCheckpoint(
            f"none of the {len(found)} checkpoints in {str(folder)!r} is valid: {first}; restore one, or begin anew in another folder"
        )
    return None


def _warning_function(say: Callable[[str], None] | None) -> Callable[[str], None]:
    return (
        (lambda line: logging.getLogger("meshwright.checkpoint").warning("%s", escape_terminal_controls(line)))
        if say is None
        else say
    )


def newest_checkpoint_until(folder: Path | str, step: int) -> Path | None:
    """The newest valid checkpoint of at most `step`."""
    return next(
        (
            path
            for path in list_checkpoints(folder)
            if (parse_step(path) or 0) <= step and _first_problem(path, True) is None
        ),
        None,
    )


def _first_problem(path: Path, verify: bool) -> str | None:
    if verify:
        problems = problems_of(path)
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        return problems[0] + more if problems else None
    try:
        read_manifest(path)
    except InputError as error:
        return str(error)
    return None


def prune_checkpoints(
    folder: Path | str, keep: int, verified: Path | None = None, say: Callable[[str], None] | None = None
) -> list[Path]:
    """Removes all but the `keep` newest checkpoints and returns what went. The last valid one always stays, and
    so does one whose manifest is damaged: it is evidence, not a checkpoint. One that cannot be removed is a sentence to
    `say`
    (default: a logged warning) and no error: the checkpoint that was saved stands.

    Nothing goes before one that stays is known to be valid: `verified` (just saved, so read back), or else read for
    this.
    """
    if keep < 1:
        raise InputError(f"keep = {keep}: at least one checkpoint must stay")
    try:
        found = [path for path, serial in _checkpoint_serials(Path(folder)).items() if serial is not None]
    except storage.StorageFailed as error:
        _warning_function(say)(f"old checkpoints are not removed: {error}")
        return []
    kept, rest = found[:keep], found[keep:]
    if not rest:
        return []
    if verified not in kept and not any(_first_problem(path, True) is None for path in kept):
        valid = next((path for path in rest if _first_problem(path, True) is None), None)
        rest = [path for path in rest if path != valid] if valid else []
    gone = []
    for path in rest:
        left = storage.remove_if_possible(path)
        if left is None:
            gone.append(path)
        else:
            _warning_function(say)(
                f"checkpoint {path.name} is not needed any more and cannot be removed: {storage.describe_failure(left, path)}"
            )
    return gone
