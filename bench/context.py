"""Idle time of context ranks under a causal mask: each rank with its run of the sequence, beside each with a chunk from
front and back.

    python bench/context.py

Every rank's attention, forward and backward, is computed in one process, one rank after the other, and its processor
time taken. All wait for
the slowest: idle is 1 - mean / largest. By counting pairs, runs in order leave 1 - c / (2c - 1) of the time idle, two
chunks nothing.
"""

from __future__ import annotations

import math
import time

import torch

from meshwright.runtime.context_parallel import kernels
from meshwright.runtime.context_parallel.blocks import HeadTailSplit
from meshwright.runtime.context_parallel.ring import MaskBlock, MaskBlocks

RANKS, LENGTH, HEADS, WIDTH, REPEATS = 4, 4096, 4, 64, 3
_ALL = slice(None)


def in_order(index: int, source: int) -> MaskBlock | None:
    """What rank `index` sees of rank `source` when each holds one run of the sequence."""
    return None if source > index else MaskBlock(_ALL, _ALL, causal=source == index)


def seconds(blocks: list[MaskBlock | None]) -> float:
    """Processor time of one rank's attention over all pieces, the least of several."""
    piece = LENGTH // RANKS
    query, key, value = (torch.randn(1, HEADS, piece, WIDTH) for _ in range(3))
    least = math.inf
    for _ in range(REPEATS):
        began = time.process_time()
        merged = kernels.LseMerge(query, WIDTH)
        parts = [
            (
                block,
                kernels.PartialAttention(
                    query[..., block.rows, :],
                    key[..., block.columns, :],
                    value[..., block.columns, :],
                    WIDTH**-0.5,
                    block.causal,
                ),
            )
            for block in blocks
            if block is not None
        ]
        for block, part in parts:
            merged.add(block.rows, *kernels.attention_forward(part))
        output, total = merged.result()
        for block, part in parts:
            kernels.attention_backward(
                part, output[..., block.rows, :], output[..., block.rows, :], total[..., block.rows]
            )
        least = min(least, time.process_time() - began)
    return least


def main() -> None:
    torch.set_num_threads(1)
    sights = [MaskBlocks(HeadTailSplit(RANKS, rank), True, None, LENGTH) for rank in range(RANKS)]
    layouts = {
        "one run each": [seconds([in_order(rank, source) for source in range(RANKS)]) for rank in range(RANKS)],
        "front and back": [seconds([sight.of(source, torch.float32) for source in range(RANKS)]) for sight in sights],
    }
    print(f"{RANKS} ranks, {LENGTH} positions, {HEADS} heads of {WIDTH}, float32, milliseconds of each rank")
    for name, found in layouts.items():
        idle = 1 - sum(found) / len(found) / max(found)
        print(
            f"  {name:15} {'  '.join(f'{1e3 * each:6.1f}' for each in found)}   idle {idle:5.1%}   step "
            f"{1e3 * max(found):6.1f}"
        )


if __name__ == "__main__":
    main()
