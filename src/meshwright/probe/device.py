"""One rank's device, measured: matrix products by size and type, memory, the way to its host, storage, and its share of the machine.

Ranks on cores share them, and other programs run beside: products are therefore timed by the seconds that the processor gave this rank
(thread time), and `share` says how many of those it got in a second of the wall while all ranks were busy. On CUDA devices both are the wall.
Of several tries the best counts, as nothing makes a device faster than it is; on cores the middle one, as a step too runs beside what else there is.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

from meshwright.base.errors import MeshwrightError
from meshwright.parallel.device import host_identity
from meshwright.parallel.offload.scratch import Scratch, aligned
from meshwright.spec.measurement import Measured, Product

PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
CORE_SIZES, CARD_SIZES = (64, 128, 256, 512), (512, 1024, 2048, 4096, 8192)
SLOW = 0.03
"""Seconds of one product beyond which none is tried: the next one takes eight times as long."""

TRIES, BURST, WINDOW = 5, 0.01, 0.25
CORE_STREAM, CARD_STREAM, ROW = 2**23, 2**30, 2**10
"""Bytes of one tensor of element-wise work, and numbers in a row of it."""

UPDATED = 2**25

OPERATIONS = 24
"""Of a block with 7 weights as the planner counts them: 3 for each, and 3 besides."""

STORED, PIECE = 32 * 2**20, 2 * 2**20


def measure_device(rank: int, device: torch.device, neighbours: int = 1) -> Measured:
    """`device` as `rank` finds it, one of `neighbours` ranks of this machine. All ranks call it at once."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory, share, own = properties.name, float(properties.total_memory), 1.0, 1.0
    else:
        name, memory, share, own = "cpu", 0.0, share_of_core(), min(1.0, len(os.sched_getaffinity(0)) / neighbours, quota())
    return Measured(
        rank=rank,
        host=host_identity(),
        name=name,
        products=tuple(products(device)),
        trained=trained(device),
        bandwidth=stream(device),
        attention=attention(device),
        launch=launch() if device.type == "cpu" else 0.0,
        share=share,
        own=own,
        memory=memory,
        host_memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        storage=storage(),
        host_bandwidth=to_host(device),
        update=update(device, neighbours),
    )


def numbers(kind: str) -> Callable[..., torch.Tensor]:
    """What a device of this kind is given to work on. Cores take as long for any; of an accelerator, which is as fast as its power allows, equal
    bits draw less of it, and it would be faster than in training.

    >>> numbers("cpu") is torch.ones, numbers("cuda") is torch.randn
    (True, True)
    """
    return torch.ones if kind == "cpu" else torch.randn


def products(device: torch.device) -> Iterator[Product]:
    """Square products of each type, larger and larger; a type that the device multiplies slowly is measured small."""
    for name, dtype in PRECISIONS.items():
        if device.type == "cuda" and name == "fp64":
            continue
        for size in CARD_SIZES if device.type == "cuda" else CORE_SIZES:
            left = numbers(device.type)(size, size, device=device, dtype=dtype)
            out = torch.empty_like(left)
            seconds = timed(lambda left=left, out=out: torch.mm(left, left, out=out), device)  # type: ignore[misc]
            yield Product(precision=name, size=size, rate=2.0 * size**3 / seconds)
            if 8.0 * seconds > SLOW:
                break


def trained(device: torch.device) -> float:
    """FLOP/s of a layer that is trained: its output, the gradient of its input and of its weights, each in new memory and as it is laid out."""
    tokens, inputs, outputs = (512, 256, 1024) if device.type == "cpu" else (8192, 4096, 8192)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden, weight, gradient = (
        numbers(device.type)(shape, device=device, dtype=dtype) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )

    def layer() -> None:
        torch.mm(hidden, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), hidden)

    return 6.0 * tokens * inputs * outputs / timed(layer, device)


def stream(device: torch.device) -> float:
    """Bytes/s of element-wise work: a sum, a SiLU and a softmax, read and written. On cores an exponential costs more than the memory."""
    size = CARD_STREAM if device.type == "cuda" else CORE_STREAM
    first, second = (numbers(device.type)(size // 4 // ROW, ROW, device=device) for _ in range(2))

    def work() -> None:
        torch.add(first, second)
        torch.nn.functional.silu(first)
        torch.softmax(first, -1)

    return 7.0 * size / timed(work, device)


def attention(device: torch.device) -> float:
    """FLOP/s of fused attention: two products of all positions with all positions, in fp32 on cores, in bf16 elsewhere."""
    heads, sequence, width = (4, 256, 64) if device.type == "cpu" else (32, 4096, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    query = numbers(device.type)(1, heads, sequence, width, device=device, dtype=dtype)
    work = lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query)
    return 4.0 * heads * sequence**2 * width / timed(work, device)


def launch() -> float:
    """Seconds of the processor for one of OPERATIONS operations of a block, forward, a third of what it takes with its gradients: on tensors so small
    that starting an operation is all there is to it."""
    narrow, positions = 8, 4
    weights = [torch.ones(2 * narrow, 2 * narrow, requires_grad=True) for _ in range(7)]
    hidden, turn = torch.ones(1, positions, 2 * narrow), torch.ones(positions, narrow)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.0) * turn[0, 0]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * turn + torch.cat((-x[..., narrow // 2 :], x[..., : narrow // 2]), -1) * turn

    def block(before: torch.Tensor) -> torch.Tensor:
        x = normed(before)
        query, key, value = ((x @ weight.t()).view(1, positions, 2, narrow).transpose(1, 2) for weight in weights[:3])
        mixed = torch.nn.functional.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        x = before + mixed.transpose(1, 2).reshape(before.shape) @ weights[3].t()
        gate, up = (normed(x) @ weight.t() for weight in weights[4:6])
        return x + (torch.nn.functional.silu(gate) * up) @ weights[6].t()

    def step() -> None:
        block(block(block(block(hidden)))).sum().backward()  # type: ignore[no-untyped-call]

    return timed(step, torch.device("cpu")) / (4 * 3 * OPERATIONS)


def quota() -> float:
    """Processors that the control group of this process may use; infinite where it has no limit."""
    folder = Path("/sys/fs/cgroup")
    places = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()] if folder.is_dir() else []
    for _, kinds, name in places:
        two, one = folder / name.strip("/") / "cpu.max", folder / "cpu" / name.strip("/")
        with contextlib.suppress(OSError, ValueError):
            if kinds == "":
                limit, period = two.read_text().split()
                return float(limit) / float(period)
            if "cpu" in kinds.split(","):
                limit, period = (one / "cpu.cfs_quota_us").read_text(), (one / "cpu.cfs_period_us").read_text()
                if float(limit) > 0:
                    return float(limit) / float(period)
    return float("inf")


def to_host(device: torch.device) -> float:
    """Bytes/s between the device and its host's memory; a core's are one and the same: a copy."""
    if device.type == "cuda":
        far = torch.empty(CARD_STREAM // 16, dtype=torch.uint8).pin_memory()
        near = torch.empty_like(far, device=device)
        return far.numel() / timed(lambda: near.copy_(far, non_blocking=True), device)
    source = torch.ones(CORE_STREAM // 4)
    target = torch.empty_like(source)
    return CORE_STREAM / timed(lambda: target.copy_(source), device)


def update(device: torch.device, neighbours: int = 1) -> float:
    """Parameters a second that the processors of a rank update, as they do where the optimizer waits in the host's memory: float32 weights and
    states by the fused kernel, UPDATED bytes of each, which no cache keeps. Beside an accelerator a rank has its part of all processors, as in training."""
    weights = torch.nn.Parameter(torch.ones(UPDATED // 4))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else max(1, len(os.sched_getaffinity(0)) // neighbours))
    try:
        return weights.numel() / timed(optimizer.step, device)
    finally:
        torch.set_num_threads(before)


def storage() -> float:
    """Bytes/s at which a file is written and read where temporary files go, as what is offloaded is: around the page cache, piece by piece.
    Both ways count alike; 0 where nothing can be written."""
    try:
        scratch, piece = Scratch(Path(tempfile.gettempdir())), aligned(PIECE)
        piece.fill_(1)
        start = scratch.extend(STORED)
        scratch.write(start, piece)
        began = time.perf_counter()
        for move in (scratch.write, scratch.read):
            for at in range(start, start + STORED, PIECE):
                move(at, piece)
        return 2 * STORED / (time.perf_counter() - began)
    except MeshwrightError:
        return 0.0


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of `action` in the fastest of some bursts, on cores in the middle one, of the device's own time."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    action()
    settle(device)
    found: list[float] = []
    for _ in range(TRIES):
        began, count = clock(), 0
        while True:
            action()
            count += 1
            if device.type == "cpu" and (passed := clock() - began) >= BURST:
                break
            if device.type != "cpu" and count >= TRIES:
                settle(device)
                passed = clock() - began
                break
        found.append(passed / count)
    return median(found) if device.type == "cpu" else min(found)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def share_of_core() -> float:
    """Seconds of the processor that this rank gets in a second while it does nothing but multiply: the most of some windows."""
    matrix = torch.ones(128, 128)
    most = 0.0
    for _ in range(3):
        began, used = time.perf_counter(), time.thread_time()
        while (passed := time.perf_counter() - began) < WINDOW:
            torch.mm(matrix, matrix)
        most = max(most, (time.thread_time() - used) / passed)
    return min(most, 1.0)
