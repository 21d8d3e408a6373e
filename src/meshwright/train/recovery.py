"""What a run keeps so that nothing is lost, and what it goes on from: copies in memory, then checkpoints on disk, newest and verified first.

The ladder: the newest step that all ranks have a good copy of in memory, unless a checkpoint is of a later one; the newest valid checkpoint of the run
folder; the model's own weights. A run whose folder says that it had begun never starts anew in silence: the checkpoints would be damaged, which is an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.base import storage
from meshwright.base.errors import InputError
from meshwright.base.pulse import Phase, Pulse, Word
from meshwright.base.slots import SEVERAL, SLOTS
from meshwright.checkpoint.folder import checkpoints, newest, newest_until, prune
from meshwright.checkpoint.manifest import Damaged, step_of
from meshwright.checkpoint.memory import Kept
from meshwright.checkpoint.save import Ranks, SaveFailed
from meshwright.data.sampler import batch_of
from meshwright.spec.event import EVENTS, events_of
from meshwright.spec.launch import Launch
from meshwright.spec.record import StepRecord
from meshwright.train import copies
from meshwright.train.keep import ranks_of
from meshwright.train.metrics import last_reported
from meshwright.train.rank import Channel
from meshwright.train.spikes import Guard
from meshwright.train.trainer import Trainer

FIRST = 10
"""The step after which `checkpoint_every: auto` saves first: a save must have been measured."""

WAIT = 10.0
"""Seconds that training waits for the checkpoint before, when the next one is due; then it goes on, and the next one follows at once when that one has ended."""

PAUSE = 1.0
"""Seconds before the last checkpoint is tried again; twice as many before each further try."""

AT_MOST = 0.1
"""Share of the time in which a checkpoint may be under way."""


class Recovery:
    """One rank's part of it. `identity` is what a checkpoint of this run must say of data and model."""

    def __init__(self, launch: Launch, channel: Channel, trainer: Trainer, pulse: Pulse, identity: dict[str, Any]) -> None:
        self.launch, self.channel, self.trainer, self.pulse, self.identity = launch, channel, trainer, pulse, identity
        self.folder = Path(launch.run.folder) / "checkpoints"
        self.source = ""
        self.saved = -1
        self.record: dict[str, Any] | None = None
        """Of the step that this rank went on from, where it is from memory."""
        self._said = self._busy = self._owed = False
        self._since = self._save_seconds = self._waited = 0.0
        self._steps = (0, 0.0, 0.0)
        """How many, their seconds, and those in which they stood for a copy."""
        self.guard = Guard(self.identity, launch.workload.spikes == "skip", trainer.scale.dynamic)
        memory, slots = channel.memory, SLOTS if channel.memory.beside else SEVERAL
        self.copies = copies.Copies(memory.own, trainer, pulse, identity, slots) if memory.own and launch.run.copies else None

    # --- going on -------------------------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """The steps done. `source` says where they come from: memory, disk, or nowhere."""
        kept = copies.newest(self.channel.memory.sources, ranks_of(self.trainer.mesh))
        if kept is not None and not self._is_passed(kept.step):
            self.source = "memory"
            self._fill(kept)
            self._forget()
            return self.trainer.steps
        chosen = newest(self.folder, say=self._note) if self.channel.rank == 0 else None
        path = ranks_of(self.trainer.mesh).share(str(chosen or ""))[0]
        if self.trainer.engine.unfilled and self.launch.model.folder:
            self.trainer.load_weights(self.launch.model.folder)
        if path:
            self.source = "disk"
            self._fill(Path(path))
            self.saved = self.trainer.steps
        elif not self.launch.run.anew:
            refuse_history(self.launch, ranks_of(self.trainer.mesh), self._note)
        self._forget()
        return self.trainer.steps

    def _is_passed(self, step: int) -> bool:
        """Whether the newest valid checkpoint is of a step behind this one: copies of later ones may have found no room. All ranks call it."""
        passed = False
        if self.channel.rank == 0 and any((step_of(path) or 0) > step for path in checkpoints(self.folder)):
            with contextlib.suppress(Damaged):
                found = newest(self.folder, say=self._note)
                passed = found is not None and (step_of(found) or 0) > step
        return ranks_of(self.trainer.mesh).share(str(passed))[0] == "True"

    def _forget(self) -> None:
        """Copies of steps that are to be run (again) are of another past than those to come."""
        if self.copies is not None:
            self.copies.memory.head.forget(after=self.trainer.steps)

    def _fill(self, source: Path | Kept) -> None:
        extra = self.trainer.load(source)
        data, self.record = extra["data"], extra.get("record")
        self.guard.read(extra.get("guard", {}))
        if data != self.identity["data"]:
            raise InputError(
                f"run {self.launch.run.folder!r} was trained on other data ({data[:8]}, now {self.identity['data'][:8]}): "
                "restore the files, or choose another --run"
            )

    def unreported(self, reported: int) -> StepRecord | None:
        """The record of the step that this rank has just gone on from, if a fault came before it was reported. All ranks call it; rank 0's
        `reported`, the last step that was, counts."""
        if self.record is None:
            return None
        last = int(ranks_of(self.trainer.mesh).share(str(reported))[0])
        return StepRecord(**self.record) if last < self.trainer.steps or last > self.trainer.steps + 1 else None  # it went back between

    def catch_up(self) -> None:
        """A save that was due at the step that this rank has just gone on from, and that a fault cut short. All ranks call it."""
        if self.source == "memory" and self.due(self.trainer.steps):
            there = str(bool(self.pulse.read(Word.busy)) or self.trainer.steps in map(step_of, checkpoints(self.folder)))
            if ranks_of(self.trainer.mesh).share(there)[0] == "False":
                self._copy_first()
                self.save(must=self.trainer.steps == self.launch.workload.steps)

    def _copy_first(self) -> None:
        """What is saved beside training is this rank's own copy: where it went on from those of another plan it makes one. All ranks call it."""
        if self.copies is not None:
            if self.trainer.steps not in self.copies.memory.steps:
                self.copies.begin(self.record or {})
            if any(ranks_of(self.trainer.mesh).share(self.copies.refused)):
                self.copies.refused = self.copies.refused or copies.NO_ROOM

    def go_back(self) -> int:
        """From a spike of the loss to the newest checkpoint that it has not touched; the steps done. All ranks call it."""
        self._await_writer()
        ranks, guard, step = ranks_of(self.trainer.mesh), self.guard, self.trainer.steps
        untouched, left_out, first = guard.before(step), guard.left_out, self.channel.rank == 0
        path = ranks.share(str(newest_until(self.folder, untouched) or "") if first else "")[0]
        if not path:
            guard.forget()
            if first:
                self._note(f"step {step}: the loss has risen and no checkpoint is from before: training goes on")
            return step
        if self.copies is not None:
            self.copies.memory.head.hold(0)
            self.copies.memory.head.forget()
        self._fill(Path(path))
        batches = (batch_of(untouched, left_out), batch_of(step - 1, left_out) + 1)
        line = guard.goes_back(self.trainer.steps, step, left_out, batches)
        ranks.share("")  # all have read it
        if first:
            for later in checkpoints(self.folder):
                if (step_of(later) or 0) > self.trainer.steps:
                    storage.remove(later)
            self.channel.say("spike", line=line, step=step, to=self.trainer.steps, batches=batches)
        self.saved, self.record, self._since, self._busy, self._owed = self.trainer.steps, None, 0.0, False, False
        return self.trainer.steps

    # --- keeping --------------------------------------------------------------------------------------------------------------

    def copy(self, record: StepRecord) -> None:
        """After each step."""
        self.guard.heed(record)
        if self.copies is not None:
            self._time(record.seconds, self.copies.waited)
            self.copies.begin(record.model_dump(exclude_none=True))
            if self.copies.refused and not self._said and self.channel.rank == 0:
                self._said = True
                self._note(self.copies.refused)

    def _time(self, seconds: float, waited: float) -> None:
        """Takes note of a step, and says once what it waits for."""
        steps, whole, stood = self._steps
        if steps < copies.AFTER:
            self._steps = (steps + 1, whole + seconds, stood + waited)
            if (line := copies.too_slow(stood + waited, whole + seconds, steps + 1)) and self.channel.rank == 0:
                self._note(line)

    def finish(self) -> None:
        """Before the last reduction of the next step, and before the end."""
        if self.copies is not None:
            self.copies.finish()

    @property
    def flags(self) -> tuple[float, float, float]:
        """What the ranks must know of each other: whether a checkpoint is being written, how long the last one took, whether copies found no room."""
        return (
            float(self.pulse.read(Word.busy)),
            self.pulse.read(Word.saved) / 1e6,
            float(self.copies is not None and self.copies.refused != ""),
        )

    def agreed(self, record: StepRecord, flags: Sequence[float]) -> None:
        """The largest flags of all ranks, with the record of the step that has ended."""
        busy, self._save_seconds, refused = flags
        if refused and self.copies is not None:  # what is saved, and how, is one decision of all ranks
            self.copies.refused = self.copies.refused or copies.NO_ROOM
        self._since += record.seconds
        if self.copies is not None and self._busy and not busy:
            self.copies.memory.head.hold(0)
        self._busy = busy > 0

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`. What it is decided by is the same on every rank."""
        if self._owed and not self._busy:
            return True
        every = self.launch.run.checkpoint_every
        if every == "auto":
            wanted = daly(self._save_seconds, 3600.0 * self.launch.run.failure_hours)
            return step in (FIRST, self.launch.workload.steps) or (step > FIRST and self._since >= wanted)
        return step == self.launch.workload.steps or (every > 0 and step % every == 0)

    def save(self, must: bool) -> None:
        """A checkpoint that fails costs the run only when it was the last chance. One that may fail is written beside training
        (scribe.py) where there are copies in memory, all on this machine."""
        step = self.trainer.steps
        if self.saved == step:
            return
        if self.copies is not None and not self.copies.refused and not must and self.channel.memory.beside:
            # the one before may take longer than the steps between them: what was asked for is not left out, but done as soon as that one has ended
            if self._busy and (self._owed or not self._await_writer(WAIT)):
                self._owed = True
                return
            self.saved, self._since, self._busy, self._owed = step, 0.0, True, False
            self.finish()
            self.copies.memory.head.hold(step)
            if self.channel.rank == 0:
                self.pulse.write(Word.busy, 1)
                self.channel.say("write", step=step, waited=self._waited)
            self._waited = 0.0
            return
        self._await_writer()
        self.saved, self._since, self._owed = step, 0.0, False
        for left in reversed(range(self.launch.run.retries + 1 if must else 1)):
            try:
                self._save_here(step)
                return
            except SaveFailed as error:
                if self.channel.rank == 0:
                    self.channel.say("unsaved", step=step, why=str(error), waited=self._waited)
                self._waited = 0.0
                if not must:
                    return
                if not left:
                    ranks_of(self.trainer.mesh).share("")  # what rank 0 says of it comes before the end of any rank
                    raise
            began = time.perf_counter()
            if self.channel.rank == 0:
                make_room(self.folder, PAUSE * 2.0 ** (self.launch.run.retries - left), self.pulse, self._note)
            ranks_of(self.trainer.mesh).share("")
            self._waited += time.perf_counter() - began

    def _save_here(self, step: int) -> None:
        """Writes the checkpoint by the ranks themselves, which wait for it. All ranks call it. Raises SaveFailed."""
        self.pulse.at(Phase.save)
        began = time.perf_counter()
        try:
            path = self.trainer.save(self.folder, self.identity)
        finally:
            took = time.perf_counter() - began
            self._waited += took
        if self.channel.rank == 0:
            self.pulse.write(Word.saved, round(took * 1e6))
            self.channel.say("saved", step=step, path=str(path), seconds=took, waited=self._waited)
            prune(self.folder, self.launch.run.keep, verified=path, say=self._note)
        self._waited = 0.0

    def _await_writer(self, most: float = math.inf) -> bool:
        """One save at a time: waits until the one beside training has ended, of which rank 0 hears, but at most `most` seconds. Returns whether it has. All
        ranks call it. The supervisor ends a writer that makes no progress, so that this ends too."""
        self.pulse.at(Phase.save)
        began = time.perf_counter()
        while self.pulse.read(Word.busy) and time.perf_counter() < began + most:
            self.pulse.at(Phase.save)
            time.sleep(0.005)
        is_free = ranks_of(self.trainer.mesh).share(str(not self.pulse.read(Word.busy)))[0] == "True"
        self._waited += time.perf_counter() - began
        return is_free

    def _note(self, line: str) -> None:
        self.channel.say("note", line=line)


def refuse_history(launch: Launch, ranks: Ranks, say: Callable[[str], None]) -> None:
    """Refuses to begin anew in silence where the journal of the run tells of a checkpoint that was durable; a run that was killed before its first one
    begins again. All ranks call it, and rank 0 alone reads. Raises InputError."""
    folder, found = Path(launch.run.folder), [False, 0]
    if ranks.rank == 0:
        text = storage.read_text(folder / EVENTS) or ""
        found = [any(event.kind == "save" for event in events_of(text)), last_reported(folder)]
    had_saved, reported = json.loads(ranks.share(json.dumps(found))[0])
    if had_saved:
        raise InputError(
            f"run {launch.run.folder!r} has reported {reported} steps and has no checkpoint any more: restore its checkpoints, "
            "choose another --run, or begin at step 0 with --set run.anew=true"
        )
    if reported > 0 and ranks.rank == 0:
        say(f"begins at step 0 again: the {reported} steps before were not saved yet")


def make_room(folder: Path, pause: float, pulse: Pulse, say: Callable[[str], None]) -> None:
    """Between two tries of a save that is the last chance: all checkpoints but the newest valid one go, and a person gets `pause` seconds."""
    gone = prune(folder, 1, say=say)
    if gone:
        say(f"removed {', '.join(path.name for path in gone)}, so that the last checkpoint finds room")
    say(f"the last checkpoint is tried again in {pause:.0f} s")
    end = time.perf_counter() + pause
    while time.perf_counter() < end:
        pulse.at(Phase.save)
        time.sleep(0.05)


def daly(save: float, failures: float) -> float:
    """Seconds between checkpoints that lose the least time, when one takes `save` seconds and the mean time between failures is `failures`;
    no more often than a save is under way AT_MOST of the time. Source: Daly, A higher order estimate of the optimum checkpoint interval, FGCS 2006.

    >>> round(daly(60.0, 3.09 * 3600)), round(daly(1.0, 100.0), 1)
    (1116, 13.5)
    """
    if save >= 2 * failures:
        return failures
    ratio = save / (2 * failures)
    return max(math.sqrt(2 * save * failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save, save / AT_MOST)
