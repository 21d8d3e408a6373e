"""Defines what the memory figure of a published measurement means, and predicts a figure of this meaning.

[Note: nanotron's figure] The Ultra-Scale tables state one memory figure per run. It is the bytes that torch's allocator
reserves on rank 0. nanotron prints this value and the peak of allocated bytes (huggingface/nanotron, branch
nouamane/bench2, src/nanotron/helpers.py:615-616). It resets both peaks after backward (logging.py:259, trainer.py:513),
so the second value does not contain activations, and the figures of the tables do. Reserved bytes depend on more than
allocated bytes:

- Tensor ranks share two buffers for gathered tensors, each with a whole hidden state (parallel/utils.py:14,
  parallel/tensor_parallel/functional.py:154 and 491).
- The allocator reuses a freed tensor that a collective of another stream reads only after this collective has run
  (`record_stream`). Without a pipeline, the host launches a whole forward without waiting for the device. So the
  outputs of all row-parallel products of a forward, two per block, exist before their reduce-scatters have run
  (functional.py:469). A pipeline waits for the device at each message (parallel/pipeline_parallel/p2p.py:391).
- ZeRO 1 gathers all weights in one message (distributed.py:202), which NCCL needs as one block. No freed activation is
  that large, so the allocator reserves this block in addition.
- Without a pipeline, each micro-batch allocates tensors of the same sizes in the same order, so freed memory fits
  again. With a pipeline, several micro-batches are in flight, and the overhead is that of other pipeline stages
  (ALLOCATOR_OVERHEAD).
"""

from __future__ import annotations

from enum import StrEnum

from meshwright.planner.cost.constants import ALLOCATOR_OVERHEAD, USABLE_MEMORY_FRACTION
from meshwright.planner.validation.tables import MeasurementRow
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan


class MemoryMeter(StrEnum):
    """The meaning of the memory figure in a published measurement: which bytes it counts, and on which rank."""

    first = "peak reserved on rank 0"
    last = "peak allocated on the last rank"
    peak_rank = "peak allocated, peak rank"
    reserved = "peak reserved, peak rank"
    device = "whole device (nvidia-smi)"


def memory_meter(row: MeasurementRow) -> MemoryMeter | None:
    """Returns the meaning of the figure in the column `mem_gb`, or None if it is missing or not a measurement. If the
    source does not name the kind of a peak, it is the kind that the framework prints. torchtitan prints reserved bytes
    (pytorch/torchtitan torchtitan/components/metrics.py:531). For rank 0, see [Note: nanotron's figure]."""
    kind = row.text("mem_kind").lower()
    if not kind or "analytic" in kind or "formula" in kind:
        return None
    if "last rank" in kind:
        return MemoryMeter.last
    if "rank-0" in kind or "rank 0" in kind:
        return MemoryMeter.first
    if "reserved" in kind or ("torchtitan" in row.text("system") and "allocated" not in kind):
        return MemoryMeter.reserved
    if "nvidia-smi" in kind:
        return MemoryMeter.device
    return MemoryMeter.peak_rank


def predicted_memory(meter: MemoryMeter | None, job: Job, plan: Plan, estimate: Estimate) -> float:
    """Returns the predicted bytes of `plan`, in the quantity that `meter` measures."""
    stages, busiest = estimate.per_stage, estimate.memory
    match meter:
        case MemoryMeter.first:
            return _first_rank_reserved_bytes(job, plan, estimate)
        case MemoryMeter.last:
            return stages[-1].total
        case MemoryMeter.reserved:
            return busiest.reserved - busiest.driver
        case MemoryMeter.device:
            return busiest.reserved
    return busiest.total


def _first_rank_reserved_bytes(job: Job, plan: Plan, estimate: Estimate) -> float:
    """Returns the bytes that the allocator of rank 0 reserves ([Note: nanotron's figure])."""
    first, device = estimate.per_stage[0], job.cluster.groups[0].device
    hidden = plan.micro_batch * job.workload.sequence * job.model.hidden * job.workload.recipe.size * (plan.tp > 1)
    found = first.total + 2 * hidden
    if plan.pp > 1:
        found *= ALLOCATOR_OVERHEAD
    else:
        found += 2 * job.model.blocks * hidden
    if plan.zero:
        found += first.parameters
    return min(found, device.memory * USABLE_MEMORY_FRACTION - device.context)
