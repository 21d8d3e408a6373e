"""Decides when a training run saves checkpoints, and restores the run after a restart or a loss spike. The training
loop (loop.py) calls it.

A run resumes from the first of these sources that exists:
- In-memory checkpoints of the newest step for which all ranks have an intact checkpoint. They are skipped if the newest
  valid checkpoint on disk is of a later step.
- The newest valid checkpoint in the run folder.
- The checkpoint run.resume_from, also of another system.
- The model's initial or pretrained weights.

If the event log records a saved checkpoint, but no checkpoint can be read, the run does not restart silently at step 0:
it ends with an error, unless the user has set run.restart.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import CorruptCheckpoint, parse_step
from meshwright.checkpoint.memory_checkpoint import MemoryCheckpoint
from meshwright.checkpoint.retention import (
    list_checkpoints,
    newest_checkpoint,
    newest_checkpoint_until,
)
from meshwright.checkpoint.save import RankExchange, SaveFailed
from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.ipc import Heartbeat, HeartbeatField, RankPhase
from meshwright.core.messages import Message
from meshwright.core.snapshots import SNAPSHOT_SLOTS, SNAPSHOT_SLOTS_MULTI_NODE
from meshwright.data.sampler import batch_index
from meshwright.spec.job import LaunchSpec
from meshwright.spec.record import EVENTS_FILE_NAME, StepRecord, parse_events
from meshwright.train import memory_checkpointer
from meshwright.train.checkpoint_pruner import CheckpointPruner
from meshwright.train.imported_checkpoint import accept_imported
from meshwright.train.loss_spike import LossSpikeDetector
from meshwright.train.metrics import StepGap, last_reported_step
from meshwright.train.rank_main import RankControl
from meshwright.train.storage_probe import SILENT_DISK_TEXT, StorageProbe, is_disk_silent
from meshwright.train.trainer import Trainer
from meshwright.train.trainer_checkpoint import rank_exchange

FIRST_AUTO_SAVE_STEP = 10
"""With `checkpoint_every: auto`, the first save is after this step. Its duration determines the interval of later
saves."""

MAX_WRITER_WAIT_SECONDS = 10.0
"""If a save is due while the previous save is in progress, training waits at most this long for the previous save. Then
training continues, and the due save starts when the previous save has ended."""

SAVE_RETRY_SECONDS = 1.0
"""If a save that must succeed fails, it is retried after this time. The time doubles with each retry."""

MAX_SAVE_FRACTION = 0.1
"""With `checkpoint_every: auto`, saves are in progress during at most this fraction of the training time."""


class Recovery:
    """Saves and restores the run on one rank. `identity` has the digest of the data and the number of parameters. Every
    checkpoint contains `identity`, and a checkpoint with a different data digest is refused."""

    def __init__(
        self, launch: LaunchSpec, channel: RankControl, trainer: Trainer, pulse: Heartbeat, identity: dict[str, Any]
    ) -> None:
        self.launch, self.channel, self.trainer, self.pulse, self.identity = launch, channel, trainer, pulse, identity
        self.pruner = CheckpointPruner(Path(launch.run.folder) / "checkpoints", channel.say)
        self.probe = StorageProbe(self.folder, pulse)
        self.source = ""
        self.saved = -1
        self.record: dict[str, Any] | None = None
        """The record of the last step before an in-memory checkpoint, if the run was resumed from it. Otherwise
        None."""
        self._said = self._busy = self._owed = False
        self._since = self._save_seconds = self._waited = 0.0
        self.gap = StepGap()
        self._ended: dict[str, Any] = {}
        """The record of the last step that has ended, as in-memory checkpoints store it."""
        self.guard = LossSpikeDetector(self.identity, launch.workload.skips_spikes, trainer.scale.dynamic)
        memory, slots = channel.memory, SNAPSHOT_SLOTS if channel.memory.single_node else SNAPSHOT_SLOTS_MULTI_NODE
        self.copies = (
            memory_checkpointer.MemoryCheckpointer(memory.own, trainer, pulse, identity, slots, memory.history)
            if memory.own and launch.run.memory_checkpoints
            else None
        )

    @property
    def folder(self) -> Path:
        """Returns the folder of the checkpoints."""
        return self.pruner.folder

    # --- resuming ---------------------------------------------------------------------------------

    def resume(self) -> int:
        """Restores the run from the first source that exists (module docstring). Returns the number of completed steps.
        Sets `source` to 'memory', 'disk' or '' (initial weights). All ranks call it."""
        ranks = rank_exchange(self.trainer.mesh)
        saved = memory_checkpointer.newest_memory_checkpoint(
            self.channel.memory.sources, ranks, lambda line: self.channel.say("degraded", line=line)
        )
        if saved is not None and not _has_later_checkpoint(self.folder, saved.step, ranks, self._note):
            self.source = "memory"
            self._fill(saved)
            self._forget()
            return self.trainer.steps
        chosen = newest_checkpoint(self.folder, say=self._note) if self.channel.rank == 0 else None
        path = ranks.all_gather(str(chosen or ""))[0]
        if self.trainer.engine.unfilled and self.launch.model.folder:
            self.trainer.load_weights(self.launch.model.folder)
        if not path and not self.launch.run.restart:
            refuse_silent_restart(self.launch, ranks, self._note)
        if start := path or self.launch.run.resume_from:
            self.source = "disk"
            self._fill(Path(start))
            self.saved = self.trainer.steps if path else -1
        self._forget()
        return self.trainer.steps

    def _forget(self) -> None:
        """Discards this rank's in-memory checkpoints of steps after the resumed one, since these steps are repeated."""
        if self.copies is not None:
            self.copies.memory.head.forget(after=self.trainer.steps)

    def _fill(self, source: Path | MemoryCheckpoint) -> None:
        extra = self.trainer.load(source)
        if "imported" in extra:
            accept_imported(self.trainer, self.launch.workload, extra, self.channel)
            return
        data, self.record = extra["data"], extra.get("record")
        self.guard.read(extra.get("guard", {}))
        if data != self.identity["data"]:
            raise InputError(
                Message(
                    "run {folder!r} was trained on other data ({data}, now {data_2}): restore the files, or choose "
                    "another --run",
                    folder=self.launch.run.folder,
                    data=data[:8],
                    data_2=self.identity["data"][:8],
                )
            )

    def unreported(self, reported: int) -> StepRecord | None:
        """Returns the record of the last step before the in-memory checkpoint if a fault prevented its report, else
        None. `reported`: the last reported step, which only rank 0 needs to know. All ranks call it."""
        if self.record is None:
            return None
        last = int(rank_exchange(self.trainer.mesh).all_gather(str(reported))[0])
        # A report of a later step was made before a rollback; since the rollback, this step has not been reported.
        return StepRecord(**self.record) if last < self.trainer.steps or last > self.trainer.steps + 1 else None

    def catch_up(self) -> bool:
        """Saves the checkpoint of the resumed step to disk if a fault prevented it. Returns True instead if a stop was
        requested before: the loop must save before its next step, which may take too long. All ranks call it."""
        ranks = rank_exchange(self.trainer.mesh)
        if self.source != "memory" or "True" in ranks.all_gather(str(bool(self.channel.stop))):
            return self.source == "memory"
        if self.due(self.trainer.steps):
            listed = self.trainer.steps in map(parse_step, list_checkpoints(self.folder))
            if ranks.all_gather(str(bool(self.pulse.read(HeartbeatField.busy)) or listed))[0] == "False":
                _copy_first(self)
                self.save(must=self.trainer.steps == self.launch.workload.steps)
        return False

    def go_back(self) -> int:
        """Rolls back to the newest valid checkpoint that was saved before the loss spike (loss_spike.py). Returns the
        number of completed steps, which is unchanged if no checkpoint is old enough. All ranks call it."""
        self._await_writer()
        ranks, guard, step = rank_exchange(self.trainer.mesh), self.guard, self.trainer.steps
        untouched, left_out, first = guard.before(step), guard.left_out, self.channel.rank == 0
        path = ranks.all_gather(str(newest_checkpoint_until(self.folder, untouched) or "") if first else "")[0]
        if not path:
            guard.forget()
            if first:
                self._note(
                    Message(
                        "step {step}: the loss has risen, but there is no checkpoint from before the rise: training "
                        "goes on",
                        step=step,
                    )
                )
            return step
        if self.copies is not None:
            self.copies.go_back()
        self._fill(Path(path))
        batches = (batch_index(untouched, left_out), batch_index(step - 1, left_out) + 1)
        line = guard.goes_back(self.trainer.steps, step, left_out, batches)
        ranks.all_gather("")  # barrier: rank 0 must not remove checkpoints while a rank reads
        if first:
            for later in list_checkpoints(self.folder):
                if (parse_step(later) or 0) > self.trainer.steps:
                    storage.remove(later)
            self.channel.say("spike", line=line, step=step, to=self.trainer.steps, batches=batches)
        self.saved, self.record, self._since, self._busy, self._owed = self.trainer.steps, None, 0.0, False, False
        return self.trainer.steps

    # --- saving -----------------------------------------------------------------------------------

    def copy(self, record: StepRecord) -> None:
        """Starts the in-memory checkpoint of the step of `record`, if the step gets one. The loop calls it after each
        step."""
        self.guard.heed(record)
        if self.copies is not None:
            self._ended = record.model_dump(exclude_none=True)
            self.copies.begin(self._ended)
            if self.copies.refused and not self._said and self.channel.rank == 0:
                self._said = True
                is_planned = self.copies.refused == memory_checkpointer.OFFLOADED_TEXT
                self.channel.say("note" if is_planned else "degraded", line=self.copies.refused)

    def finish(self) -> None:
        """Waits until the started in-memory checkpoint is complete. The loop calls it before the last reduction of the
        next step, and after the last step."""
        if self.copies is not None:
            self.copies.finish()

    @property
    def flags(self) -> tuple[float, float, float, float]:
        """Returns this rank's values for the exchange between ranks. The first is 1.0 if a checkpoint is being written,
        else 0.0. The second is the duration of the last save in seconds. The third is 1.0 if this rank has no in-memory
        checkpoints for lack of memory or because states are offloaded to disk, else 0.0. The fourth is the wait for an
        in-memory checkpoint that has ended during the step, in seconds, NO_WAIT without one."""
        return (
            float(self.pulse.read(HeartbeatField.busy)),
            self.pulse.read(HeartbeatField.saved) / 1e6,
            float(self.copies is not None and self.copies.refused != ""),
            memory_checkpointer.NO_WAIT if self.copies is None else self.copies.waited,
        )

    def agreed(self, record: StepRecord, flags: Sequence[float]) -> None:
        """Processes the result of the exchange between ranks. `flags`: for each value of the property `flags`, the
        maximum over all ranks. `record`: the record of the step that has ended."""
        busy, self._save_seconds, refused, waited = flags
        line = "" if self.copies is None else self.copies.adapt(waited, record.seconds - waited)
        if line and self.channel.rank == 0:
            self._note(line)
        if refused and self.copies is not None:  # in-memory checkpoints are useless unless every rank has one
            self.copies.refused = self.copies.refused or memory_checkpointer.PEER_OUT_OF_MEMORY_TEXT
        self._since += record.seconds
        if self.copies is not None and self._busy and not busy:
            self.copies.memory.head.hold(0)
        self._busy = busy > 0

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint on disk is due after `step`. All ranks return the same result."""
        if self._owed and not self._busy:
            return True
        every = self.launch.run.checkpoint_every
        if every == "auto":
            wanted = daly_interval(self._save_seconds, 3600.0 * self.launch.run.failure_hours)
            return step in (FIRST_AUTO_SAVE_STEP, self.launch.workload.steps) or (
                step > FIRST_AUTO_SAVE_STEP and self._since >= wanted
            )
        return step == self.launch.workload.steps or (every > 0 and step % every == 0)

    def save(self, must: bool) -> None:
        """Saves a checkpoint to disk. All ranks call it.

        `must`: whether training waits until the save has succeeded. If so, the ranks write the checkpoint. A failed
        save is retried; if all retries fail, SaveFailed ends the run. Otherwise, a writer process saves while training
        continues, if the in-memory checkpoints of all ranks are on this machine (memory_checkpointer.py). If they are
        not, the ranks write the checkpoint, and a failure is only reported.
        """
        step = self.trainer.steps
        if self.saved == step:
            return
        if self.copies is not None and not self.copies.refused and not must and self.channel.memory.single_node:
            # A save may take longer than the interval between saves. The next save is then delayed, not dropped.
            if self._busy and (self._owed or not self._await_writer(MAX_WRITER_WAIT_SECONDS)):
                self._owed = True
                return
            self.saved, self._since, self._busy, self._owed = step, 0.0, True, False
            self.finish()
            if step not in self.copies.memory.steps:
                self.copies.begin(self._ended, must=True)
                self.finish()
            self.copies.memory.head.hold(step)
            if self.channel.rank == 0:
                self.pulse.write(HeartbeatField.busy, 1)
                self.channel.say("write", step=step, waited=self._waited)
            self._waited = 0.0
            return
        self._await_writer()
        self.saved, self._since, self._owed = step, 0.0, False
        began = time.perf_counter()
        is_skipped = is_disk_silent(self.probe, rank_exchange(self.trainer.mesh), must)
        self._block(time.perf_counter() - began)
        if is_skipped:
            if self.channel.rank == 0:
                self.channel.say("unsaved", step=step, why=SILENT_DISK_TEXT, waited=self._waited)
            self._waited = 0.0
            return
        for left in reversed(range(self.launch.run.retries + 1 if must else 1)):
            try:
                self._save_here(step, must)
                return
            except SaveFailed as error:
                if self.channel.rank == 0:
                    self.channel.say("unsaved", step=step, why=str(error), waited=self._waited)
                self._waited = 0.0
                if not must:
                    return
                if not left:
                    rank_exchange(self.trainer.mesh).all_gather("")  # barrier: rank 0 must report before any rank ends
                    raise
            began = time.perf_counter()
            if self.channel.rank == 0:
                make_room_for_save(
                    self.pruner, SAVE_RETRY_SECONDS * 2.0 ** (self.launch.run.retries - left), self.pulse, self._note
                )
            rank_exchange(self.trainer.mesh).all_gather("")
            self._block(time.perf_counter() - began)

    def _block(self, seconds: float) -> None:
        """Counts seconds for which a save has blocked training."""
        self._waited += seconds
        self.gap.blocked += seconds

    def _save_here(self, step: int, must: bool) -> None:
        """Writes the checkpoint in the processes of the ranks, and removes old checkpoints, while training waits. All
        ranks call it. Raises SaveFailed."""
        self.pulse.at(RankPhase.save)
        began = time.perf_counter()
        try:
            with self.probe.watched():
                path = self.trainer.save(self.folder, self.identity)
            took = time.perf_counter() - began
            if self.channel.rank == 0:
                self.pruner.prune(self.launch.run.keep, verified=path)
            rank_exchange(self.trainer.mesh).all_gather("")  # otherwise the next step of other ranks contains this time
        except SaveFailed:
            if self.channel.rank == 0 and not must:
                self.pruner.remove_leftovers()
            raise
        finally:
            self._block(time.perf_counter() - began)
        if self.channel.rank == 0:
            self.pulse.write(HeartbeatField.saved, round(took * 1e6))
            self.channel.say("saved", step=step, path=str(path), seconds=took, waited=self._waited)
        self._waited = 0.0

    def _await_writer(self, most: float = math.inf) -> bool:
        """Waits at most `most` seconds for the end of the overlapped save. Returns whether it has ended, as rank 0 sees
        it. All ranks call it. An infinite wait ends too, since the supervisor kills a writer without progress."""
        self.pulse.at(RankPhase.save)
        began = time.perf_counter()
        while self.pulse.read(HeartbeatField.busy) and time.perf_counter() < began + most:
            self.pulse.at(RankPhase.save)
            time.sleep(0.005)
        is_free = (
            rank_exchange(self.trainer.mesh).all_gather(str(not self.pulse.read(HeartbeatField.busy)))[0] == "True"
        )
        self._block(time.perf_counter() - began)
        return is_free

    def _note(self, line: str) -> None:
        self.channel.say("note", line=line)


def _copy_first(run: Recovery) -> None:
    """Makes this rank's in-memory checkpoint of the resumed step if it is missing, because the run was resumed from
    checkpoints of another plan. A save that overlaps with training reads this checkpoint. All ranks call it."""
    if run.copies is not None:
        if run.trainer.steps not in run.copies.memory.steps:
            run.copies.begin(run.record or {})
        if any(rank_exchange(run.trainer.mesh).all_gather(run.copies.refused)):
            run.copies.refused = run.copies.refused or memory_checkpointer.PEER_OUT_OF_MEMORY_TEXT


def _has_later_checkpoint(folder: Path, step: int, ranks: RankExchange, say: Callable[[str], None]) -> bool:
    """Returns whether the newest valid checkpoint on disk is of a later step than `step`. This is possible if later
    in-memory checkpoints did not fit in memory. All ranks call it."""
    is_later = False
    if ranks.rank == 0 and any((parse_step(path) or 0) > step for path in list_checkpoints(folder)):
        with contextlib.suppress(CorruptCheckpoint):
            found = newest_checkpoint(folder, say=say)
            is_later = found is not None and (parse_step(found) or 0) > step
    return ranks.all_gather(str(is_later))[0] == "True"


def refuse_silent_restart(launch: LaunchSpec, ranks: RankExchange, say: Callable[[str], None]) -> None:
    """Raises InputError if the event log of the run records a saved checkpoint: such a run must not restart at step 0.
    A run that was killed before its first checkpoint may restart; `say` gets a line about the lost steps. All ranks
    call it. Only rank 0 reads the log."""
    folder, found = Path(launch.run.folder), [False, 0]
    if ranks.rank == 0:
        text = storage.read_text(folder / EVENTS_FILE_NAME) or ""
        found = [any(event.kind == "save" for event in parse_events(text)), last_reported_step(folder)]
    had_saved, reported = json.loads(ranks.all_gather(json.dumps(found))[0])
    if had_saved:
        raise InputError(
            Message(
                "run {folder!r} has reported {reported} steps but no longer has a checkpoint: restore its "
                "checkpoints, choose another --run, or begin at step 0 with --set run.restart=true",
                folder=launch.run.folder,
                reported=reported,
            )
        )
    if reported > 0 and ranks.rank == 0 and not launch.run.resume_from:
        say(Message("the run begins at step 0 again: its earlier {reported} steps were not saved", reported=reported))


def make_room_for_save(pruner: CheckpointPruner, pause: float, pulse: Heartbeat, say: Callable[[str], None]) -> None:
    """Frees disk space before a retry of the last save. It removes all checkpoints except the newest valid one. Then it
    waits `pause` seconds, in which the user can free more space. Only rank 0 calls it."""
    removed = pruner.prune(1)
    if removed:
        say(
            Message(
                "removed {names} to make room for the last checkpoint",
                names=", ".join(path.name for path in removed),
            )
        )
    say(Message("saving the last checkpoint is tried again in {pause:.0f} s", pause=pause))
    end = time.perf_counter() + pause
    while time.perf_counter() < end:
        pulse.at(RankPhase.save)
        time.sleep(0.05)


def daly_interval(save: float, failures: float) -> float:
    """Returns the interval between checkpoints, in seconds, that minimizes the time lost to saves and repeated steps.
    The interval is at least `save` / MAX_SAVE_FRACTION. However, if `save` is at least twice `failures`, the interval
    is `failures`.

    `save` is the duration of a save, `failures` the mean time between failures, both in seconds. Source: Daly, A higher
    order estimate of the optimum checkpoint interval, FGCS 2006.

    >>> round(daly_interval(60.0, 3.09 * 3600)), round(daly_interval(1.0, 100.0), 1)
    (1116, 13.5)
    """
    if save >= 2 * failures:
        return failures
    ratio = save / (2 * failures)
    return max(math.sqrt(2 * save * failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save, save / MAX_SAVE_FRACTION)
