"""Lists the checkpoints of a folder, finds the newest valid checkpoint, and removes old checkpoints. The trainer uses
this file when it resumes and after each save.

[Note: newest] A folder `step-N` is complete, because a save gives the folder this name last. The newest checkpoint is
the one that was saved last. Its manifest has the largest `serial`, but not necessarily the highest step, because after
a rollback a run saves lower steps again. The file `latest` names the newest checkpoint for users and other tools.
Meshwright does not read this file. A folder `step-N.replaced.ID` is an earlier save of step N. It remains if a new save
of step N is interrupted.
"""

from __future__ import annotations

import contextlib
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
from meshwright.core.messages import Message
from meshwright.core.printable_text import escape_terminal_controls

_SERIAL_PATTERN = re.compile(rb'"step":(\d{1,19}),"serial":(\d{1,19}),')


def list_checkpoints(folder: Path | str) -> list[Path]:
    """Returns the checkpoints of `folder`, newest first ([Note: newest]).

    Checkpoints whose serial cannot be read come before all others, highest step first.
    """
    return list(_checkpoint_serials(Path(folder)))


def _checkpoint_serials(folder: Path) -> dict[Path, int | None]:
    """Returns the checkpoints of `folder` in the order of `list_checkpoints`, each with its serial. The serial is None
    if it cannot be read.
    """
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
    """Returns whether `path` is a folder. If the file system reports an error, returns True, because reading the folder
    will report the reason."""
    try:
        return storage.is_folder(path)
    except OSError:
        return True


def _read_serial(path: Path) -> int | None:
    """Returns the serial from the first bytes of the manifest. Returns None if they do not contain it, or if their step
    differs from that in the name of the folder. The manifest is not verified, so callers may use the serial only to
    order checkpoints.
    """
    try:
        match = _SERIAL_PATTERN.search(storage.read_file(path / MANIFEST_FILE, most=512))
    except OSError:
        return None
    return int(match[2]) if match and int(match[1]) == parse_step(path) else None


def next_serial(folder: Path) -> int:
    """Returns a serial above that of every checkpoint in `folder`. Each unreadable serial counts as one above the
    highest readable serial."""
    serials = list(_checkpoint_serials(folder).values())
    return 1 + max((serial or 0 for serial in serials), default=0) + serials.count(None)


def newest_checkpoint(folder: Path | str, verify: bool = True, say: Callable[[str], None] | None = None) -> Path | None:
    """Returns the newest valid checkpoint, None if `folder` has no checkpoint at all.

    `verify`: whether the data are checked, not only the manifest. `say` receives a message for each corrupt checkpoint
    that is skipped. By default the messages are logged as warnings.

    Raises:
        CorruptCheckpoint: there are checkpoints, but none is valid. A run must not silently start from step 0.
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
                break  # without a serial the age of a checkpoint is unknown, and the next one may be newer
        else:
            first = first or problem
            say(Message("checkpoint {path} is skipped: {problem}", path=path.name, problem=problem))
    if valid:
        return max(valid, key=lambda path: _read_serial(path) or 0)
    if found:
        raise CorruptCheckpoint(
            Message(
                "none of the {count} checkpoints in {folder!r} is valid: {first}; restore one, or begin anew in "
                "another folder",
                count=len(found),
                folder=str(folder),
                first=first,
            )
        )
    return None


def _warning_function(say: Callable[[str], None] | None) -> Callable[[str], None]:
    return (
        (lambda line: logging.getLogger("meshwright.checkpoint").warning("%s", escape_terminal_controls(line)))
        if say is None
        else say
    )


def newest_checkpoint_until(folder: Path | str, step: int) -> Path | None:
    """Returns the newest valid checkpoint whose step is at most `step`, None if there is no such checkpoint."""
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
        more = Message(" (and {count} more problems)", count=len(problems) - 1) if len(problems) > 1 else ""
        return problems[0] + more if problems else None
    try:
        read_manifest(path)
    except InputError as error:
        return str(error)
    return None


def prune_checkpoints(
    folder: Path | str, keep: int, verified: Path | None = None, say: Callable[[str], None] | None = None
) -> list[Path]:
    """Removes all but the `keep` newest checkpoints and then the leftovers of interrupted saves and removals. Returns
    the removed checkpoints. No other process may save into `folder` meanwhile.

    The newest valid checkpoint always remains. Checkpoints whose serial cannot be read also remain, as evidence of the
    fault. `say` receives a message for each checkpoint that cannot be removed (default: a logged warning). This is not
    an error, because the new checkpoint is already saved.

    Nothing is removed before a remaining checkpoint is known to be valid. `verified` is a checkpoint that was just
    saved and read back, and counts as valid. Without it, this function verifies checkpoints until one is valid.

    If the disk does not answer, this function waits for it. So the caller first reports that the checkpoint is saved.

    Raises:
        InputError: `keep` is less than 1.
    """
    if keep < 1:
        raise InputError(Message("keep = {keep}: at least one checkpoint must stay", keep=keep))
    try:
        found = [path for path, serial in _checkpoint_serials(Path(folder)).items() if serial is not None]
    except storage.StorageFailed as error:
        _warning_function(say)(Message("old checkpoints are not removed: {error}", error=error))
        return []
    removed = _remove_obsolete(found, keep, verified, _warning_function(say))
    with contextlib.suppress(OSError):  # the next removal finds the same leftovers
        storage.remove_leftovers(Path(folder))
    return removed


def _remove_obsolete(found: list[Path], keep: int, verified: Path | None, say: Callable[[str], None]) -> list[Path]:
    """Removes all but the first `keep` checkpoints of `found`, which is in the order of `list_checkpoints`. Returns the
    removed checkpoints. Arguments as for `prune_checkpoints`."""
    retained, rest = found[:keep], found[keep:]
    if not rest:
        return []
    if verified not in retained and not any(_first_problem(path, True) is None for path in retained):
        valid = next((path for path in rest if _first_problem(path, True) is None), None)
        rest = [path for path in rest if path != valid] if valid else []
    removed = []
    for path in rest:
        left = storage.remove_if_possible(path)
        if left is None:
            removed.append(path)
        else:
            say(
                Message(
                    "checkpoint {path} is not needed any more and cannot be removed: {failure}",
                    path=path.name,
                    failure=storage.describe_failure(left, path),
                )
            )
    return removed
