"""The exported FSDP2 script on real ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp2.z3.mb2.rc-full", "dp2.z2.mb2"])
def test_the_exported_fsdp2_script_trains_on_two_ranks(plan: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    job = ["--model", str(model), "--cluster", "1x2:cpu", "--batch", "8", "--seq", "32", "--precision", "fp32"]
    wanted = [*job, "--set", "workload.steps=3", "--plan", plan, "--to", "fsdp2", "--out", str(tmp_path)]
    assert main(["export", *wanted]) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and all(5.0 < loss < 6.5 for loss in losses)  # log(256) is 5.5
