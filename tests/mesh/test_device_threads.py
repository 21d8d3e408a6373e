"""Each thread that uses a device, its streams or pinned memory has selected the device first. In a new thread, CUDA's
current device is device 0: the threads of all ranks of a node would start a context there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equality import anatomy_of, make_batch, make_model, make_optimizer
from recording_backend import RecordingBackend, recording_device

from meshwright.core.ipc import Heartbeat, open_heartbeats
from meshwright.data.loader import Prefetcher
from meshwright.runtime.backend import pin_function
from meshwright.spec.plan import parse_plan
from meshwright.train.memory_checkpointer import MemoryCheckpointer
from meshwright.train.trainer import parallelize


def train(plan: str, folder: Path) -> RecordingBackend:
    """Trains two steps on the recording device, with an in-memory checkpoint of each."""
    with recording_device() as backend:
        made = parallelize(
            make_model("llama"), make_optimizer, parse_plan(plan), precision="bf16", clip=1.0,
            anatomy=anatomy_of("llama"), offload_to=folder,
        )  # fmt: skip
        (folder / "copies").touch()
        copies = MemoryCheckpointer(str(folder / "copies"), made, Heartbeat(open_heartbeats("", 1), 0), {})
        for step in range(2):
            made.step(make_batch("llama", step))
            copies.begin({"step": step})
            copies.finish()
        assert not copies.refused or plan != "dp1", copies.refused
        made.close()
    return backend


@pytest.mark.parametrize(
    ("plan", "thread", "call"),
    [
        ("dp1", "copy", "select"),
        ("off-activations-disk.mb4", "activations", "synchronize"),
        ("off-optimizer", "offload", "use_stream"),
        ("dp1.z3.off-parameters-disk", "offload", "use_stream"),
    ],
)
def test_every_thread_selects_its_device_before_it_uses_it(plan: str, thread: str, call: str, tmp_path: Path) -> None:
    backend = train(plan, tmp_path)
    assert call in backend.threads[thread], backend.threads
    assert backend.unselected == set()


def test_threads_that_read_batches_select_the_device_before_they_pin() -> None:
    with recording_device() as backend:
        pin = pin_function(torch.device("cpu"))
        assert pin is not None
        read = lambda step: pin(torch.full((2,), step))
        assert [int(batch[0]) for batch in Prefetcher(read, 0, 6, readers=3)] == [*range(6)]
    assert backend.threads == {"prefetch": {"select", "host_buffer"}} and backend.unselected == set()
    assert pin_function(torch.device("cpu")) is None
