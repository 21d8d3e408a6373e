"""One record a step for the whole world: seconds of the slowest rank, bytes of the fullest, and what the ranks agree to do next.

One small reduction a step carries all of it, the wish to stop included: so every rank stops after the same step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.base.appending import Lines
from meshwright.base.storage import StorageFailed, failure, read_file
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.exchange.group import Group
from meshwright.spec.record import LAST, RECORDS, StepRecord, last_step
from meshwright.train.straggler import Phases

Say = Callable[[str], None]


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

    A full disk costs the run nothing: it is said, and the records wait in memory until there is room.
    """

    def __init__(self, folder: Path, tensorboard: bool, say: Say) -> None:
        self.say = say
        self._waits_since = 0
        """The first step whose record waits for room; 0 where none does."""
        self.last = last_reported(folder)
        self._lines = Lines(folder / RECORDS)
        self._writer: Any = None
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            with contextlib.suppress(OSError):  # what has no room for events has none for the next record, which says so
                self._writer = SummaryWriter(str(folder / "tb"))

    def write(self, record: StepRecord) -> None:
        error = self._lines.append(json.dumps(record.model_dump(exclude_none=True), separators=(",", ":")))
        if error is not None and not self._waits_since:
            self.say(f"records wait in memory from step {record.step} on: {failure(error)}; training goes on")
        elif error is None and self._waits_since:
            self.say(f"the records from step {self._waits_since} on are written")
        self._waits_since = (self._waits_since or record.step) if error is not None else 0
        if self._writer is not None:
            with contextlib.suppress(OSError):  # what has no room for a record has none for events
                self._events(record)

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
        error = self._lines.close()
        if error is not None:
            self.say(f"{self._lines.lost} records from step {self._waits_since} on are lost: {failure(error)}")
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()


def last_reported(folder: Path) -> int:
    """The last step that the records of a run folder have; -1 where there is none. Raises StorageFailed where nobody can tell."""
    try:
        return last_step(read_file(folder / RECORDS, -LAST, links=True))
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise StorageFailed(failure(error)) from None
