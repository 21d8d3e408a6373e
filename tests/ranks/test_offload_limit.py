"""A model whose states are three times the memory limit trains, its optimizer in files, to the numbers that it has without a limit."""

from __future__ import annotations

import json
from typing import Any

import limited
import pytest

SCRIPT = """
import hashlib, json, torch
from meshwright.models.registry import build
from meshwright.train.memory import resident
from meshwright.train.trainer import parallelize
torch.set_num_threads(1)
torch.manual_seed(0)
model = build({sizes})
count = sum(parameter.numel() for parameter in model.parameters())
trainer = parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True), {plan!r}, precision="bf16", clip=1.0, offload_to={folder!r})
ids = torch.arange(16).view(1, 16) % {sizes}["vocab"]
losses = [trainer.step({{"input_ids": ids + step, "labels": ids + step}}).loss for step in range({steps})]
digest = hashlib.sha256()
for unit in trainer.engine.zero.units:
    digest.update(unit.shard.view(torch.int16).numpy().data)
print(json.dumps({{"losses": losses, "weights": digest.hexdigest(), "parameters": count, "bytes": trainer.bytes(), "resident": resident(), "exposed": trainer.engine.exposed}}))
"""
STATES, TIMES = 16, 3
"""Bytes of a bf16 parameter with AdamW: 2 for itself, 2 for its gradient, 12 for the float32 weight and two states."""


def outcome(sizes: dict[str, Any], plan: str, folder: str, limit: int) -> Any:
    done = limited.run(SCRIPT.format(sizes=sizes, plan=plan, folder=folder, steps=3), limit)
    return json.loads(done.stdout) if done.returncode == 0 else done


@pytest.mark.soak
@pytest.mark.skipif(limited.place() is None, reason="no control group can be made here: needs root")
def test_states_three_times_the_memory_limit_train_to_the_same_numbers(tmp_path: Any) -> None:
    sizes = {"kind": "llama", "layers": 28, "hidden": 1024, "heads": 8, "ffn": 2816, "vocab": 4096, "seq": 32}
    free = outcome(sizes, "dp1", str(tmp_path), 0)
    limit = free["parameters"] * STATES // TIMES
    here = outcome(sizes, "dp1", str(tmp_path), limit)
    assert not isinstance(here, dict), "the limit limits nothing"
    away = outcome(sizes, "dp1.off-optimizer-files", str(tmp_path), limit)
    assert isinstance(away, dict), away.stderr[-2000:]
    assert (away["losses"], away["weights"]) == (free["losses"], free["weights"])
    assert away["bytes"]["offloaded"] == free["bytes"]["optimizer"] > 2 * limit
    print(
        f"limit {limit / 2**20:.0f} MiB, states {TIMES * limit / 2**20:.0f} MiB, resident {away['resident'] / 2**20:.0f} MiB",
        away["losses"],
        away["exposed"],
    )
