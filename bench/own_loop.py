"""CPU time of a step of README's own loop on one rank, as a ratio to plain PyTorch.

Both loops train the model of README's `train.py` in one process, in turns of TURN steps in random order. The loops have
the same weights, optimizer and batches, and must have the same losses.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import meshwright as mw
from bench.peers import machine, spread, write
from bench.ranks import run

README = Path(__file__).parents[1] / "README.md"
TURN = 20
SIZES = ((8, 32), (32, 128), (64, 256))
LOSS_TOLERANCE = 1e-5


def readme_model() -> nn.Module:
    """The model of the program in README, with the weights of seed 1."""
    program = next(
        block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "class Net" in block
    )
    names: dict[str, Any] = {}
    exec(program[: program.index("torch.distributed.init_process_group")], names)
    torch.manual_seed(1)
    return names["Net"]()


class PlainLoop:
    """The loop that a user of plain PyTorch writes."""

    def __init__(self) -> None:
        self.model = readme_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = cross_entropy(self.model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class MeshwrightLoop:
    """The loop of README under a plan of one rank."""

    def __init__(self) -> None:
        self.trainer = mw.parallelize(
            readme_model(), optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3), plan="dp1"
        )

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        return self.trainer.step(batch).loss


def measure(rows: int, tokens: int, turns: int) -> dict[str, Any]:
    """CPU milliseconds of a step in both loops, by turn. Raises RuntimeError if the losses of the first turn differ."""
    torch.set_num_threads(1)
    loops: dict[str, PlainLoop | MeshwrightLoop] = {"plain": PlainLoop(), "meshwright": MeshwrightLoop()}
    order = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(turns + 1):
        batches = torch.randint(256, (TURN, rows, tokens), generator=torch.Generator().manual_seed(turn))
        losses = {}
        for name in order.sample(sorted(loops), 2):
            began = time.process_time()
            losses[name] = [loops[name].step({"ids": ids, "labels": (ids + 1) % 256}) for ids in batches]
            if turn:  # the first turn analyses the model
                taken[name].append((time.process_time() - began) / TURN * 1e3)
        # Later losses differ by more: AdamW amplifies the rounding of float32, here by ten every twenty steps.
        if not turn and any(abs(mine - plain) > LOSS_TOLERANCE for mine, plain in zip(*losses.values(), strict=True)):
            raise RuntimeError(f"the losses differ: {losses}")
    return {"rows": rows, "tokens": tokens, **{name: spread(values) for name, values in taken.items()}} | {
        "ratio": spread([mine / plain for mine, plain in zip(taken["meshwright"], taken["plain"], strict=True)])
    }


def main(arguments: list[str] | None = None) -> int:
    asked = argparse.ArgumentParser(prog="python -m bench own-loop", description=__doc__)
    asked.add_argument("--turns", type=int, default=25, help=f"turns of {TURN} steps for each loop and size")
    options = asked.parse_args(arguments)
    found = [run(1, measure, *size, options.turns)[0] for size in SIZES]
    lines = ["| rows x tokens | plain PyTorch, ms | Meshwright, ms | ratio [quartiles] |", "|---|---|---|---|"]
    for row in found:
        low, middle, high = row["ratio"]
        lines.append(
            f"| {row['rows']} x {row['tokens']} | {row['plain'][1]:.2f} | {row['meshwright'][1]:.2f} | "
            f"{middle:.3f} [{low:.3f}, {high:.3f}] |"
        )
    report = {"machine": machine(), "workload": {"turns": options.turns, "steps of a turn": TURN}, "rows": found}
    note = "CPU time of a step of README's `train.py` under `dp1`, medians. The first size is that of README."
    write("own_loop", "README's own loop on one rank", report, ["\n".join(lines)], note)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
