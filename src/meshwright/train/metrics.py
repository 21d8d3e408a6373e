"""One record a step for the whole world: seconds of the slowest rank, bytes of the fullest, and what the ranks agree to do next.

One small reduction a step carries all of it, the wish to stop included: so every rank stops after the same step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.exchange.group import Group
from meshwright.spec.record import StepRecord
from meshwright.train.straggler import Phases

Say = Callable[[str], None]

RECORDS = "records.jsonl"

LAST = 1 << 16
"""Bytes at the end of the records in which the last one is looked for."""


class Agreed(NamedTuple):
    """What all ranks know after a step. `by_rank`: what each of them brought of its own."""

    record: StepRecord
    flags: Sequence[float]
    phases: Phases | None
    by_rank: Sequence[Sequence[float]]


def agree(record: StepRecord, flags: Sequence[float], group: Group | None, own: Sequence[float] = ()) -> Agreed:
    """`record` with the largest of each time and size over the ranks, the largest of each of `flags`, such as the wish to stop, and the phases
    and the `own` numbers (none below 0) of each rank. All ranks call it."""
    phases: Phases | None = None
    by_rank: Sequence[Sequence[float]] = [list(own)]
    if group is not None:
        kinds = [(name, kind) for name in ("memory", "exposed", "sent") for kind in sorted(getattr(record, name))]
        mine = [record.seconds, record.data_seconds, *flags, *(getattr(record, name)[kind] for name, kind in kinds)]
        each = 3 + len(own)
        largest = torch.zeros(len(mine) + each * group.size, dtype=torch.float64)
        waiting = sum(record.exposed.values())
        brought = [max(record.seconds - record.data_seconds - waiting, 0.0), record.data_seconds, waiting, *own]
        largest[: len(mine)] = torch.tensor(mine, dtype=torch.float64)
        place = len(mine) + each * group.index
        largest[place : place + each] = torch.tensor(brought, dtype=torch.float64)  # nobody else fills it: the largest is it
        all_reduce(largest, group, largest=True).wait()
        rows = largest[len(mine) :].view(-1, each).tolist()
        phases, by_rank = Phases(*zip(*(row[:3] for row in rows), strict=True)), [row[3:] for row in rows]
        seconds, data_seconds, *rest = largest[: len(mine)].tolist()
        flags, rest = rest[: len(flags)], rest[len(flags) :]
        most: dict[str, dict[str, float]] = {"memory": {}, "exposed": {}, "sent": {}}
        for (name, kind), value in zip(kinds, rest, strict=True):
            most[name][kind] = value
        record = record.model_copy(update={"seconds": seconds, "data_seconds": data_seconds, **most})
    return Agreed(record.model_copy(update={"tokens_per_second": record.tokens / record.seconds}), flags, phases, by_rank)


class Records:
    """RUN/records.jsonl, and TensorBoard events under RUN/tb where that is installed. Kept by rank 0.

    A full disk costs records, not the run: it is said once.
    """

    def __init__(self, folder: Path, tensorboard: bool, say: Say) -> None:
        self.say = say
        self._lost = False
        self._handle = os.open(folder / RECORDS, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._handle).st_size
        self.last = _last_step(os.pread(self._handle, LAST, max(0, size - LAST)))
        self._cut = bool(size) and os.pread(self._handle, 1, size - 1) != b"\n"  # by a kill in the middle of a line
        self._writer: Any = None
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            with contextlib.suppress(OSError):  # what has no room for events has none for the next record, which says so
                self._writer = SummaryWriter(str(folder / "tb"))

    def write(self, record: StepRecord) -> None:
        line = (json.dumps(record.model_dump(exclude_none=True), separators=(",", ":")) + "\n").encode()
        rest = b"\n" + line if self._cut else line  # what was cut off is a line of its own
        try:
            while rest:
                rest = rest[os.write(self._handle, rest) :]
                self._cut = bool(rest)
            if self._writer is not None:
                self._events(record)
        except OSError as error:
            if not self._lost:
                self.say(f"records are lost from step {record.step} on: {error.strerror}; training goes on")
            self._lost = True

    def _events(self, record: StepRecord) -> None:
        add = self._writer.add_scalar
        add("loss/train", record.loss, record.step)
        if record.held_out_loss is not None:
            add("loss/held out", record.held_out_loss, record.step)
        for name in ("gradient_norm", "lr", "seconds", "tokens_per_second", "loss_scale"):
            add(f"step/{name}", getattr(record, name), record.step)
        for kind, size in record.memory.items():
            add(f"memory/{kind}", size, record.step)

    def close(self) -> None:
        os.close(self._handle)
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()


def last_reported(folder: Path) -> int:
    """The last step that the records of a run folder have; -1 where there is none."""
    try:
        with (folder / RECORDS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST))
            return _last_step(file.read())
    except OSError:
        return -1


def _last_step(end: bytes) -> int:
    """The step of the last whole record in the end of a file; -1 where there is none.

    >>> _last_step(b'"x":1}\\n{"step":7,"loss":1.0}\\n{"step":8,"lo')
    7
    """
    for line in reversed(end.split(b"\n")):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1
