"""The proof run at full size: memory of each rank beyond a step's, and seconds against the estimate.

python -m bench.proof                         # TinyLlama 1.1B on 4 ranks of this machine, dp4.z3
python -m bench.proof --blocks 4              # the same with fewer blocks, to try
python -m bench.proof --precision bf16-pure   # where the processor multiplies bfloat16; else 30 times slower

With all 22 blocks it writes bench/results/proof.md. The estimate is always that of 22 blocks.

The estimate is of this machine where `meshwright probe` has measured it, or of the cluster of `--cluster`: a file that
`meshwright probe --cluster local:4 --save` wrote.

Memory is what a process has that it shares with no other, and what it wrote to shared memory, read every 20 ms. A step
is measured after the proof,
so that what a first pass leaves behind counts for neither. The weights are no random numbers: drawing 1.1 billion takes
longer than the proof.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.ranks import run
from meshwright.planner.cost.step import estimate, proof_price
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import ProofCost
from meshwright.train.trainer import parallelize

RESULT = Path(__file__).parent / "results" / "proof.md"
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


def held() -> float:
    """Bytes of this process that no other has."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(1024.0 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def peak_of(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` returns, the most that this process held meanwhile, in bytes, and its seconds."""
    most, done = held(), threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, held())

    watching = threading.Thread(target=sample)
    watching.start()
    began = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - began
    done.set()
    watching.join()
    return found, most, seconds


def model_of(blocks: int, dtype: torch.dtype) -> nn.Module:
    """A Llama whose weights are between -0.025 and 0.025: squares modulo a prime. No row of a weight is a permutation
    of another, because sums over outputs would not tell them apart."""
    import transformers

    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=blocks, max_position_embeddings=2048, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    values = (
                        torch.ones(parameter.shape)
                        if parameter.ndim < 2
                        else (torch.arange(parameter.numel()).square_() % 65521 / 65521 - 0.5) * 0.05
                    )
                    module._parameters[name] = nn.Parameter(values.view(parameter.shape).to(dtype))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def measured(
    plan: str, models: list[nn.Module], precision: str, rows: int, length: int, price: ProofCost
) -> dict[str, Any]:
    """On every rank. `models` holds the one model: the ranks are forked, so that it is in memory once."""
    trainer = parallelize(
        models.pop(), lambda parameters: torch.optim.SGD(parameters, lr=1e-3), plan, precision=precision, prove="start"
    )
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    trainer.prover.predicted = price
    trainer.engine.preflight.skip()  # checks of the first steps are neither the proof nor a step
    before = held()
    proof, most, seconds = peak_of(lambda: trainer.prove(batch))
    trainer.prover.mode = "never"
    trainer.step(batch)
    _, step, step_seconds = peak_of(lambda: trainer.step(batch))
    return {
        "line": proof.line, "equal": proof.equal, "expected": trainer.prover.expected_seconds,
        "before": before, "proof": most, "step": step, "seconds": seconds,
        "step_seconds": step_seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--plan", default="dp4.z3.mb1")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16-pure"])
    parser.add_argument("--cluster", default="")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args()
    plan = parse_plan(given.plan)
    block = 2048 * (2048 * 2 + 256 * 2 + 3 * 5632) + 2 * 2048
    vocabulary = SIZES["vocab_size"] * SIZES["hidden_size"]
    work = {"batch": plan.world, "sequence": given.length, "precision": given.precision, "optimizer.name": "sgd"}
    chosen = {"model": "tinyllama-1.1b", "cluster": given.cluster or f"local:{plan.world}"}
    job = resolve_job(read_job(None, [f"workload.{name}={value}" for name, value in work.items()], chosen))
    price = proof_price(job, plan, estimate(job, plan).time.step)
    models = [model_of(given.blocks, torch.float32 if given.precision == "fp32" else torch.bfloat16)]
    found = run(
        plan.world,
        measured,
        given.plan,
        models,
        given.precision,
        plan.world,
        given.length,
        price,
        timeout=given.seconds,
    )
    lines = [
        "# The proof run at full size\n",
        f"TinyLlama 1.1B ({given.blocks} blocks), `{given.plan}`, {given.precision}, {plan.world} rows of "
        f"{price.length} tokens, {plan.world} ranks on {os.cpu_count()} cores. By `python -m bench.proof`.",
        f"A block is {4 * block / 2**20:.0f} MiB in float32, the embedding and the head {4 * vocabulary / 2**20:.0f} "
        f"MiB each, and so are their gradients. {'Equal to one device' if found[0]['equal'] else found[0]['line']}.\n",
        "| rank | before, MiB | a step, MiB | the proof, MiB | beyond a step, MiB |",
        "|---|---|---|---|---|",
    ]
    for rank, each in enumerate(found):
        sizes = [each[name] / 2**20 for name in ("before", "step", "proof")]
        lines.append(f"| {rank} | {sizes[0]:.0f} | {sizes[1]:.0f} | {sizes[2]:.0f} | {sizes[2] - sizes[1]:.0f} |")
    seconds = max(each["seconds"] for each in found)
    expected = found[0]["expected"]
    lines.append(
        f"\nSeconds of the proof: {seconds:.1f}; by the estimate {expected:.1f}"
        f"{', with the measurement of rounding' if expected > price.seconds else ''}; of a step "
        f"{found[0]['step_seconds']:.1f}, by the estimate {price.step:.1f}."
    )
    print("\n".join(lines))
    if given.blocks == 22:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
