"""How much memory a rank takes to start: a model of a billion parameters or more from a file that is made on the spot,
read by ranks that hold a
part each, or (`--fresh`) from its configuration alone.

Each rank's highest resident memory (what the system gave it, shared memory and pages of files included) is set beside
its shard: the
weights and master weights that its plan lays on it. The guarantee is shard + 2 GB. The file is removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.peers import machine, write

SIZES = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
"""TinyLlama's: 1.1 billion parameters."""
ALLOWED = 2 * 10**9


def make(folder: Path, layers: int, fresh: bool) -> int:
    """A folder with a configuration, and weights in bfloat16, written tensor by tensor, but where it is `fresh`.
    Returns the parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from meshwright.checkpoint.safetensors_writer import PendingTensor, write_shard
    from meshwright.train.meta_init import init_on_meta

    config = LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with init_on_meta():
        model = LlamaForCausalLM(config)

    def item(name: str, shape: torch.Size) -> PendingTensor:
        return PendingTensor(
            name, "bfloat16", tuple(shape), 2 * shape.numel(), lambda: torch.full(shape, 0.01, dtype=torch.bfloat16)
        )

    if not fresh:
        write_shard(
            folder / "model.safetensors",
            [item(name, tensor.shape) for name, tensor in model.named_parameters()],
            {"format": "pt"},
        )
    return sum(tensor.numel() for tensor in model.parameters())


def one_rank(folder: Path, plan: str, precision: str, out: Path) -> None:
    """What each rank runs: start, then say its peak."""
    import torch
    import torch.distributed as dist

    from meshwright.spec.job import ModelSource
    from meshwright.train.model import build_model
    from meshwright.train.trainer import parallelize

    torch.set_num_threads(1)
    dist.init_process_group()
    import transformers  # noqa: F401  before the first look: what a process takes without any model

    empty = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    model = build_model(ModelSource(name="model", folder=str(folder)), seed=1)
    trainer = parallelize(model, lambda params: torch.optim.AdamW(params, lr=1e-4), plan, precision=precision)
    if trainer.engine.unfilled:
        trainer.load_weights(folder)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = trainer.bytes()
    good = all(bool(part.isfinite().all()) for unit in trainer.engine.zero.units for part in unit.weights.storages)
    found = {"rank": trainer.mesh.rank, "empty": empty, "peak": peak, "seconds": seconds, "finite": good, **held}
    (out / f"{trainer.mesh.rank}.json").write_text(json.dumps(found))
    trainer.close()
    dist.destroy_process_group()


def measure(folder: Path, plan: str, precision: str, ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "bench.weights",
        ]
        command += ["--one-rank", str(folder), "--plan", plan, "--precision", precision, "--out", out]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        return [json.loads(path.read_text()) for path in sorted(Path(out).glob("*.json"))]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.weights", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--plan", default="tp2.pp2", help="of 4 ranks, or several with commas")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--fresh", action="store_true", help="from the configuration alone")
    parser.add_argument("--one-rank", type=Path)
    parser.add_argument("--out", default="weights")
    chosen = parser.parse_args(arguments)
    if chosen.one_rank is not None:
        one_rank(chosen.one_rank, chosen.plan, chosen.precision, Path(chosen.out))
        return
    lines = [
        "| plan | parameters | file | shard of a rank | highest memory of a rank | above the shard | start |",
        "|---|---|---|---|---|---|---|",
    ]
    report: dict[str, Any] = {
        "machine": machine(),
        "workload": {"precision": chosen.precision, "plans": chosen.plan},
        "table": [],
    }
    with tempfile.TemporaryDirectory() as place:
        parameters = make(Path(place), chosen.layers, chosen.fresh)
        size = sum(path.stat().st_size for path in Path(place).glob("*.safetensors"))
        for plan in chosen.plan.split(","):
            from meshwright.spec.plan import parse_plan

            found = measure(Path(place), plan, chosen.precision, parse_plan(plan).world)
            assert all(rank["finite"] for rank in found), "a weight was not filled"
            worst = max(found, key=lambda rank: rank["peak"] - rank["parameters"] - rank["optimizer"])
            shard = worst["parameters"] + worst["optimizer"]
            above = worst["peak"] - shard
            report["table"].append(
                {"plan": plan, "parameters": parameters, "file": size, "ranks": found, "above": above}
            )
            row = [
                plan,
                f"{parameters / 1e9:.2f} B",
                f"{size / 1e9:.2f} GB",
                f"{shard / 1e9:.2f} GB",
                f"{worst['peak'] / 1e9:.2f} GB",
            ]
            lines.append(
                "| "
                + " | ".join([*row, f"{above / 1e9:+.2f} GB", f"{max(rank['seconds'] for rank in found):.0f} s"])
                + " |"
            )
            print(lines[-1], flush=True)
            assert above <= ALLOWED, f"plan {plan}: {above / 1e9:.2f} GB above the shard"
    if chosen.out != "-":
        write(
            chosen.out,
            "Starting from a configuration" if chosen.fresh else "Starting from weights",
            report,
            ["\n".join(lines)],
            f"In {chosen.precision}. A process without a model is counted too.",
        )


if __name__ == "__main__":
    main()
