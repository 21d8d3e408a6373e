"""Copies of every step in memory that outlives this rank; and going on from them.

Promise: whenever ranks die, all of them have a whole and undamaged copy of the last step that was reported, and going on from it is
bit-identical to never having stopped. On a CPU, where copying beside the next step would take the same cores, a copy is made when the step
ends, before the ranks agree on its record: what is reported is kept. Beside an accelerator it is made while the next step runs and waited
for before that step's last reduction: until then nothing writes what it reads (of buffers, which a forward moves on, it reads a clone), and
after it every rank knows that every rank's copy is whole ([Note: two slots] in checkpoint/memory.py); then the last step that was reported
may have to be run again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch

from meshwright.base.limits import memory_left
from meshwright.base.pulse import Pulse, Word
from meshwright.base.slots import SLOTS
from meshwright.base.units import show_bytes, show_seconds
from meshwright.checkpoint.distant import memory_at
from meshwright.checkpoint.lift import Lift
from meshwright.checkpoint.memory import Kept, Layout, Memory, lay_out, whole
from meshwright.checkpoint.save import Ranks
from meshwright.parallel.state import BUFFER, addresses
from meshwright.spec.piece import Piece
from meshwright.train.keep import pieces_of, random_of, state_of

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer

SHARE = 0.5
"""Of the memory that the machine, or this run's part of it, has left, which the copies of all ranks may take."""

MOST, AFTER = 0.1, 10
"""Part of the time that copies beside an accelerator may make it wait before that is said, and steps that are looked at."""

NO_ROOM = "no copies in memory: another rank has no room for its own; a rank that fails costs the steps since the last checkpoint"


class Copies:
    """This rank's copies, in the file at `path`."""

    def __init__(self, path: str, trainer: Trainer, pulse: Pulse, extra: dict[str, Any], slots: int = SLOTS) -> None:
        self._slots = slots
        self.memory, self.trainer, self.pulse, self.extra = Memory(path), trainer, pulse, extra
        self.refused = ""
        self.seconds = 0.0
        self.waited = 0.0
        """Seconds in which training stood until the last copy beside it was whole."""
        self._layout: Layout | None = None
        self._places: list[int] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What a forward may move on (running means), and where the copy reads it instead: as it is when the step ends."""
        self._lift: Lift | None = None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def begin(self, record: dict[str, Any]) -> None:
        """Copy the step that has just ended, with its record."""
        self.finish()
        layout = self._lay()
        if layout is None:
            return
        for live, still in self._buffers:
            still.copy_(live)
        local = list(random_of(self.trainer).values())
        state = json.dumps(state_of(self.trainer, {**self.extra, "record": record})).encode()
        if self.trainer.mesh.device.type == "cpu":
            self._copy(self.trainer.steps, layout, local, state)
            self.finish()
            return
        if self._lift is None and self.trainer.mesh.device.type == "cuda":
            self._lift = Lift(self.trainer.mesh.device)
        if self._lift is not None:
            self._lift.begin()
        self._thread = threading.Thread(target=self._copy, args=(self.trainer.steps, layout, local, state), name="copy", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the copy under way. Raises what it raised."""
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.waited = time.perf_counter() - began
        if self._failed is not None:
            raise self._failed

    def _copy(self, step: int, layout: Layout, local: Sequence[torch.Tensor], state: bytes) -> None:
        began = time.thread_time()
        try:
            self.memory.write(step, layout, local, state, whole if self._lift is None else self._lift.parts)
            self.pulse.write(Word.kept, step)
        except BaseException as error:  # handed to `finish`: the run must not go on without its copies unseen
            self._failed = error
        self.seconds = time.thread_time() - began

    def _lay(self) -> Layout | None:
        """What is copied. It is found out once, and again when a buffer has moved."""
        engine = self.trainer.engine
        places = addresses(engine, self.trainer.optimizer) + [buffer.data_ptr() for buffer in engine.model.buffers()]
        if engine.recipe.eight:  # their values are made anew for each copy
            places.append(self.trainer.steps)
        if self._layout is None or places != self._places:
            self._places = places
            self._buffers, pieces = _stilled(pieces_of(self.trainer))
            self._layout = lay_out(pieces, random_of(self.trainer), self.trainer.mesh.plan, self.trainer.mesh.rank)
            self.refused = NO_ROOM if self.refused == NO_ROOM else self._refusal(self._layout)
            if not self.refused:
                self.memory.lay(self._layout, self._slots)
        return None if self.refused else self._layout

    def _refusal(self, layout: Layout) -> str:
        if self.trainer.mesh.away is not None and self.trainer.mesh.away.scratch is not None:
            return "no copies in memory of what the plan keeps in files; a rank that fails costs the steps since the last checkpoint"
        mirrored = 2 if self._slots > SLOTS else 0  # of another node's ranks (elastic/mirror.py)
        needs = self.memory.needs(layout, self._slots + mirrored) * self.trainer.plan.world
        free = min(psutil.virtual_memory().available, memory_left())
        if needs <= SHARE * free:
            return ""
        return (
            f"no copies in memory: they would take {show_bytes(needs)} of the {show_bytes(free)} that this machine has left; "
            "a rank that fails costs the steps since the last checkpoint"
        )


def too_slow(waited: float, seconds: float, steps: int) -> str:
    """What is to be said where copies took longer than the steps beside which they were made; nothing where they did not.

    >>> too_slow(20.0, 32.0, 10)
    'copies in memory make each step wait 2.00 s of its 3.20 s: --set run.copies=false trains without them, and a rank that fails costs the steps since the last checkpoint'
    >>> too_slow(2.0, 32.0, 10), too_slow(9.0, 10.0, 9)
    ('', '')
    """
    if steps < AFTER or waited <= MOST * seconds:
        return ""
    return (
        f"copies in memory make each step wait {show_seconds(waited / steps)} of its {show_seconds(seconds / steps)}: "
        "--set run.copies=false trains without them, and a rank that fails costs the steps since the last checkpoint"
    )


def _stilled(
    pieces: Sequence[tuple[Piece, torch.Tensor]],
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[Piece, torch.Tensor]]]:
    """`pieces` with a clone in the place of each buffer; and before them the buffers with their clones."""
    still = [(piece, data.clone() if piece.name.startswith(BUFFER) else data) for piece, data in pieces]
    return [(one, other) for (_, one), (_, other) in zip(pieces, still, strict=True) if one is not other], still


def newest(paths: Sequence[str], ranks: Ranks) -> Kept | None:
    """The newest step that every file of `paths` has a good copy of, or None. Every rank calls it and reads its part of the copies."""
    if not paths:
        return None
    try:
        memories = [memory_at(path) for path in paths]
        steps = set.intersection(*(memory.steps for memory in memories))
    except OSError:
        memories, steps = [], set()
    everywhere = set.intersection(*(set(json.loads(text)) for text in ranks.share(json.dumps(sorted(steps)))))
    for step in sorted(everywhere, reverse=True):
        good = all(memory.is_good(step) for memory in memories[ranks.rank :: ranks.world])
        if all(answer == "good" for answer in ranks.share("good" if good else "bad")):
            return Kept(memories, step)
    return None
