"""Seconds of a proof run (train/proof.py): a few rows under the plan, and again as one device would compute them on one rank.

one device   forward, forward again and backward of the rows: 4 times their forward, at the rate of one rank
traffic      whole weights for both forwards, and whole gradients once: all-reduces of all parameters over all ranks, which write and read their buffers
comparison   norms of both gradients and of their difference; below float32 sketches of one device's gradients in two precisions
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
FORWARDS = 2
"""Times that a pass of one device's side requests all weights."""
BUFFERED = 3
"""Times that the bytes of an all-reduce pass through memory beside it: zeros, own parts, the copy on rank 0."""
COMPARED, SKETCHED = 32, 16
"""Bytes through memory for each element of a gradient; measured on a CPU, whose caches hold what lies between."""
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
    low = shared.recipe.size < 4
    rates = [shared.recipe.rate, "fp32"] if low else [shared.recipe.rate]
    one = sum(PASSES * part * model_flops(job) / sustained(shared, rate) for rate in rates)
    high_bytes = float(job.model.parameters * max(shared.recipe.size, 4))
    sent = [high_bytes] * (FORWARDS + 1) + [float(job.model.parameters * shared.recipe.size)] * FORWARDS * low
    reduce = sum(float(group(shared.fabric, plan.world, 1).reduce(size)) for size in sent)
    touched = BUFFERED * sum(sent) + job.model.parameters * (COMPARED + 2 * SKETCHED * low)
    return CONTENTS * (one + PLANNED * part * step) + 2 * (reduce + touched / shared.device.bandwidth)
