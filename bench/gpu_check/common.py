"""What the parts of `make gpu-check` share: claims, the device and its cluster, jobs, and a timed training run."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import meshwright as mw
from meshwright.core.errors import NothingFits
from meshwright.models.registry import build_reference_model
from meshwright.planner.cost.calibration import calibrate
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.runtime.profiler.device import measure_cluster
from meshwright.spec.cluster import Cluster
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
WARM_STEPS = 3
MEMORY_TOLERANCE, STEP_TOLERANCE = 0.05, 0.10
"""Largest relative difference between a measured value and its estimate."""

TINY: dict[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 192, "vocab": 512, "seq": 64,
}  # fmt: skip
"""The model that `--cpu` trains."""


@dataclass(frozen=True)
class Claim:
    """One line of a part: what is claimed, the measured figure, and whether the figure meets the claim. `met` is None
    for a figure without a goal. If `required`, a miss makes the exit code 1; speed goals are not required."""

    text: str
    figure: str
    met: bool | None = None
    required: bool = True

    @property
    def verdict(self) -> str:
        return "-" if self.met is None else "met" if self.met else "MISSED" if self.required else "missed (goal)"


@dataclass
class Findings:
    """The claims of a part, and its figures as JSON data."""

    claims: list[Claim] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Writes the findings to the file `MESHWRIGHT_PART_FILE`. If the part is stopped later, this file remains."""
        found = {"claims": [asdict(claim) for claim in self.claims], "data": self.data}
        Path(os.environ["MESHWRIGHT_PART_FILE"]).write_text(json.dumps(found, default=str))

    def claim(self, text: str, figure: str, met: bool | None = None, required: bool = True) -> None:
        self.claims.append(Claim(text, figure, met, required))
        print(f"  {self.claims[-1].verdict} {text}: {figure}", file=sys.stderr, flush=True)


@dataclass
class Bench:
    """The device under test. `cluster_name`: the device by its name in the catalog. If `tiny`, the parts run a small
    model on the CPU, which tests the program and not a device."""

    device: torch.device
    cluster_name: str
    tiny: bool = False
    steps: int = 5
    limit: float = 600.0
    """Seconds that a part may take."""

    @property
    def name(self) -> str:
        return "the CPU" if self.tiny else torch.cuda.get_device_name(self.device)

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster of this device with measured rates: those of part A if it ran on this device, else of a probe."""
        if self.tiny:
            return read_cluster("1x1:cpu", measured=False)
        file = RESULTS / "device.json"
        if file.is_file() and (found := json.loads(file.read_text())).get("device") == self.name:
            return Cluster.model_validate(found["data"]["cluster"])
        return self.probe()

    def probe(self) -> Cluster:
        """Measures the device and returns its cluster with the measured rates."""
        threads = torch.get_num_threads()
        result = calibrate(measure_cluster(), read_cluster(self.cluster_name, measured=False))
        torch.set_num_threads(threads)  # the probe measures with one thread
        return result.cluster


def make_job(sizes: dict[str, Any], cluster: Cluster, batch: int, precision: str, compiled: bool = False) -> Job:
    """The job that trains a Llama model of `sizes` with `batch` sequences per step."""
    options = {
        "model.name": "llama-tiny", "model.sizes": sizes, "workload.batch": batch, "workload.sequence": sizes["seq"],
        "workload.precision": precision, "cluster.name": "local:1",
    }  # fmt: skip
    job = resolve_job(read_job(None, (), options)).but(cluster=cluster)
    return job.but(pins={**job.pins, "compile": compiled})


def choose_plan(job: Job) -> tuple[Plan, Estimate] | None:
    """The planner's best plan of one rank, or None if no plan fits."""
    try:
        entry = mw.plan(job, 1)[0]
    except NothingFits:
        return None
    return (entry.plan, entry.estimate) if entry.estimate.fits else None


def make_batch(sizes: dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(sizes["vocab"], (rows, sizes["seq"]), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def free_memory(device: torch.device) -> int:
    """Frees unused memory and resets the peak counter. Returns the bytes that are still allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@dataclass
class Measured:
    """One training run. `peak` and `reserved` (bytes) are 0 if the device does not count them. `seconds`: the median
    time of a step. `bytes`: the bytes of parameters, gradients and optimizer state."""

    losses: list[float]
    seconds: float
    bytes: dict[str, int]
    peak: int
    reserved: int


@contextmanager
def quick_init() -> Iterator[None]:
    """Replaces torch's random initialisation, of which 4 B parameters take a minute, by copies of one random block."""
    block = torch.randn(2**20, generator=torch.Generator().manual_seed(1))

    def normal_(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
        with torch.no_grad():
            for part in tensor.view(-1).split(block.numel()):
                part.copy_(block[: part.numel()]).mul_(std).add_(mean)
        return tensor

    with (
        patch("torch.nn.init.kaiming_uniform_", lambda tensor, *_, **__: tensor),
        patch("torch.nn.init.normal_", normal_),
    ):
        yield


def build_model(sizes: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(1)
    with quick_init() if sizes["hidden"] >= 1024 else nullcontext():
        kind = "decoder" if "experts" in sizes else "llama"
        return build_reference_model({"kind": kind, **sizes})


def make_trainer(sizes: dict[str, Any], plan: Plan | str, precision: Any, prove: Any = None, **optimizer: Any) -> Any:
    return mw.parallelize(
        build_model(sizes),
        optimizer=lambda params: torch.optim.AdamW(params, **({"lr": 3e-4} | optimizer)),
        plan=plan,
        precision=precision,
        clip=1.0,
        prove=prove,
    )


def train(sizes: dict[str, Any], job: Job, plan: Plan, steps: int, device: torch.device) -> Measured:
    """Trains WARM_STEPS and then `steps` timed steps on one batch, without a proof, which would count in the peak."""
    cuda = device.type == "cuda"
    before = free_memory(device)
    trainer = make_trainer(sizes, plan, job.workload.recipe, prove="never", fused=True)
    batch = make_batch(sizes, job.workload.batch)
    losses, seconds = [], []
    for _ in range(WARM_STEPS + steps):
        began = time.perf_counter()
        losses.append(trainer.step(batch).loss)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    return Measured(losses, statistics.median(seconds[WARM_STEPS:]), trainer.bytes(), max(peak - before, 0), reserved)


def relative(measured: float, expected: float) -> float:
    return measured / expected - 1


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of `spans`, (start, stop) each, as spans that do not overlap.

    >>> joined([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def common(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """The time that spans of both lists cover.

    >>> common([(0, 4), (6, 8)], [(1, 2), (3, 7)])
    3
    """
    lengths = [sum(stop - start for start, stop in joined(spans)) for spans in (one, other, one + other)]
    return lengths[0] + lengths[1] - lengths[2]
