"""Idle share of pipeline schedules: measured on real ranks with equal stages, beside the formula of each.

Each block sleeps in forward, in the gradient of its input and in that of its weights, as long in each: ranks need no
core while they sleep, so
that four of them can be told apart on two cores. What a rank does is timed action by action; idle is what is left of
the time between the
start of the first and the end of the last rank.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from bench.ranks import run
from meshwright.runtime.weight_gradients import weight_gradient

RESULTS = Path(__file__).parent / "results"
RANKS, MICRO_BATCHES, BLOCKS, WIDTH = 4, 20, 8, 8
NAP = 0.02
"""Seconds of one block's forward; its backward takes twice as long."""

SCHEDULES = ("gpipe", "1f1b", "interleaved2", "zbh1", "zbv", "dualpipev")


def formula(schedule: str, p: int, m: int) -> float:
    """Idle share of equal stages whose forward and both halves of backward take the same."""
    idle = {"gpipe": 3.0, "1f1b": 3.0, "interleaved2": 1.5, "zbh1": 1.0, "zbv": 0.5, "dualpipev": 0.5}[schedule] * (
        p - 1
    )
    return idle / (3.0 * m + idle)


class Nap(torch.autograd.Function):
    """Sleeps on the way there and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        time.sleep(NAP)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(NAP if hasattr(ctx.block.product, "put_off") else 2 * NAP)
        return gradient, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return Nap.apply(self.product(hidden_states), self)


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Measured(NamedTuple):
    """On one rank: when it began and ended, and seconds that it did something."""

    began: float
    ended: float
    busy: float


def measure(plan: str) -> list[Measured]:
    """On every rank: three steps, of which the first is not counted."""
    from meshwright.analysis.graph import ModelGraph
    from meshwright.train.trainer import parallelize

    torch.manual_seed(0)
    anatomy = ModelGraph(blocks="blocks", count=BLOCKS, embedding="embedding", head="head", vocabulary=16)
    trainer = parallelize(Sleeper(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), plan, anatomy=anatomy)
    pipeline = trainer.engine.pipeline
    for module in trainer.engine.model.modules():
        if hasattr(module, "put_off"):
            module.put_off = sleeping(*module.put_off.args)  # type: ignore[assignment, union-attr, arg-type]
    ids = torch.randint(16, (1, 4), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": ids} for _ in range(MICRO_BATCHES)]
    found = []
    for _ in range(3):
        trainer.engine.zero.begin_step(len(batches))
        dist.barrier()
        began = time.monotonic()
        pipeline.run(batches, 1.0)
        found.append(Measured(began, ended := time.monotonic(), ended - began - pipeline.wire.meter.wait_timer.read()))
        trainer.engine.zero.finish_gradients()
    trainer.close()
    return found[1:]


def sleeping(backlog: Any, name: str, linear: bool) -> Any:
    """W of a block: it sleeps, then multiplies."""

    def make(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return weight_gradient(x, gradient, linear)

    return lambda x, gradient: backlog.add(name, lambda: make(x, gradient))


def share(ranks: list[list[Measured]]) -> float:
    """Idle share over all ranks, the least of the steps."""
    found = []
    for step in zip(*ranks, strict=True):
        whole = max(one.ended for one in step) - min(one.began for one in step)
        found.append(1.0 - sum(one.busy for one in step) / (whole * len(step)))
    return min(found)


def main(arguments: list[str]) -> None:
    rows = []
    for schedule in arguments or SCHEDULES:
        plan = f"pp{RANKS}" + ("" if schedule == "1f1b" else f".{schedule}")
        rows.append(
            {
                "schedule": schedule,
                "formula": formula(schedule, RANKS, MICRO_BATCHES),
                "measured": share(run(RANKS, measure, plan)),
            }
        )
        print(f"{schedule:14} formula {rows[-1]['formula']:6.1%}  measured {rows[-1]['measured']:6.1%}", flush=True)
    if not arguments:
        write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    lines = ["| schedule | formula | measured | difference, points |", "|---|---|---|---|"]
    lines += [
        f"| {row['schedule']} | {row['formula']:.1%} | {row['measured']:.1%} | "
        f"{100 * (row['measured'] - row['formula']):+.1f} |"
        for row in rows
    ]
    about = (
        f"{RANKS} pipeline ranks, {MICRO_BATCHES} micro-batches, {BLOCKS} blocks that sleep {NAP * 1e3:g} ms in "
        "forward and in each half of backward: processes on one machine, messages through shared memory. Idle is the "
        "time in which a rank waits for another."
    )
    (RESULTS / "pipeline.md").write_text(
        "# Idle share of pipeline schedules\n\n" + about + "\n\n" + "\n".join(lines) + "\n"
    )
    (RESULTS / "pipeline.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main([])
