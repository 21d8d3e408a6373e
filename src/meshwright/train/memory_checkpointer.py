"""Makes in-memory checkpoints of the steps of every rank (recovery.py calls it), and writes such checkpoints to disk
in a separate process. The memory outlives the rank, so that a restarted rank can restore its state from it.

Guarantees: whenever ranks die, every rank has a complete, intact checkpoint of a common step. On a CPU this is at least
the last reported step. On an accelerator it may be the step before, so that the last reported step is repeated, or an
earlier one ([Note: back-off]). A run that continues from this checkpoint is bit-identical to a run that never stopped,
if kernels are deterministic.

A copy is the transfer of a rank's state to this memory. On a CPU, a copy that overlaps with the next step would take
cores from it. So the copy runs at the end of the step that it saves, before the ranks agree on the record of this step.
On an accelerator, the copy overlaps with the next step. It must end before the last reduction of that step, since the
update after this reduction overwrites the copied tensors. Only buffers may change earlier, in forward, so the copy
reads clones of them. After the reduction, every rank knows that the copies of all ranks are complete ([Note: two slots]
in checkpoint/memory_checkpoint.py).

[Note: back-off] If the copy takes longer than the next step up to its last reduction, training waits for the rest. If
these waits would exceed MAX_WAIT_FRACTION of the time, only every n-th step is copied. The ranks agree on n from the
longest wait of all ranks. A step whose checkpoint is due on disk is always copied.

`write` is the main function of the checkpoint writer, a process that writes the in-memory checkpoints to disk while
training continues. Guarantees:
- It writes the bytes that the ranks would write themselves. As in every save, it reads the files back before it renames
  the folder to its final name.
- At most one save is in progress.
- A save needs no extra memory, since the ranks do not overwrite the slot that the writer reads.
- The death of a rank during the save does not disturb the writer.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from meshwright.checkpoint.memory_checkpoint import (
    MemoryCheckpoint,
    MemorySnapshot,
    SnapshotLayout,
    open_snapshot,
    plan_snapshot_layout,
    retry_read,
)
from meshwright.checkpoint.retention import prune_checkpoints
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME
from meshwright.checkpoint.save import RankExchange, SaveFailed, save_checkpoint
from meshwright.core import storage
from meshwright.core.background_thread import start_background_thread
from meshwright.core.cgroup_limits import cgroup_memory_available
from meshwright.core.codec import validate_data
from meshwright.core.ipc import Heartbeat, HeartbeatField
from meshwright.core.messages import Message
from meshwright.core.retry import ResultT
from meshwright.core.snapshots import SNAPSHOT_SLOTS, is_lost
from meshwright.core.units import show_bytes, show_seconds
from meshwright.runtime.backend import backend_of
from meshwright.runtime.state_dict import BUFFER_PREFIX, storage_addresses
from meshwright.spec.job import LaunchSpec
from meshwright.spec.layout import ShardMetadata
from meshwright.train.device_copies import D2HStaging, DeferredText, clone_scalar
from meshwright.train.rank_main import RankControl
from meshwright.train.trainer_checkpoint import checkpoint_shards, merge_scalar_states, rank_local_tensors, scalar_state

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer


MAX_FREE_MEMORY_FRACTION = 0.5
"""The in-memory checkpoints of all ranks may take at most this fraction of the free memory. Free memory is the free
memory of the machine or of this run's cgroup, whichever is less."""

MAX_WAIT_FRACTION = 0.02
"""Training waits for overlapped copies for at most this fraction of its time ([Note: back-off])."""

NO_WAIT = -1.0
"""The measured wait if no overlapped copy has ended."""

OFFLOADED_TEXT = Message(
    "no in-memory checkpoints of the states that the plan offloads to disk; if a rank fails, the run loses the steps "
    "since the last checkpoint"
)
PEER_OUT_OF_MEMORY_TEXT = Message(
    "no in-memory checkpoints: another rank has too little memory for its own; if a rank fails, the run loses the "
    "steps since the last checkpoint"
)


class MemoryCheckpointer:
    """Writes this rank's in-memory checkpoints to the memory file at `path`, which has `slots` slots. `extra` is stored
    with each checkpoint. Until a rollback, the checkpoints belong to `history` ([Note: history] in core/snapshots.py).
    `refused` says why there are no in-memory checkpoints, or is ''."""

    def __init__(
        self,
        path: str,
        trainer: Trainer,
        pulse: Heartbeat,
        extra: dict[str, Any],
        slots: int = SNAPSHOT_SLOTS,
        history: int = 0,
    ) -> None:
        self._slots, self._history = slots, history
        self.memory, self.trainer, self.pulse, self.extra = MemorySnapshot(path), trainer, pulse, extra
        self.refused = ""
        self.seconds = 0.0
        self.waited = NO_WAIT
        """The seconds for which training waited for the overlapped copy that has ended since the last `adapt`."""
        self.interval = 1
        """The number of steps from one copy to the next ([Note: back-off])."""
        self._copied: int | None = None
        self._said = False
        self._layout: SnapshotLayout | None = None
        self._places: list[int] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The model's buffers, which a forward may update (running means), each with its clone. The copy reads the
        clones."""
        device = trainer.mesh.device
        self._staging = D2HStaging(device) if backend_of(device).has_streams else None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    @property
    def allocated(self) -> int:
        """Returns the bytes of this rank's in-memory checkpoints."""
        return self.memory.head.whole if self.memory.head.is_laid else 0

    def go_back(self) -> None:
        """Discards all checkpoints after a rollback, since the run repeats their steps. Later checkpoints belong to the
        next history."""
        self._history, self._copied = self._history + 1, None
        self.memory.head.hold(0)
        self.memory.head.forget()

    def begin(self, record: dict[str, Any], must: bool = False) -> None:
        """Starts the copy of the current state, after the end of a step. On a CPU, the copy is complete on return.
        `record`: the step record to store with the state. If in-memory checkpoints are refused (`refused`), copies
        nothing, nor before `interval` steps after the last copied step, unless the copy `must` be made. If the previous
        copy has failed, raises its exception."""
        self.finish()
        due = self._copied is None or self.trainer.steps >= self._copied + (1 if must else self.interval)
        layout = self._lay() if due else None
        if layout is None:
            return
        self._copied = self.trainer.steps
        for live, still in self._buffers:
            still.copy_(live)
        local = list(rank_local_tensors(self.trainer).values())
        state = DeferredText(scalar_state(self.trainer, {**self.extra, "record": record}, clone_scalar))
        if backend_of(self.trainer.mesh.device).memory_is_host:
            self._copy(self.trainer.steps, layout, local, state)
            self.finish()
            return
        if self._staging is not None:
            self._staging.begin()
        step = self.trainer.steps
        copy = partial(self._copy, step, layout, local, state)
        try:
            self._thread = start_background_thread("copy", copy, lambda line: None)
        except OSError:  # the system cannot start a thread, so this copy delays the next step
            copy()

    def finish(self) -> None:
        """Waits until the started copy is complete. If a copy has failed, raises its exception."""
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.waited = time.perf_counter() - began
        if self._failed is not None:
            raise self._failed

    def adapt(self, waited: float, seconds: float) -> str:
        """Adapts `interval` to the longest wait of all ranks for the last copy, and to the seconds of its step without
        this wait. All ranks call it with equal values. Returns a line for the user when the interval has first settled
        above 1, else ''."""
        self.waited = NO_WAIT
        if waited < 0:
            return ""
        wanted = copy_interval(waited, seconds)
        self.interval = min(wanted, 2 * self.interval)  # the first copies also touch their memory for the first time
        if wanted == 1 or self.interval < wanted or self._said:
            return ""
        self._said = True
        return Message(
            "training waits {waited} for an in-memory checkpoint and {seconds} for a step: every {steps}th step has "
            "one from now on, so a failed rank repeats up to that many steps; --set run.memory_checkpoints=false "
            "trains without them",
            waited=show_seconds(waited),
            seconds=show_seconds(seconds),
            steps=self.interval,
        )

    def _copy(self, step: int, layout: SnapshotLayout, local: Sequence[torch.Tensor], state: DeferredText) -> None:
        began = time.thread_time()
        try:
            device = self.trainer.mesh.device
            backend_of(device).select(device)  # this may be a new thread
            with nullcontext() if self._staging is None else self._staging.in_stream():
                text = state.encode()
            self.memory.write(step, layout, local, text, self._staging, self._history)
            self.pulse.write(HeartbeatField.snapshot_step, step)
        except BaseException as error:  # `finish` raises it: the run must not continue without checkpoints
            self._failed = error
        self.seconds = time.thread_time() - began

    def _lay(self) -> SnapshotLayout | None:
        """Returns the layout of the in-memory checkpoint, or None if in-memory checkpoints are refused (`refused`). The
        layout is recomputed only if the address of a copied tensor has changed."""
        engine = self.trainer.engine
        places = storage_addresses(engine, self.trainer.optimizer) + [
            buffer.data_ptr() for buffer in engine.model.buffers()
        ]
        if engine.recipe.eight:  # 8-bit optimizer states are decoded into new tensors for each copy
            places.append(self.trainer.steps)
        if self._layout is None or places != self._places:
            self._places = places
            self._buffers, pieces = _clone_buffers(checkpoint_shards(self.trainer))
            self._layout = plan_snapshot_layout(
                pieces,
                rank_local_tensors(self.trainer),
                self.trainer.mesh.plan,
                self.trainer.mesh.rank,
                row_sums=self._staging is not None,
            )
            self.refused = (
                PEER_OUT_OF_MEMORY_TEXT if self.refused == PEER_OUT_OF_MEMORY_TEXT else self._refusal(self._layout)
            )
            if self._staging is not None and self.memory.allocation_bytes(self._layout, self._slots):
                self._staging.unpin()
            if not self.refused:
                self.memory.allocate(self._layout, self._slots)
        return None if self.refused else self._layout

    def _refusal(self, layout: SnapshotLayout) -> str:
        if self.trainer.mesh.state_swapper is not None and self.trainer.mesh.state_swapper.swap_file is not None:
            return OFFLOADED_TEXT
        # On several nodes, this machine also stores replicas of another node's checkpoints
        # (elastic/snapshot_replication.py).
        mirrored = 2 if self._slots > SNAPSHOT_SLOTS else 0
        needs = self.memory.allocation_bytes(layout, self._slots + mirrored) * self.trainer.plan.world
        free = min(psutil.virtual_memory().available, cgroup_memory_available())
        if needs <= MAX_FREE_MEMORY_FRACTION * free:
            return ""
        return Message(
            "no in-memory checkpoints: they would take {needs} of the {free} that this machine has left; if a rank "
            "fails, the run loses the steps since the last checkpoint",
            needs=show_bytes(needs),
            free=show_bytes(free),
        )


def copy_interval(waited: float, seconds: float) -> int:
    """Returns the smallest number of steps from one copy to the next with which training waits for at most
    MAX_WAIT_FRACTION of its time, if it waits `waited` seconds for each copy and a step takes `seconds`.

    >>> copy_interval(0.0, 3.0), copy_interval(0.03, 3.0), copy_interval(1.5, 0.5)
    (1, 1, 147)
    """
    return max(1, math.ceil(waited * (1 / MAX_WAIT_FRACTION - 1) / max(seconds, 1e-9)))


def _clone_buffers(
    pieces: Sequence[tuple[ShardMetadata, torch.Tensor]],
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[ShardMetadata, torch.Tensor]]]:
    """Clones the buffers in `pieces`. Returns pairs of buffer and clone, and `pieces` with clones in place of the
    buffers."""
    still = [(piece, data.clone() if piece.name.startswith(BUFFER_PREFIX) else data) for piece, data in pieces]
    return [(one, other) for (_, one), (_, other) in zip(pieces, still, strict=True) if one is not other], still


def newest_memory_checkpoint(
    places: Sequence[str], ranks: RankExchange, say: Callable[[str], None] = lambda line: None
) -> MemoryCheckpoint | None:
    """Returns the in-memory checkpoint of the newest version (history and step) that is intact at all `places`, or
    None. All ranks call it.

    Each rank opens, checks and describes only some of the files, its own one if the world size is unchanged. So the
    number of connections between nodes does not grow with the square of the world size. If a file cannot be read, rank
    0 calls `say` with the reason.
    """
    if not places:
        return None
    mine = range(ranks.rank, len(places), ranks.world)
    problems: list[tuple[int, str]] = []

    def attempt(at: int, read: Callable[[], ResultT]) -> ResultT | None:
        try:
            return retry_read(read)
        except OSError as error:
            problems.append((at, str(error)))
            return None

    def exchange(**answer: Any) -> list[dict[str, Any]]:
        """Returns the answers of all ranks. Rank 0 reports the first problem."""
        answers = [json.loads(text) for text in ranks.all_gather(json.dumps(answer | {"problems": problems}))]
        problems.clear()
        first = next((problem for answer in answers for problem in answer["problems"]), None)
        if first is not None and ranks.rank == 0:
            say(
                Message(
                    "the in-memory checkpoint of rank {rank} cannot be read: {why}; goes on from an older checkpoint",
                    rank=first[0],
                    why=first[1],
                )
            )
        return answers

    opened = {at: attempt(at, partial(open_snapshot, places[at])) for at in mine if not is_lost(places[at])}
    memories = {at: memory for at, memory in opened.items() if memory is not None}
    answers = exchange(versions=[sorted(memories[at].versions) if at in memories else [] for at in mine])
    versions = [{(history, step) for history, step in each} for answer in answers for each in answer["versions"]]
    for _, step in sorted(set.intersection(*versions), reverse=True):
        good = all(attempt(at, partial(memory.is_intact, step)) for at, memory in memories.items())
        own = [attempt(at, partial(memory.describe, step)) for at, memory in memories.items()] if good else []
        answers = exchange(good=good and None not in own, described=own)
        if all(answer["good"] for answer in answers):
            described = [answers[at % ranks.world]["described"][at // ranks.world] for at in range(len(places))]
            return MemoryCheckpoint(places, step, described, memories)
    return None


WRITER_NICENESS = 10
"""The niceness of the writer process. It is positive, so that the scheduler prefers the ranks."""


def write(channel: RankControl, payload: dict[str, Any]) -> int:
    """Writes the checkpoint of step `payload['step']` to disk, from the in-memory checkpoints in
    `channel.memory.sources`. `payload['launch']`: the launch spec. Sends `saved` or `unsaved` to the supervisor.
    Returns the exit status of the process."""
    os.nice(WRITER_NICENESS)
    began, step, launch = time.perf_counter(), int(payload["step"]), validate_data(LaunchSpec, payload["launch"])
    folder = Path(launch.run.folder) / "checkpoints"
    memories = [MemorySnapshot(path) for path in channel.memory.sources]
    if not all(step in memory.steps and memory.is_intact(step) for memory in memories):
        channel.say("unsaved", step=step, why="a copy in memory is damaged")
        return 0
    pieces = []
    for memory in memories:
        data = memory.data(step)
        for name, shape, dtype, split, intervals, start, stop, offset in memory.index["pieces"]:
            kind = DTYPE_BY_NAME[dtype]
            stored = data[offset : offset + (stop - start) * kind.itemsize].view(kind)
            pieces.append(
                (ShardMetadata(name, tuple(shape), dtype, split, tuple(map(tuple, intervals)), start, stop), stored)
            )  # type: ignore[arg-type]
    state = merge_scalar_states([json.loads(memory.state(step)) for memory in memories])
    state["extra"].pop("record", None)
    try:
        path = save_checkpoint(folder, step, pieces, state, plan=launch.plan, world=launch.plan.world)
    except SaveFailed as error:
        channel.say("unsaved", step=step, why=str(error))
        with suppress(OSError):  # leftovers may be the reason that there is no space
            storage.remove_leftovers(folder)
        return 0
    channel.say("saved", step=step, path=str(path), seconds=time.perf_counter() - began)
    prune_checkpoints(folder, launch.run.keep, verified=path, say=lambda line: channel.say("note", line=line))
    return 0
