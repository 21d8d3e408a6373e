"""The checkpoint writer: a separate process that writes the in-memory checkpoints to disk while training continues.

Guarantees: the process writes the same bytes that the ranks themselves would have saved. As in every save, it reads the
files back before it renames the folder to its final name. At most one save is in progress. A save needs no extra
memory, since the ranks do not overwrite the snapshot slot that the writer reads. The death of a rank during the save
does not disturb the writer.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from meshwright.checkpoint.memory_checkpoint import MemorySnapshot
from meshwright.checkpoint.retention import prune_checkpoints
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME
from meshwright.checkpoint.save import SaveFailed, save_checkpoint
from meshwright.core.codec import validate_data
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.run import LaunchSpec
from meshwright.train.rank_main import RankControl
from meshwright.train.trainer_checkpoint import merge_scalar_states

WRITER_NICENESS = 10
"""The niceness of the writer process. It is positive, so the ranks get the CPU before the writer."""


def write(channel: RankControl, payload: dict[str, Any]) -> int:
    """Writes the checkpoint of step `payload['step']` from the in-memory checkpoints in `channel.memory.sources`.
    `payload` also contains the launch spec. Returns the exit status."""
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
        return 0
    channel.say("saved", step=step, path=str(path), seconds=time.perf_counter() - began)
    prune_checkpoints(folder, launch.run.keep, verified=path, say=lambda line: channel.say("note", line=line))
    return 0
