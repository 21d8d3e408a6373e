"""A proof at a size that fits on no single device: each rank is a process under a real limit of memory, below the
weights of the whole model."""

from __future__ import annotations

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import memory_limit
import pytest

SIZES: dict[str, Any] = {
    "kind": "llama",
    "layers": 28,
    "hidden": 1024,
    "heads": 8,
    "ffn": 2816,
    "vocab": 4096,
    "seq": 32,
}
LIMIT = 1350 * 2**20
"""Bytes of each rank: less than the weights alone."""
PROOF = """
import json, os, torch, torch.distributed as dist
from meshwright import deferred_init, parallelize
from meshwright.models.registry import build_reference_model
from meshwright.train.memory import resident_bytes
torch.set_num_threads(1)
os.environ.update(RANK="{rank}", LOCAL_RANK="{rank}", WORLD_SIZE="{world}", LOCAL_WORLD_SIZE="{world}")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GLOO_SOCKET_IFNAME="lo")
dist.init_process_group("gloo", store=dist.FileStore("{store}", {world}), rank={rank}, world_size={world})
torch.manual_seed(0)
with deferred_init():
    model = build_reference_model({sizes})
count = sum(parameter.numel() for parameter in model.parameters())
trainer = parallelize(model, lambda parameters: torch.optim.SGD(parameters, lr=1e-3), "{plan}", prove="start")
ids = torch.arange(4 * 16).view(4, 16) % {sizes}["vocab"]
proof = trainer.prove({{"input_ids": ids, "labels": ids}})
print(json.dumps({{"equal": proof.equal, "line": proof.line, "parameters": count, "compared": proof.parameters,
    "resident": resident_bytes()}}))
os._exit(0)
"""


def ranks_of(plan: str, world: int, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Every rank of the proof under `plan`, each under its own limit."""
    scripts = [
        PROOF.format(rank=rank, world=world, store=folder / f"store-{plan}", sizes=SIZES, plan=plan)
        for rank in range(world)
    ]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda script: memory_limit.run(script, LIMIT), scripts))


@pytest.mark.soak
@pytest.mark.skipif(memory_limit.place() is None, reason="no control group can be made here: needs root")
def test_a_model_that_fits_on_no_single_device_is_proven(tmp_path: Path) -> None:
    (alone,) = ranks_of("dp1", 1, tmp_path)
    assert alone.returncode == -signal.SIGKILL, f"the limit limits nothing: {alone.stderr[-500:]}"
    done = ranks_of("dp4.z3.mb1", 4, tmp_path)
    assert all(one.returncode == 0 for one in done), "\n".join(one.stderr[-1000:] for one in done)
    found = [dict(json.loads(one.stdout.splitlines()[-1])) for one in done]
    assert all(one["equal"] for one in found), found[0]["line"]
    assert 4 * found[0]["parameters"] > LIMIT
    assert found[0]["compared"] > 200
