"""Faults in a plan of a 1.1 B model: the proof run at full size finds each of them and names the place.

python -m bench.proof_faults                       # TinyLlama 1.1B on 4 ranks of this machine, every fault
python -m bench.proof_faults --blocks 3            # the same with fewer blocks, to try
python -m bench.proof_faults --only flipped,stale  # faults whose name contains one of these words

With all 22 blocks each fault appends a line to bench/results/proof_faults_1b.jsonl, and a later call continues there.
The last one writes bench/results/proof_faults_1b.md.

A fault is made after `parallelize`, on ranks that have the model, its weights and its links as in training. Some exist
on one rank only (`here`): a broken card, a lost message.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.proof import SIZES, model_of
from bench.ranks import run
from meshwright.train.trainer import Trainer, parallelize

RESULTS = Path(__file__).parent / "results"
TABLE, LINES = RESULTS / "proof_faults_1b.md", RESULTS / "proof_faults_1b.jsonl"
BLOCK = "model.layers.1"
HEAD_WIDTH = 64
Fault = Callable[[Trainer], None]


def here(trainer: Trainer) -> bool:
    """Returns whether this is the last rank: of the last stage, and of the last replica."""
    return trainer.mesh.rank == trainer.plan.world - 1


def own_weight(trainer: Trainer, name: str) -> torch.Tensor:
    """Returns this rank's part of a weight that is not sharded over replicas."""
    unit = next(unit for unit in trainer.engine.zero.units if name in unit.parameters)
    return unit.layout.view(unit.weights.full, name).data


def parameter(trainer: Trainer, name: str) -> nn.Parameter:
    """Returns the parameter that the module computes with."""
    return next(unit.parameters[name] for unit in trainer.engine.zero.units if name in unit.parameters)


def has(trainer: Trainer, path: str) -> bool:
    """Returns whether the stage of this rank contains the module."""
    return path in dict(trainer.engine.model.named_modules())


def change_output(trainer: Trainer, path: str, change: Callable[[Any, Any], Any]) -> None:
    """Replaces the output of a module by `change(input, output)`, on the ranks that have it."""
    if has(trainer, path):
        module = trainer.engine.model.get_submodule(path)
        module.register_forward_hook(lambda module, args, output: change(args[0], output))


def wrong_shard_of_a_column(trainer: Trainer) -> None:
    own = own_weight(trainer, f"{BLOCK}.mlp.up_proj.weight")
    own.copy_(own.flip(0))


def wrong_order_of_heads(trainer: Trainer) -> None:
    own = own_weight(trainer, f"{BLOCK}.self_attn.q_proj.weight")
    own.copy_(own.roll(HEAD_WIDTH, 0))


def doubled_sum_over_ranks(trainer: Trainer) -> None:
    change_output(trainer, f"{BLOCK}.self_attn.o_proj", lambda given, output: output * 2)


def lost_label(trainer: Trainer) -> None:
    objective = trainer.engine.objective
    inner = objective.count
    objective.count = lambda batch: inner(batch) - 1  # type: ignore[method-assign]


def lost_all_reduce_of_a_norm(trainer: Trainer) -> None:
    trainer.engine.zero._partial.clear()


def norm_of_a_slice(trainer: Trainer) -> None:
    if here(trainer):
        change_output(trainer, f"{BLOCK}.input_layernorm", lambda given, output: output * 1.01)


def doubled_norm(trainer: Trainer) -> None:
    change_output(trainer, f"{BLOCK}.post_attention_layernorm", lambda given, output: output * 2)


def flipped_bit_on_a_rank(trainer: Trainer) -> None:
    """The exponent of one element changes in the gathered weight of one rank."""
    if here(trainer):

        def flip(module: nn.Module, args: Any) -> None:
            bits = module.weight.data.view(torch.int32)
            bits.view(-1)[7] ^= 1 << 25  # 16 times the weight

        trainer.engine.model.get_submodule(f"{BLOCK}.mlp.down_proj").register_forward_pre_hook(flip)


def wrong_frequencies_on_a_rank(trainer: Trainer) -> None:
    if here(trainer):
        trainer.engine.model.get_submodule("model.rotary_emb").inv_freq.mul_(1.01)  # type: ignore[operator, union-attr]


def block_in_bfloat16(trainer: Trainer) -> None:
    change_output(trainer, f"{BLOCK}.mlp", lambda given, output: output.bfloat16().float())


def scaled_gradient_of_a_replica(trainer: Trainer) -> None:
    if here(trainer):
        parameter(trainer, f"{BLOCK}.mlp.down_proj.weight").register_hook(lambda gradient: gradient * 1.1)


def lost_gradient_of_a_replica(trainer: Trainer) -> None:
    if here(trainer):
        parameter(trainer, "model.norm.weight").register_hook(torch.zeros_like)


def lost_gradient_of_the_embedding(trainer: Trainer) -> None:
    if here(trainer):
        parameter(trainer, "model.embed_tokens.weight").register_hook(torch.zeros_like)


def frozen_on_a_rank(trainer: Trainer) -> None:
    if here(trainer):
        parameter(trainer, "model.norm.weight").requires_grad_(False)


def skipped_micro_batch(trainer: Trainer) -> None:
    inner = trainer.engine.pipeline.run
    trainer.engine.pipeline.run = lambda batches, scale: inner([*batches[:-1], batches[0]], scale)  # type: ignore[method-assign]


def mean_of_means(trainer: Trainer) -> None:
    """Each micro-batch has the same weight, whatever its number of labels."""
    objective = trainer.engine.objective
    inner = objective.sum
    objective.sum = lambda output, batch: inner(output, batch) / max(objective.count(batch), 1) * 2.0  # type: ignore[method-assign]


def wrong_label_shift(trainer: Trainer) -> None:
    trainer.engine.objective.shift = False


def reversed_gradient(trainer: Trainer) -> None:
    def reverse(given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        output.register_hook(torch.neg)
        return output

    change_output(trainer, f"{BLOCK}.mlp", reverse)


def lost_residual(trainer: Trainer) -> None:
    change_output(trainer, f"{BLOCK}.mlp", lambda given, output: output - given)


def detached_block(trainer: Trainer) -> None:
    change_output(trainer, f"{BLOCK}.mlp", lambda given, output: output.detach())


def stale_weight_of_the_last_stage(trainer: Trainer) -> None:
    if here(trainer):
        own_weight(trainer, "lm_head.weight").mul_(0.99)


def wrong_positions(trainer: Trainer) -> None:
    change_output(trainer, f"{BLOCK}.self_attn.k_proj", lambda given, output: output.roll(1, 1))


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
    (frozen_on_a_rank, "dp4.z3.mb1", "model.norm.weight"),
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
    proof = trainer.prove({"input_ids": ids, "labels": labels})
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
