"""The time of a training step while it is recorded, in relation to the same step without a recording.

Both run in alternation, step by step, so that the load of the machine cancels. The table has the median and the
quartiles of the paired ratios. The recording is without tensors. The last column compares a loop inside a context whose
steps are already recorded with a loop without a context: a recording that is off must cost nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.interop.recording.recorder import recording
from meshwright.models.registry import build_reference_model

RESULTS = Path(__file__).parent / "results"
SIZES = {
    "llama, hidden 128": {"kind": "llama", "layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 352},
    "llama, hidden 512": {"kind": "llama", "layers": 2, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408},
}


def build(sizes: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model and its optimizer."""
    torch.manual_seed(0)
    given = {"vocab": 2048, "seq": 128, "head_dim": sizes["hidden"] // sizes["heads"], **sizes}
    model = build_reference_model(given)
    return model, torch.optim.AdamW(model.parameters(), 1e-4)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    """Runs a training step. Returns its seconds."""
    begin = time.perf_counter()
    optimizer.zero_grad()
    output = model(ids)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    return time.perf_counter() - begin


def measure(sizes: dict[str, Any], pairs: int) -> dict[str, list[float]]:
    """Returns the paired ratios of recorded and plain steps, and of steps after a recording and plain steps."""
    ids = torch.randint(0, 2048, (8, 128), generator=torch.Generator().manual_seed(0))
    plain, recorded, off = build(sizes), build(sizes), build(sizes)
    with tempfile.TemporaryDirectory() as folder:
        for each in (plain, recorded, off):
            step(*each, ids)
        with recording(f"{folder}/off", off[0], steps=1):
            step(*off, ids)
            step(*off, ids)
            with recording(f"{folder}/on", recorded[0], steps=pairs + 1):
                step(*recorded, ids)
                rows = [(step(*plain, ids), step(*recorded, ids), step(*off, ids)) for _ in range(pairs)]
    return {"recorded": [on / base for base, on, _ in rows], "off": [after / base for base, _, after in rows]}


def main(arguments: list[str]) -> None:
    """Measures, prints a table and writes `results/recording.md` and `.json`."""
    parser = argparse.ArgumentParser(prog="bench recording")
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = ["| model | recorded / plain | after the recording / plain | pairs |", "|---|---|---|---|"]
    found: dict[str, Any] = {}
    for name, sizes in SIZES.items():
        ratios = measure(sizes, given.pairs)
        found[name] = {key: statistics.quantiles(values, n=4) for key, values in ratios.items()}
        shown = [f"{two:.2f} ({one:.2f} to {three:.2f})" for one, two, three in found[name].values()]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} | {given.pairs} |")
        print(lines[-1], flush=True)
    title = (
        "# Overhead of a recording\n\nMedian and quartiles of paired ratios of step times, one thread, no tensors.\n"
    )
    (RESULTS / "recording.md").write_text("\n".join([title, *lines]) + "\n", encoding="utf-8")
    (RESULTS / "recording.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
