"""Seconds of a proof run (train/proof.py): a few rows under the plan, and again as one device would compute them on one rank.

one device   forward, forward again and backward of the rows: 4 times their forward, at the rate of one rank
traffic      whole weights for both forwards and whole gradients: three all-reduces of all parameters over all ranks
the plan     the rows as a part of a step, once more forward for its preflight
contents     twice: at the whole length of a row, and at half of it. Below float32 one device's side runs in two precisions
"""

from __future__ import annotations

from meshwright.cost.collectives import group
from meshwright.cost.products import sustained
from meshwright.cost.setting import setting
from meshwright.cost.step import model_flops
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.proof import ProofPrice, is_cheap
from meshwright.spec.rules import half_length, proof_rows

CONTENTS = 1.5
"""Of the whole length and of half of it."""
PASSES = 4 / 3
"""Forward passes of one device's side over those of a training step, where backward counts two."""
TRANSFERS = 3
"""All-reduces of all parameters: weights for two forward passes, gradients."""
PLANNED = 4 / 3
"""The same of the plan's side: its preflight passes forward once more."""


def proof_price(job: Job, plan: Plan, step: float) -> ProofPrice:
    """Seconds of a proof before the first update, of rows that are halved until it is cheap; `step`: seconds of a step by the estimate."""
    length = job.workload.sequence
    while not is_cheap(_seconds(job, plan, step, length), step) and (half := half_length(plan, length)):
        length = half
    return ProofPrice(seconds=_seconds(job, plan, step, length), step=step, length=length)


def _seconds(job: Job, plan: Plan, step: float, length: int) -> float:
    """Of a proof whose rows have `length` tokens."""
    shared, work = setting(job), job.workload
    part = min(proof_rows(plan) / work.batch, 1.0) * length / work.sequence
    rates = [shared.recipe.rate] if shared.recipe.size >= 4 else [shared.recipe.rate, "fp32"]
    one = sum(PASSES * part * model_flops(job) / sustained(shared, rate) for rate in rates)
    reduce = float(group(shared.fabric, plan.world, 1).reduce(float(job.model.parameters * max(shared.recipe.size, 4))))
    return CONTENTS * (one + PLANNED * part * step) + 2 * TRANSFERS * len(rates) * reduce
