"""What tensor parallelism costs beside the same local work: CPU time of a step with tp 2 over that of a plain model of
a rank's own sizes.

The plain model has half of the heads, of the inner features and of the vocabulary, whole hidden states, and no
collectives: what a rank computes in any
case. Beside it ours (`tp2`) and DTensor's `parallelize_module` with its loss over shares. A step is forward, backward
and AdamW on both ranks at
once; the systems take turns; a ratio is of one round. CPU time is of the process, so that waiting for another program
does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from bench.peers import batch_of, machine, spread, write
from bench.ranks import run
from bench.systems import Batch, Setting, Sizes, ours, shifted_loss, tensor_parallel

SMALL = Sizes(layers=4, hidden=256, heads=8, ffn=512, vocab=512, sequence=64, batch=8)
RANKS = 2
STEPS = 5
"""Of each system in a round."""


def local_work(setting: Setting) -> Callable[[Batch], Any]:
    """The step of a plain model of a rank's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = setting.sizes
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn // RANKS,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads // RANKS,
        num_key_value_heads=sizes.heads // RANKS,
        head_dim=sizes.hidden // sizes.heads,
        vocab_size=sizes.vocab // RANKS,
        max_position_embeddings=sizes.sequence,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    optimizer = setting.optimizer(model.parameters())

    def step(batch: Batch) -> None:
        ids = batch["input_ids"] % config.vocab_size
        shifted_loss(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(setting: Setting, rounds: int) -> dict[str, list[float]]:
    """On every rank: CPU seconds a step of each system, round by round."""
    torch.set_num_threads(1)
    steps = {
        "plain": local_work(setting),
        "tp2": ours(setting, f"tp2.mb{setting.sizes.batch}"),
        "DTensor": tensor_parallel(setting),
    }
    batch = batch_of(setting.sizes, 0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(rounds + 1):
        for name, step in steps.items():
            begin = time.process_time()
            for _ in range(STEPS):
                step(batch)
            if at:  # the first round warms
                seconds[name].append((time.process_time() - begin) / STEPS)
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args(arguments)
    first = run(RANKS, measure, Setting(SMALL, "huggingface"), given.rounds)[0]
    lines = ["| system | CPU ms a step | over the plain step [quartiles] |", "|---|---|---|"]
    found: dict[str, Any] = {}
    for name, seconds in first.items():
        low, middle, high = spread([mine / plain for mine, plain in zip(seconds, first["plain"], strict=True)])
        found[name] = {"seconds": seconds, "ratio": [low, middle, high]}
        lines.append(f"| {name} | {1e3 * spread(seconds)[1]:.1f} | {middle:.2f} [{low:.2f}, {high:.2f}] |")
    print("\n".join(lines))
    report = {
        "machine": machine(),
        "workload": {**asdict(SMALL), "ranks": RANKS, "rounds": given.rounds},
        "systems": found,
    }
    write(
        "tensor",
        "Tensor parallelism beside the same local work",
        report,
        ["\n".join(lines)],
        "`python -m bench tensor`:",
    )


if __name__ == "__main__":
    main()
