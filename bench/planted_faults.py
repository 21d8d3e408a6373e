"""Faults in a plan, each a way in which ranks could train another model. They are made after `parallelize`, some on one
rank only (`here`): a broken card, a lost message. The tests of the proof plant them in small models
(tests/ranks/test_proof_faults.py), and bench/proof_faults.py in a model of 1.1 B parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.train.trainer import Trainer

BLOCK = "model.layers.1"
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


def frozen_by_mistake(trainer: Trainer) -> None:
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
