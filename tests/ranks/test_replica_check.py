"""Copies of one state that are compared and mended: nobody goes on with anything that came from the wrong one."""

from __future__ import annotations

import torch
from equality import anatomy_of, make_batch, make_model, make_optimizer
from pool import Pool

from meshwright.train.silent_corruption import compare_replicas
from meshwright.train.trainer import parallelize


def mended(plan: str) -> tuple[list[str], bytes]:
    """What was found after a bit had flipped in the states of the last rank before an update; this rank's weights
    then."""
    trainer = parallelize(make_model("llama"), make_optimizer, plan, anatomy=anatomy_of("llama"))
    trainer.step(make_batch("llama", 0, 6))
    if trainer.mesh.rank == trainer.plan.world - 1:
        data = max((unit.optim_shard.flat for unit in trainer.engine.zero.units), key=torch.numel).view(torch.int32)
        data[data.numel() // 3] ^= 1 << 20
    trainer.passes.invariants = None  # whose window had not come to that bit
    trainer.step(make_batch("llama", 1, 6))
    found = compare_replicas(trainer)
    return [each.what for each in found], b"".join(
        unit.weights.full.numpy().tobytes() for unit in trainer.engine.zero.units
    )


def test_weights_gathered_from_a_wrong_replica_are_gathered_again_after_repair(ranks: Pool) -> None:
    found = ranks.run(6, mended, "dp3x2.z1")
    assert all(said and said == found[0][0] for said, _ in found)
    assert len({weights for _, weights in found}) == 1
