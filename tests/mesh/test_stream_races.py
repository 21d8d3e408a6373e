"""No stream and no thread uses memory that another one may still use. The check sees what it should: without any one of
the waits that a step runs, it finds a race."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equality import make_optimizer
from race_detector import RaceDetector, detected_races
from traced_mesh import SEQUENCE, constant_model, graph_of

from meshwright.core.ipc import Heartbeat, RankPhase, open_heartbeats
from meshwright.train.memory_checkpointer import MemoryCheckpointer
from meshwright.train.trainer import parallelize

HOST_WEIGHTS = "z3.off-optimizer.off-parameters.mb2"
FILE_WEIGHTS = "z3.off-optimizer-disk.off-parameters-disk.mb2"
HOST_GRADIENTS = "z3.off-optimizer.off-gradients.mb2"
UNPINNED = "dp1 unpinned"
"""The plan `dp1` where the system does not pin the slots of in-memory checkpoints."""
PLANS = (
    "dp1", UNPINNED, "off-activations.mb4", "off-activations-disk.mb4", "off-optimizer", HOST_WEIGHTS, FILE_WEIGHTS,
    HOST_GRADIENTS,
)  # fmt: skip

EQUIVALENT = {
    ("off-activations.mb4", "wait_event of activation_offload.py:OffloadedTensor.__del__"),
    ("off-activations-disk.mb4", "wait_event of activation_offload.py:OffloadedTensor.__del__"),
    # In a whole step, `take` has waited. The wait is for a graph that is dropped without a backward.
    ("off-activations-disk.mb4", "wait_event of activation_offload.py:OffloadedTensor.let_go"),
    # The host has waited for the file, which a thread writes after it has waited for the copy.
    *(
        (plan, "wait_stream of offloaded.py:OffloadedShard.__init__")
        for plan in ("off-optimizer", HOST_WEIGHTS, FILE_WEIGHTS, HOST_GRADIENTS)
    ),
    # Each copy of these plans follows the same wait in `apply_offloaded_update`.
    (HOST_GRADIENTS, "wait_stream of updater.py:apply_offloaded_update"),
    # The host has waited for the copies of the gradients, which follow all kernels that use the weights.
    (HOST_WEIGHTS, "wait_event of param_swapper.py:CpuShard.release"),
    (FILE_WEIGHTS, "wait_event of param_swapper.py:NvmeShard.release"),
    # In a whole step, `acquire` has waited. The wait is for weights that are fetched and not used.
    (FILE_WEIGHTS, "synchronize of swapper.py:StateSwapper._new_pages"),
    # The allocator of pinned memory waits for the copies out of freed memory too.
}
"""Waits whose absence cannot be seen in a step, by plan."""


def train(plan: str, folder: Path, dropped: str = "") -> RaceDetector:
    """Trains three steps, with an in-memory checkpoint of each in `dp1`."""
    graph, copied = graph_of("llama", 2), plan in ("dp1", UNPINNED)
    with detected_races(dropped, pins=plan != UNPINNED) as detector:
        made = parallelize(
            constant_model("llama", 2), make_optimizer, plan.partition(" ")[0],
            precision="bf16", clip=1.0, anatomy=graph, offload_to=folder, prove="never",
        )  # fmt: skip
        made.engine.preflight.skip()
        made.engine.preflight.analysed = None
        (folder / "copies").touch()
        copies = MemoryCheckpointer(str(folder / "copies"), made, Heartbeat(open_heartbeats("", 1), 0), {})
        made.on_phase = lambda phase: copies.finish() if phase == RankPhase.update else None
        batch = {name: torch.arange(SEQUENCE).repeat(4, 1) for name in ("input_ids", "labels")}
        for step in range(3):
            made.step(batch)
            if copied:
                copies.begin({"step": step})
        copies.finish()
        made.close()
    return detector


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.covering(3)
def test_no_memory_is_used_without_an_order_and_each_wait_is_needed(plan: str, tmp_path: Path) -> None:
    whole = train(plan, tmp_path)
    assert whole.races == set() and whole.waits
    missed = {wait for wait in whole.waits if not train(plan, tmp_path, wait).races}
    assert missed == {wait for name, wait in EQUIVALENT if name == plan}
