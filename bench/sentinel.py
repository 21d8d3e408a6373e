"""What the sentinel and the guards cost: steps with and without them, in turn, on two ranks of this machine.

python -m bench.sentinel            # writes bench/results/sentinel.md
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from meshwright.models.registry import build
from meshwright.train.sentinel import Sentinel
from meshwright.train.trainer import parallelize

PAIRS, WARM = 16, 3
SIZES: dict[str, Any] = {
    "kind": "llama",
    "layers": 6,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 704,
    "vocab": 4096,
    "seq": 256,
    "tied": False,
}


def measured(rank: int, port: int, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = build(SIZES)
    elements = sum(parameter.numel() for parameter in model.parameters())
    trainer = parallelize(model, lambda given: torch.optim.AdamW(given, lr=1e-4), "dp2", prove="never")
    ids = torch.randint(0, SIZES["vocab"], (8, SIZES["seq"]), generator=torch.Generator().manual_seed(1))
    on, off = trainer.sentinel, Sentinel(None)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    own: list[float] = []
    sums = on.sums

    def timed(*given: Any) -> torch.Tensor:
        began = time.perf_counter()
        found = sums(*given)
        own.append(time.perf_counter() - began)
        return found

    on.sums = timed  # type: ignore[method-assign]
    for pair in range(PAIRS + WARM):
        for is_on in (True, False) if pair % 2 else (False, True):
            trainer.sentinel = on if is_on else off
            trainer.engine.preflight.steps = 4  # no checks of first steps
            began = time.perf_counter()
            trainer.step({"input_ids": ids, "labels": ids})
            if pair >= WARM:
                seconds[is_on].append(time.perf_counter() - began)
    if rank == 0:
        out.put((elements, seconds, own[WARM:]))
    dist.destroy_process_group()


def main() -> None:
    context = processes.get_context("spawn")
    out = context.Queue()
    ranks = [context.Process(target=measured, args=(rank, 29731, out)) for rank in range(2)]
    for each in ranks:
        each.start()
    elements, seconds, own = out.get()
    for each in ranks:
        each.join()
    with_it, without = median(seconds[True]), median(seconds[False])
    paired = median(one - other for one, other in zip(seconds[True], seconds[False], strict=True))
    text = (
        "# What the sentinel costs\n\n"
        f"llama of {elements / 1e6:.1f} M parameters, 8 rows of {SIZES['seq']} tokens, dp2 on 2 cores, float32; {PAIRS} pairs of steps with and without, in turn; "
        "medians. `python -m bench.sentinel`\n\n"
        "| | a step |\n|---|---|\n"
        f"| without | {without * 1e3:.1f} ms |\n| with | {with_it * 1e3:.1f} ms |\n| difference within pairs | {paired * 1e3:+.2f} ms ({paired / without:+.2%}) |\n"
        f"| time inside of the sentinel and the guards | {median(own) * 1e3:.2f} ms ({median(own) / without:.2%}) |\n"
    )
    Path(__file__).with_name("results").joinpath("sentinel.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
