"""One process under a real limit of memory: a control group of its own, version 1 or 2, gone when it ends. And a
training that is too large for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
SOURCE = Path(__file__).parents[2] / "src"
TRAINING = """
import hashlib, json, torch
from meshwright.models.registry import build_reference_model
from meshwright.train.memory import resident_bytes
from meshwright.train.trainer import parallelize
torch.set_num_threads(1)
torch.manual_seed(0)
model = build_reference_model({sizes})
count = sum(parameter.numel() for parameter in model.parameters())
trainer = parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True), {plan!r}, \
precision="bf16", clip=1.0, offload_to={folder!r})
ids = torch.arange(16).view(1, 16) % {sizes}["vocab"]
records = [trainer.step({{"input_ids": ids + step, "labels": ids + step}}) for step in range(3)]
digest = hashlib.sha256()
for unit in trainer.engine.zero.units:
    for part in unit.lies:
        digest.update((part if isinstance(part, torch.Tensor) else part.whole()).view(torch.int16).numpy().data)
print(json.dumps({{"losses": [record.loss for record in records], "weights": digest.hexdigest(), "parameters": count, \
"bytes": trainer.bytes(),
    "resident_bytes": resident_bytes(), "seconds": records[-1].seconds, "waited": records[-1].exposed.get("offload", \
0.0)}}))
"""
LARGE: dict[str, Any] = {
    "kind": "llama",
    "layers": 28,
    "hidden": 1024,
    "heads": 8,
    "ffn": 2816,
    "vocab": 4096,
    "seq": 32,
}
STATES, TIMES = 16, 3
"""Bytes of a bf16 parameter with AdamW: 2 for itself, 2 for its gradient, 12 for the float32 weight and two states; how
many times the limit all of them are."""


def train(plan: str, folder: str, limit: int) -> dict[str, Any] | subprocess.CompletedProcess[str]:
    """Three steps of LARGE within `limit` bytes, 0 for none, its files in `folder`: what it found, or how it ended
    where it did not end well."""
    done = run(TRAINING.format(sizes=LARGE, plan=plan, folder=folder), limit)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else done


def place() -> Path | None:
    """Where a group with a limit can be made; None where this process may not."""
    one = ROOT / "memory"
    if (one / "memory.limit_in_bytes").is_file():
        return one if os.access(one, os.W_OK) else None
    kinds = (ROOT / "cgroup.subtree_control").read_text() if (ROOT / "cgroup.subtree_control").is_file() else ""
    return ROOT if "memory" in kinds and os.access(ROOT, os.W_OK) else None


def run(script: str, limit: int, timeout: float = 900.0) -> subprocess.CompletedProcess[str]:
    """`script` in a Python of its own, of whose memory (page cache included) there are `limit` bytes; no limit at 0."""
    found = place() if limit else None
    folder = None if found is None else found / f"meshwright-{os.getpid()}-{time.monotonic_ns()}"
    if folder is not None:
        folder.mkdir()
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (folder / name).exists():
                (folder / name).write_text(str(limit))
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")

    def enter() -> None:
        if folder is not None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    try:
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout, preexec_fn=enter,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    finally:
        if folder is not None:
            _remove(folder)


def _remove(folder: Path) -> None:
    for _ in range(50):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
