"""Writes a checkpoint from the copies in memory, in a process beside the ranks: training does not wait for the disk.

Promise: what is written is what a save of the ranks themselves would have written, read back and named last as ever; one save is under way at
most, and it takes no memory beyond the slot that the ranks leave alone meanwhile. A rank that dies meanwhile does not disturb it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from meshwright.base.codec import build
from meshwright.checkpoint.folder import prune
from meshwright.checkpoint.memory import Memory
from meshwright.checkpoint.save import SaveFailed, save
from meshwright.checkpoint.shard import DTYPES
from meshwright.spec.launch import Launch
from meshwright.spec.piece import Piece
from meshwright.train.keep import state_of_all
from meshwright.train.rank import Channel

NICE = 10
"""How far behind the ranks it stands in line for a core."""


def write(channel: Channel, payload: dict[str, Any]) -> int:
    """`payload`: launch, step. The copies are those of `channel.memory.sources`. Returns its exit status."""
    os.nice(NICE)
    began, step, launch = time.perf_counter(), int(payload["step"]), build(Launch, payload["launch"])
    folder = Path(launch.run.folder) / "checkpoints"
    memories = [Memory(path) for path in channel.memory.sources]
    if not all(step in memory.steps and memory.is_good(step) for memory in memories):
        channel.say("unsaved", step=step, why="a copy in memory is damaged")
        return 0
    pieces = []
    for memory in memories:
        data = memory.data(step)
        for name, shape, dtype, split, intervals, start, stop, offset in memory.index["pieces"]:
            kind = DTYPES[dtype]
            held = data[offset : offset + (stop - start) * kind.itemsize].view(kind)
            pieces.append((Piece(name, tuple(shape), dtype, split, tuple(map(tuple, intervals)), start, stop), held))  # type: ignore[arg-type]
    state = state_of_all([json.loads(memory.state(step)) for memory in memories])
    state["extra"].pop("record", None)
    try:
        path = save(folder, step, pieces, state, plan=launch.plan, world=launch.plan.world)
    except SaveFailed as error:
        channel.say("unsaved", step=step, why=str(error))
        return 0
    channel.say("saved", step=step, path=str(path), seconds=time.perf_counter() - began)
    prune(folder, launch.run.keep, verified=path, say=lambda line: channel.say("note", line=line))
    return 0
