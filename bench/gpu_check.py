"""One CUDA device: probed, then a Llama-style model trained in bf16 as the planner says, measured beside predicted;
then every way to save memory.

    python bench/gpu_check.py                          # or: make gpu-check
    python bench/gpu_check.py --cluster 1x1:a100-80gb  # a device that the catalog does not know by its driver's name
    python bench/gpu_check.py --precision fp8          # other recipes; --eager leaves compiled blocks out
    python bench/gpu_check.py --catalog                # without probe: the predictions of the catalog's figures
    python bench/gpu_check.py --skip-without-cuda      # exit code 0 where there is no device
    python bench/gpu_check.py --cpu                    # the same program on the processor, tiny: proves the program,
    not the device

Held to: bytes of parameters, gradients and optimizer equal to the estimate exactly, peak allocated within 5 % of it, a
loss that falls, the
first loss of plain PyTorch within 1e-6 in float32, with recompute and offload of each kind the losses of the plain
plan, and with activations
on the host its gradients in float32; that a trainer that loads what another one saved goes on as if nothing had been,
with a fused optimizer, one that
nobody chose kernels for, exact sums, and half of the states on the host; and that `meshwright train` trains on one
card, again from where it stopped, with
trials before (ranks forked from a process that has started no driver, copies of every step, the watch of ranks, the
memory of the step that is watched). What needs two cards is not covered:
NCCL, pipelines, rings, links. Speed is a goal, printed with its figure and not judged. World size is 1; NCCL is not
needed. Some minutes; figures go to bench/results/gpu.{md,json}.
Exit codes: 0 all held, 1 something did not, 2 no device or bad input.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.core.errors import InputError, MeshwrightError, NothingFits
from meshwright.core.units import show_bytes, show_count, show_rate, show_seconds
from meshwright.models.registry import build_reference_model
from meshwright.planner.cost.calibration import calibrate
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.report.memory import read_timelines
from meshwright.runtime.backend import init_local_device
from meshwright.runtime.profiler.device import measure_cluster
from meshwright.spec.cluster import Cluster
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MEMORY_TOLERANCE, LOSS_TOLERANCE = 0.05, 1e-6
SAME = 1e-3
"""Relative difference of a last loss to that of the plain plan: products in bf16 may be summed in another order. On
cores it is 0."""

MFU_GOAL, STEP_GOAL, OFFLOAD_GOAL = 0.5, 0.1, 1.5
GRADIENT_TOLERANCE, HIDDEN_GOAL = 1e-5, 0.7
WARM = 3
RESULTS = Path(__file__).parent / "results"
WAYS = (
    *("rc-full", "rc-attn", "off-activations", "off-optimizer", "off-optimizer-disk", "z3.off-parameters"),
    *("z2.off-optimizer.off-gradients", "z3.off-optimizer.off-gradients.off-parameters"),
)
"""To save memory; each is trained beside the plain plan at the second size."""
SIZES: tuple[dict[str, Any], ...] = (
    {
        "layers": 24,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 128,
        "ffn": 5504,
        "vocab": 32000,
        "seq": 4096,
    },
    {
        "layers": 16,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 64,
        "ffn": 2816,
        "vocab": 32000,
        "seq": 2048,
    },
    {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1408, "vocab": 32000, "seq": 1024},
)
"""The first of these that fits is trained: about 1.3 B, 0.3 B and 0.06 B parameters."""
TINY: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 16,
    "ffn": 192,
    "vocab": 512,
    "seq": 64,
}


@dataclass
class Measured:
    """What the run showed. `peak` and `reserved` are 0 where the device does not count them."""

    losses: list[float]
    seconds: float
    held: dict[str, int]
    peak: int
    reserved: int


def probed(name: str) -> Cluster:
    """The cluster `name` of one device with what this device is measured to do."""
    threads = torch.get_num_threads()
    result = calibrate(measure_cluster(), read_cluster(name, measured=False))
    torch.set_num_threads(threads)  # the probe measures on one
    return result.cluster


def job_of(sizes: dict[str, Any], cluster: Cluster, batch: int, precision: str) -> Job:
    options = {
        "model.name": "llama-tiny",
        "model.sizes": sizes,
        "workload.batch": batch,
        "workload.sequence": sizes["seq"],
        "workload.precision": precision,
    }
    return resolve_job(read_job(None, (), options | {"cluster.name": "local:1"})).but(cluster=cluster)


def choose(
    cluster: Cluster, plan: str, batch: int, precision: str = "bf16", compiled: bool = False
) -> tuple[dict[str, Any], Job, Plan, Estimate]:
    """The largest size that fits, with the planner's plan or the given one."""
    for sizes in SIZES:
        job = job_of(sizes, cluster, batch, precision)
        job = job.but(pins={**job.pins, "compile": True}) if compiled else job
        try:
            entry = None if plan != "auto" else mw.plan(job, 1)[0]
        except NothingFits:
            continue
        chosen = entry.plan if entry else mw.parse_plan(plan)
        estimate = mw.estimate(job, chosen)
        if estimate.fits:
            return sizes, job, chosen, estimate
    raise NothingFits(f"none of {len(SIZES)} sizes fits on {cluster.name} with plan {plan}")


def batch_of(sizes: dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(sizes["vocab"], (rows, sizes["seq"]), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def same_loss(device: torch.device) -> float:
    """Relative difference of the first loss to that of the same model in plain PyTorch, float32."""
    torch.manual_seed(1)
    model = build_reference_model({"kind": "llama", **TINY}).to(device)
    batch = batch_of(TINY, 4)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"].to(device)).logits.float()
    plain = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten().to(device)
    ).item()
    trainer = mw.parallelize(model, optimizer=lambda params: torch.optim.AdamW(params), plan="dp1")
    return abs(trainer.step(batch).loss / plain - 1)


def train(sizes: dict[str, Any], job: Job, plan: Plan, steps: int, device: torch.device) -> Measured:
    """`steps` timed steps on one batch, after a few that warm up."""
    cuda = device.type == "cuda"
    before = fresh(device)
    torch.manual_seed(1)
    model = build_reference_model({"kind": "llama", **sizes})
    workload = job.workload
    trainer = mw.parallelize(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, fused=True),
        plan=plan,
        precision=workload.recipe,
        clip=1.0,
    )
    batch = batch_of(sizes, workload.batch)
    losses, seconds = [], []
    for step in range(WARM + steps):
        began = time.perf_counter()
        losses.append(trainer.step(batch).loss)
        if cuda:
            torch.cuda.synchronize()
        if step >= WARM:
            seconds.append(time.perf_counter() - began)
    peak, taken = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    return Measured(losses, statistics.median(seconds), trainer.bytes(), max(peak - before, 0), taken)


def fresh(device: torch.device) -> int:
    """Bytes that are still allocated when all that nobody holds is gone; from here on the peak counts anew."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@dataclass
class Beside:
    """Activations on the host: how far gradients are from those of activations on the device, and which part of the
    time of copies kernels ran."""

    apart: float
    copying: float
    hidden: float

    @property
    def faults(self) -> list[str]:
        far = f"off-activations: gradients in float32 are {self.apart:.1e} from those of activations on the device"
        return [far] if not self.apart <= GRADIENT_TOLERANCE else []


def beside(sizes: dict[str, Any], rows: int, precision: str, device: torch.device) -> Beside:
    """`apart` in float32, the rest in `precision`, of one micro-batch of `rows`."""
    batch = batch_of(sizes, rows)

    def trainer_of(plan: str, recipe: str) -> Any:
        fresh(device)
        torch.manual_seed(1)
        return mw.parallelize(
            build_reference_model({"kind": "llama", **sizes}),
            optimizer=lambda params: torch.optim.AdamW(params),
            plan=plan,
            precision=recipe,
        )

    here, there = (trainer_of(f"dp1.mb{rows}{way}", "fp32").gradients(batch)[2] for way in ("", ".off-activations"))
    assert here is not None and there is not None, "one rank has all gradients"
    apart = max(float((there[name] - value).norm() / value.norm().clamp_min(1e-30)) for name, value in here.items())
    if device.type != "cuda":
        return Beside(apart, 0.0, 0.0)
    from torch.profiler import ProfilerActivity, profile

    trainer = trainer_of(f"dp1.mb{rows}.off-activations", precision)
    for _ in range(WARM):
        trainer.step(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        trainer.step(batch)
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in seen.events():
        if (
            event.device_type == torch.autograd.DeviceType.CUDA
            and not event.name.startswith("Memset")
            and not getattr(event, "is_user_annotation", False)
        ):
            is_copy = "Memcpy" in event.name and ("HtoD" in event.name or "DtoH" in event.name)
            spans[is_copy].append((event.time_range.start, event.time_range.end))
    copying = sum(stop - start for start, stop in joined(spans[True]))
    return Beside(apart, copying / 1e6, common(spans[True], spans[False]) / copying if copying else 0.0)


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in spans that do not touch.

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
    """Time that lies in spans of both.

    >>> common([(0, 4), (6, 8)], [(1, 2), (3, 7)])
    3
    """
    lengths = [sum(stop - start for start, stop in joined(spans)) for spans in (one, other, one + other)]
    return lengths[0] + lengths[1] - lengths[2]


GOES_ON = (("dp1", True, False), ("dp1", None, False), ("dp1", True, True), ("dp1.off-optimizer50", True, False))
"""Plans under which a run goes on, with whether the optimizer is asked for fused kernels and whether sums are exact.
Half of the states is away on CUDA only."""

AS_IF = 1e-5
"""Relative difference of losses in float32: tables of vectors are summed in any order on a device. On cores it is 0."""


def goes_on(device: torch.device) -> list[str]:
    """What is not as if nothing had been where a trainer loads what another one of this process saved, a line each."""
    found = []
    for plan, fused, exact in GOES_ON if device.type == "cuda" else GOES_ON[:3]:
        name = f"{plan}{', exact' if exact else ''}{', fused' if fused else ''}"
        try:
            through, again = saved_and_loaded(plan, fused, exact)
        except Exception as error:  # the others are tried all the same
            found.append(f"goes on under {name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            continue
        if not max(abs(one / other - 1) for one, other in zip(again, through, strict=True)) <= AS_IF:
            found.append(f"goes on under {name}: losses are {again}, without the stop {through}")
    return found


def saved_and_loaded(plan: str, fused: bool | None, exact: bool) -> tuple[list[float], list[float]]:
    """The losses of three steps behind the first one, without a stop and with one."""
    batch, kind = batch_of(TINY, 4), mw.recipe("fp32").but(exact=exact)

    def trainer_of() -> Any:
        torch.manual_seed(1)
        model = build_reference_model({"kind": "llama", **TINY})
        return mw.parallelize(
            model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=fused), plan=plan, precision=kind
        )

    try:
        first = trainer_of()
        first.step(batch)
        with tempfile.TemporaryDirectory() as folder:
            path = first.save(folder)
            through = [first.step(batch).loss for _ in range(3)]
            second = trainer_of()
            second.load(path)
        return through, [second.step(batch).loss for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)  # exact sums ask for them


def commands(cluster: str, precision: str) -> list[str]:
    """What `meshwright train` does wrong on one card: begun with trials, and gone on with."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for steps, more in ((4, ["--trials", "2"]), (8, [])):
            job = [
                "--model",
                "llama-tiny",
                "--seq",
                "128",
                "--batch",
                "8",
                "--cluster",
                cluster,
                "--precision",
                precision,
            ]
            command = [
                sys.executable,
                "-m",
                "meshwright",
                "train",
                *job,
                "--run",
                f"{folder}/run",
                "--steps",
                str(steps),
                *more,
                "--json",
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if line.strip()][-3:]
                return [f"train --steps {steps} ended with {done.returncode}: {' / '.join(said)}"]
            records = [json.loads(line) for line in Path(folder, "run", "records.jsonl").read_text().splitlines()]
            if [record["step"] for record in records] != list(range(steps + 1)):
                found.append(f"train --steps {steps}: steps {[record['step'] for record in records]} are recorded")
        if not records[-1]["loss"] < records[1]["loss"]:
            found.append(f"train: the loss did not fall: {records[1]['loss']:.4f} to {records[-1]['loss']:.4f}")
        if not any(path.name.startswith("step-") for path in Path(folder, "run", "checkpoints").iterdir()):
            found.append("train: no checkpoint was written")
        return found + watched(Path(folder, "run"), {record["step"]: record["memory"] for record in records})


def watched(folder: Path, memory: dict[int, dict[str, float]]) -> list[str]:
    """What is wrong with the memory of a step that was watched, beside what the device counted of it."""
    try:
        (timeline,) = read_timelines(folder)
    except InputError as error:
        return [f"train: {error}"]
    counted, found = memory[timeline.step]["total"], []
    if not abs(timeline.total / counted - 1) <= MEMORY_TOLERANCE:
        found.append(
            f"train: the watch of step {timeline.step} adds up to {show_bytes(timeline.total)}, the device counted "
            f"{show_bytes(counted)}"
        )
    if not timeline.place or not timeline.peak.activations:
        found.append(f"train: the watch of step {timeline.step} saw no module at the peak, or no activations")
    return found


@dataclass
class Way:
    """One way to save memory beside the plain plan of the same size. `bound`: the plain step, or the way over the
    host's link, whichever is longer."""

    plan: str
    estimate: Estimate
    measured: Measured
    bound: float

    @property
    def data(self) -> dict[str, Any]:
        measured, predicted = self.measured, self.estimate
        return {
            "plan": self.plan, "seconds": measured.seconds, "predicted": predicted.time.step, "bound": self.bound,
            "losses": measured.losses, "peak_allocated": measured.peak, "peak_predicted": predicted.memory.total,
        }  # fmt: skip

    def row(self, plain: Measured) -> str:
        peak = show_bytes(self.measured.peak) if self.measured.peak else "-"
        apart = abs(self.measured.losses[-1] / plain.losses[-1] - 1)
        return (
            f"| {self.plan} | {show_seconds(self.measured.seconds)} | {show_seconds(self.estimate.time.step)} | "
            f"{self.measured.seconds / self.bound:.2f} | {peak} | {show_bytes(self.estimate.memory.total)} | "
            f"{apart:.1e} |"
        )


def ways(job: Job, sizes: dict[str, Any], steps: int, device: torch.device) -> tuple[list[Way], list[str]]:
    """The plain plan first, then each of WAYS, and a line for each that did not run. What goes over the link to the
    host: gradients down and weights up where the optimizer is away,
    weights up twice where they are."""
    found: list[Way] = []
    failed: list[str] = []
    here = [
        way for way in WAYS if device.type == "cuda" or "off" not in way or "files" in way
    ]  # a core's memory is its host's
    for way in ("", *here):
        plan = mw.parse_plan(".".join(part for part in ("dp1", f"mb{max(job.workload.batch // 4, 1)}", way) if part))
        try:
            estimate, measured = mw.estimate(job, plan), train(sizes, job, plan, steps, device)
        except Exception as error:  # the others are measured all the same
            if not found:
                raise
            failed.append(f"{plan.name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            continue
        size, link = job.model.parameters * job.workload.recipe.size, job.cluster.groups[0].host_bandwidth
        moved = size * (2 if "off-optimizer" in way or "off-parameters" in way else 0)
        plain = found[0].measured.seconds if found else measured.seconds
        found.append(Way(plan.name, estimate, measured, max(plain, moved / link if link else 0.0)))
    return found, failed


def faults_of_ways(found: list[Way]) -> list[str]:
    plain, faults = found[0], []
    for way in found:
        apart = abs(way.measured.losses[-1] / plain.measured.losses[-1] - 1)
        if not apart <= SAME or way.measured.losses[0] != plain.measured.losses[0]:
            faults.append(
                f"{way.plan}: losses are not those of {plain.plan}: {way.measured.losses[0]!r} first, {apart:.1e} "
                "apart at last"
            )
        if way.measured.peak and abs(way.measured.peak / way.estimate.memory.total - 1) > MEMORY_TOLERANCE:
            faults.append(
                f"{way.plan}: peak allocated is {way.measured.peak / way.estimate.memory.total - 1:+.0%} off the "
                "estimate"
            )
    return faults


def goals(found: list[Way], mfu: float, step: float, copies: Beside) -> list[str]:
    """Of speed: the goal, the figure, whether it was met."""
    away = [way for way in found if "off-optimizer" in way.plan and "files" not in way.plan]
    rows = [
        ("MFU at least 50 %", f"{mfu:.1%}", mfu >= MFU_GOAL),
        ("predicted step within 10 %", f"{step:+.1%}", abs(step) <= STEP_GOAL),
    ]
    rows += [
        (
            "step with the optimizer on the host at most 1.5 times its bound",
            f"{way.measured.seconds / way.bound:.2f}",
            way.measured.seconds <= OFFLOAD_GOAL * way.bound,
        )
        for way in away
    ]
    if copies.copying:
        share = f"{copies.hidden:.0%} of {show_seconds(copies.copying)}"
        rows.append(("copies of activations beside kernels at least 70 %", share, copies.hidden >= HIDDEN_GOAL))
    return [f"| {goal} | {figure} | {'met' if met else 'missed'} |" for goal, figure, met in rows]


def faults_of(measured: Measured, estimate: Estimate, difference: float) -> list[str]:
    """What was not as promised, a line each."""
    found = []
    if not difference <= LOSS_TOLERANCE:
        found.append(f"first loss differs from plain PyTorch's by {difference:.1e}, more than {LOSS_TOLERANCE:.0e}")
    for kind in ("parameters", "gradients", "optimizer"):
        bytes_held = measured.held[kind]
        if bytes_held != getattr(estimate.memory, kind):
            found.append(f"{kind}: {bytes_held:,} bytes are held, {getattr(estimate.memory, kind):,.0f} were predicted")
    if measured.peak and abs(measured.peak / estimate.memory.total - 1) > MEMORY_TOLERANCE:
        off = measured.peak / estimate.memory.total - 1
        found.append(f"peak allocated is {off:+.0%} off the estimate, more than {MEMORY_TOLERANCE:.0%}")
    if not measured.losses[-1] < measured.losses[0]:
        found.append(f"the loss did not fall: {measured.losses[0]:.4f} to {measured.losses[-1]:.4f}")
    return found


def show(
    name: str, job: Job, plan: Plan, estimate: Estimate, measured: Measured, difference: float
) -> tuple[list[str], dict[str, Any]]:
    """The figures as lines and as data."""
    device = job.cluster.groups[0].device
    tokens = job.workload.tokens / measured.seconds
    mfu = estimate.mfu * estimate.time.step / measured.seconds
    rates = ", ".join(f"{kind} {show_rate(rate, 'FLOP/s')}" for kind, rate in device.peak.items())
    lines = [
        f"device          {name}, torch {torch.__version__}: {rates}, memory at {show_rate(device.bandwidth)}",
        f"model           {show_count(job.model.parameters)} parameters, "
        f"batch {job.workload.batch} x {job.workload.sequence}, "
        f"{job.workload.precision}, plan {plan.name}",
        f"first loss      {difference:.1e} off plain PyTorch (float32, small model)",
        f"loss            {measured.losses[0]:.4f} to {measured.losses[-1]:.4f} "
        f"in {len(measured.losses)} steps on one batch",
        f"step            {show_seconds(measured.seconds)} measured, {show_seconds(estimate.time.step)} predicted",
        f"tokens/s        {tokens:,.0f} measured, {estimate.tokens_per_second:,.0f} predicted",
        f"MFU             {mfu:.1%} measured, {estimate.mfu:.1%} predicted",
        f"peak allocated  {show_bytes(measured.peak) if measured.peak else 'not counted here'}, "
        f"{show_bytes(estimate.memory.total)} predicted",
        f"peak reserved   {show_bytes(measured.reserved) if measured.reserved else 'not counted here'}, "
        f"{show_bytes(estimate.memory.reserved)} predicted",
    ]
    return lines, {
        "device": name, "torch": torch.__version__, "plan": plan.name, "parameters": job.model.parameters,
        "first_loss_difference": difference, "losses": measured.losses, "seconds": measured.seconds,
        "tokens_per_second": tokens, "mfu": mfu, "held": measured.held, "peak_allocated": measured.peak,
        "peak_reserved": measured.reserved, "estimate": estimate.model_dump(),
    }  # fmt: skip


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cluster", default="local:1", help="the device, such as 1x1:h100; default: what the driver shows"
    )
    parser.add_argument("--plan", default="auto", help="a plan of one rank; default: the planner's")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", default="bf16", help="bf16, bf16-pure, fp8, fp16")
    parser.add_argument(
        "--catalog", action="store_true", help="predict by the catalog's figures instead of the probe's"
    )
    parser.add_argument("--eager", action="store_true", help="without compiled blocks")
    parser.add_argument("--cpu", action="store_true", help="the same program on the processor, tiny, float32")
    parser.add_argument("--skip-without-cuda", action="store_true", help="exit code 0 where there is no CUDA device")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else a device would be taken where there is one
    if not options.cpu and not torch.cuda.is_available():
        built = (
            "built without CUDA" if torch.version.cuda is None else "built with CUDA, but the driver shows no device"
        )
        if options.skip_without_cuda:
            print(f"gpu-check: skipped: no CUDA device (torch {torch.__version__} is {built})", file=sys.stderr)
            return 0
        raise InputError(
            f"no CUDA device: torch {torch.__version__} is {built}; --skip-without-cuda makes this no error, --cpu "
            "runs it tiny on the processor"
        )
    device = init_local_device()  # before any product: a plan's come out alike each time then
    cluster = (
        read_cluster("1x1:cpu" if options.cpu else options.cluster)
        if options.catalog
        else probed("local:1" if options.cpu else options.cluster)
    )
    if options.cpu:
        sizes = small = TINY
        job = job_of(sizes, cluster, 4, "fp32")
        plan = mw.parse_plan("dp1" if options.plan == "auto" else options.plan)
        estimate = mw.estimate(job, plan)
    else:
        sizes, job, plan, estimate = choose(cluster, options.plan, options.batch, options.precision, not options.eager)
        small = SIZES[1]
    difference = same_loss(device)
    measured = train(sizes, job, plan, options.steps, device)
    at_small = job_of(small, cluster, job.workload.batch, job.workload.precision)
    found, failed = ways(at_small, small, options.steps, device)
    going_on = goes_on(device)
    fresh(device)  # the command has the device beside this process
    going_on += commands(*(("local:1", "fp32") if options.cpu else (options.cluster, "bf16")))
    copies = beside(SIZES[-1] if device.type == "cuda" else TINY, 4, job.workload.precision, device)
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "the processor"
    lines, data = show(name, job, plan, estimate, measured, difference)
    faults = [*faults_of(measured, estimate, difference), *faults_of_ways(found), *failed, *copies.faults, *going_on]
    data |= {"ways": [way.data for way in found], "activations": asdict(copies), "faults": faults}
    table = [
        f"| plan at {show_count(at_small.model.parameters)} | step | predicted | times its bound | peak | predicted "
        "| loss apart |",
        "|---|---|---|---|---|---|---|",
        *(way.row(found[0].measured) for way in found),
        "",
        "| goal | figure | |",
        "|---|---|---|",
        *goals(found, data["mfu"], estimate.time.step / measured.seconds - 1, copies),
    ]
    print("\n".join([*lines, "", *table]), file=sys.stderr)
    for fault in faults:
        print(f"gpu-check: {fault}", file=sys.stderr)
    if options.json:
        print(json.dumps(data))
    if not options.cpu:
        text = [
            "# One CUDA device",
            "",
            "`make gpu-check`.",
            "",
            "```text",
            *lines,
            "```",
            "",
            *table,
            "",
            *(f"- {fault}" for fault in faults),
        ]
        (RESULTS / "gpu.md").write_text("\n".join(text).rstrip() + "\n")
        (RESULTS / "gpu.json").write_text(json.dumps(data, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeshwrightError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        sys.exit(2)
