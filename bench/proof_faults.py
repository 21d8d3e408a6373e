"""Faults in a plan of a 1.1 B model: the proof run at full size finds each of them and names the place.

python -m bench.proof_faults                       # TinyLlama 1.1B on 4 ranks of this machine, every fault
python -m bench.proof_faults --blocks 3            # the same with fewer blocks, to try
python -m bench.proof_faults --only flipped,stale  # faults whose name contains one of these words

With all 22 blocks each fault appends a line to bench/results/proof_faults_1b.jsonl, and a later call continues there.
The last one writes bench/results/proof_faults_1b.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.planted_faults import (
    BLOCK,
    Fault,
    block_in_bfloat16,
    detached_block,
    doubled_norm,
    doubled_sum_over_ranks,
    flipped_bit_on_a_rank,
    frozen_by_mistake,
    lost_all_reduce_of_a_norm,
    lost_gradient_of_a_replica,
    lost_gradient_of_the_embedding,
    lost_label,
    lost_residual,
    mean_of_means,
    norm_of_a_slice,
    own_weight,
    reversed_gradient,
    scaled_gradient_of_a_replica,
    skipped_micro_batch,
    stale_weight_of_the_last_stage,
    wrong_frequencies_on_a_rank,
    wrong_label_shift,
    wrong_positions,
    wrong_shard_of_a_column,
)
from bench.proof import SIZES, model_of
from bench.ranks import run
from meshwright.core.errors import InputError
from meshwright.train.trainer import Trainer, parallelize

RESULTS = Path(__file__).parent / "results"
TABLE, LINES = RESULTS / "proof_faults_1b.md", RESULTS / "proof_faults_1b.jsonl"
HEAD_WIDTH = 64


def wrong_order_of_heads(trainer: Trainer) -> None:
    own = own_weight(trainer, f"{BLOCK}.self_attn.q_proj.weight")
    own.copy_(own.roll(HEAD_WIDTH, 0))


FAULTS: tuple[tuple[Fault, str, str], ...] = (
    (wrong_shard_of_a_column, "tp4.mb4", f"{BLOCK}.mlp.up_proj"),
    (wrong_order_of_heads, "tp4.mb4", f"{BLOCK}.self_attn.q_proj"),
    (doubled_sum_over_ranks, "tp4.mb4", f"{BLOCK}."),
    (lost_label, "tp4.mb4", "labels"),
    (lost_all_reduce_of_a_norm, "tp4.sp.mb4", "norm"),
    (norm_of_a_slice, "tp4.sp.mb4", f"{BLOCK}.input_layernorm"),
    (doubled_norm, "dp4.z3.mb1", f"{BLOCK}.post_attention_layernorm"),
    (flipped_bit_on_a_rank, "dp4.z3.mb1", f"{BLOCK}.mlp.down_proj"),
    (wrong_frequencies_on_a_rank, "dp4.z3.mb1", "model."),
    (block_in_bfloat16, "dp4.z3.mb1", f"{BLOCK}.mlp"),
    (scaled_gradient_of_a_replica, "dp4.z3.mb1", f"{BLOCK}.mlp.down_proj.weight"),
    (lost_gradient_of_a_replica, "dp4.z3.mb1", "model.norm.weight"),
    (lost_gradient_of_the_embedding, "dp4.z3.mb1", "model.embed_tokens.weight"),
    (frozen_by_mistake, "dp4.z3.mb1", "model.norm.weight"),
    (skipped_micro_batch, "dp4.z3.mb1", "embed_tokens"),
    (mean_of_means, "dp4.z3.mb1", "the loss"),
    (wrong_label_shift, "dp4.z3.mb1", "the loss"),
    (reversed_gradient, "dp4.z3.mb1", f"{BLOCK}.mlp"),
    (lost_residual, "pp4.mb1", f"{BLOCK}.mlp"),
    (detached_block, "pp4.mb1", f"{BLOCK}.mlp"),
    (stale_weight_of_the_last_stage, "pp4.mb1", "lm_head"),
    (wrong_positions, "cp4.z3.mb4", f"{BLOCK}.self_attn"),
)


def prove_with(fault: Fault, plan: str, models: list[nn.Module], length: int) -> tuple[bool, str, float]:
    """On every rank. Returns whether the proof found the plan equal, what it says, and its seconds. `models` holds the
    one model: the ranks are forked, so that it is in memory once."""
    trainer = parallelize(
        models.pop(), lambda parameters: torch.optim.SGD(parameters, lr=1e-3), plan, precision="fp32", prove="start"
    )
    trainer.engine.preflight.skip()
    fault(trainer)
    rows = 8
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4 + 1] = -100  # so that the numbers of labels differ
    began = time.perf_counter()
    try:
        proof = trainer.prove({"input_ids": ids, "labels": labels})
    except InputError as error:  # refused before anything is compared
        return False, str(error), time.perf_counter() - began
    return proof.equal, proof.line, proof.seconds


def write_table(found: dict[str, dict[str, Any]], length: int) -> None:
    """Writes the table of all faults."""
    places = {fault.__name__: place for fault, _, place in FAULTS}
    good = [name for name, each in found.items() if not each["equal"] and places[name] in each["line"]]
    lines = [
        "# Faults that the proof run finds in a 1.1 B model\n",
        f"TinyLlama 1.1B, fp32, rows of {length} tokens, 4 ranks. By `python -m bench.proof_faults`. "
        f"{len(good)} of {len(FAULTS)} found, with their places.\n",
        "| fault | plan | what the proof says | seconds |",
        "|---|---|---|---|",
    ]
    for fault, plan, _ in FAULTS:
        name = fault.__name__
        said = found[name]["line"].replace("|", "/") or "equal"
        mark = "" if name in good else "NOT FOUND: "
        lines.append(f"| {name.replace('_', ' ')} | `{plan}` | {mark}{said} | {found[name]['seconds']:.0f} |")
    TABLE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    whole = given.blocks == 22
    found = {each["fault"]: each for each in map(json.loads, LINES.read_text().splitlines())} if LINES.exists() else {}
    words = given.only.split(",")
    for fault, plan, place in FAULTS:
        name = fault.__name__
        if (whole and name in found) or not any(word in name for word in words):
            continue
        models = [model_of(given.blocks, torch.float32)]
        equal, line, seconds = run(4, prove_with, fault, plan, models, given.length, timeout=3600.0)[0]
        is_found = not equal and place in line
        print(f"{name} under {plan}, {seconds:.0f} s: {'' if is_found else 'NOT FOUND: '}{line or 'equal'}", flush=True)
        if whole:
            found[name] = {"fault": name, "plan": plan, "equal": equal, "line": line, "seconds": seconds}
            with LINES.open("a") as file:
                file.write(json.dumps(found[name]) + "\n")
    if whole and len(found) == len(FAULTS):
        write_table(found, given.length)
        LINES.unlink()


if __name__ == "__main__":
    main()
