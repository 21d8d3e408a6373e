"""Profiles the device of one rank: matrix products by size and dtype, memory, host link, storage and CPU share.
`meshwright probe` calls `measure_cluster`, which profiles every device while all other ranks are busy too, and then the
links.

CPU ranks compete with each other and with other programs for processors. So operations on a CPU are timed in thread
time. A separate figure, `share`, is the number of CPU seconds per wall-clock second that this rank gets while all ranks
are busy. Accelerators are timed in wall-clock time, and their `share` is 1. On an accelerator, a result is the fastest
of several timings. On a CPU it is their median, because training steps also compete with other work.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.errors import MeshwrightError
from meshwright.runtime.backend import backend_of
from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.host_process import host_id, machine_id
from meshwright.runtime.offload.swap_file import SwapFile, page_aligned_buffer
from meshwright.runtime.profiler.interconnect import own_connections
from meshwright.runtime.profiler.links import CollectiveProfiler
from meshwright.spec.cluster import ClusterProfile, DeviceProfile, MatmulSample
from meshwright.spec.plan import Plan

PRECISION_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_MATMUL_SECONDS = 0.03
"""Matrix products that are expected to take more than this number of seconds are not timed. A product is expected to
take eight times as long as that of the previous size."""

NUM_BURSTS, BURST_SECONDS, CPU_SHARE_WINDOW_SECONDS = 5, 0.01, 0.25
STREAM_ROW_ELEMENTS = 2**10
"""Number of elements in a row of the tensors of elementwise operations."""

UPDATE_BYTES = 2**25

BLOCK_OPERATIONS = 24
"""Number of operations of a block with 7 weights, as the planner counts them: 3 for each weight, and 3 more."""

STORAGE_FILE_BYTES, STORAGE_PIECE_BYTES = 32 * 2**20, 2 * 2**20


def measure_device(rank: int, device: torch.device, neighbours: int = 1) -> DeviceProfile:
    """Returns the profile of `device`, the device of `rank`. `neighbours`: the number of ranks on this machine,
    including this rank. All ranks call this function at the same time, so that each is measured while the others are
    busy."""
    on_cpu = backend_of(device).memory_is_host
    properties = backend_of(device).properties(device)
    share, own, products = 1.0, 1.0, tuple(measure_matmuls(device))
    trained = measure_layer_training(device)
    warm, clock, power = measure_warm_layer(device)
    if on_cpu:
        share = measure_cpu_share()
        own = min(1.0, len(os.sched_getaffinity(0)) / neighbours, cgroup_cpu_quota())
    return DeviceProfile(
        rank=rank,
        host=host_id(),
        name=properties.name,
        products=products,
        trained=trained,
        warm=warm,
        clock=clock,
        power=power,
        gpudirect=own_connections(device).gpudirect,
        bandwidth=measure_stream_bandwidth(device),
        attention=measure_attention(device),
        launch=measure_launch_overhead() if on_cpu else 0.0,
        share=share,
        own=own,
        memory=properties.memory,
        host_memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        storage=measure_storage_bandwidth(),
        host_bandwidth=measure_host_bandwidth(device),
        update=measure_update_rate(device, neighbours),
    )


def tensor_factory(kind: str) -> Callable[..., torch.Tensor]:
    """Returns the torch function that creates operands on a device of type `kind`.

    On a CPU, time does not depend on the values. An accelerator's speed depends on its power limit, and operands with
    constant values need less power. So products of constants would be faster than products of training data.

    >>> tensor_factory("cpu") is torch.ones, tensor_factory("cuda") is torch.randn
    (True, True)
    """
    return torch.ones if backend_of(kind).memory_is_host else torch.randn


def measure_matmuls(device: torch.device) -> Iterator[MatmulSample]:
    """Yields the FLOP/s of square matrix products for each dtype and each size, in order of increasing size. A slow
    dtype is timed only at small sizes (MAX_MATMUL_SECONDS)."""
    sizes = backend_of(device).profiling
    for name in sizes.matmul_dtypes:
        dtype = PRECISION_DTYPES[name]
        for size in sizes.matmuls:
            left = tensor_factory(device.type)(size, size, device=device, dtype=dtype)
            out = torch.empty_like(left)
            seconds = time_action(lambda left=left, out=out: torch.mm(left, left, out=out), device)  # type: ignore[misc]
            yield MatmulSample(precision=name, size=size, rate=2.0 * size**3 / seconds)
            if 8.0 * seconds > MAX_MATMUL_SECONDS:
                break


def training_products(device: torch.device) -> tuple[Callable[[], None], float]:
    """Returns a function that computes the products of a linear layer in training, and their FLOPs: its output, the
    gradient of its input and the gradient of its weight. Each result is a new contiguous tensor."""
    sizes = backend_of(device).profiling
    tokens, inputs, outputs = sizes.layer
    hidden, weight, gradient = (
        tensor_factory(device.type)(shape, device=device, dtype=sizes.dtype)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )

    def layer() -> None:
        torch.mm(hidden, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), hidden)

    return layer, 6.0 * tokens * inputs * outputs


def measure_layer_training(device: torch.device) -> float:
    """Returns the FLOP/s of a linear layer in training (`training_products`)."""
    layer, flops = training_products(device)
    return flops / time_action(layer, device)


def measure_warm_layer(device: torch.device) -> tuple[float, float, float]:
    """Returns the FLOP/s of a linear layer in training when the device is warm, and its clock in Hz and power in W
    meanwhile (0: unknown). The products run for `warm_seconds` of the backend's profiling sizes, and the last third is
    timed. Returns zeros if the backend has no such time."""
    backend = backend_of(device)
    if not (seconds := backend.profiling.warm_seconds):
        return 0.0, 0.0, 0.0
    layer, flops = training_products(device)
    began, count, timed_from = time.perf_counter(), 0, 0.0
    while (passed := time.perf_counter() - began) < seconds:
        if not timed_from and passed > seconds * 2 / 3:
            timed_from, count = passed, 0
        for _ in range(NUM_BURSTS):
            layer()
        noted = backend.properties(device)  # while the device computes
        backend.synchronize(device)
        count += NUM_BURSTS
    return flops * count / (time.perf_counter() - began - timed_from), noted.clock, noted.power


def measure_stream_bandwidth(device: torch.device) -> float:
    """Returns the bytes/s, read plus written, of elementwise operations: a sum, a SiLU and a softmax. On CPUs their
    exponentials take longer than the memory accesses."""
    size = backend_of(device).profiling.stream_bytes
    first, second = (
        tensor_factory(device.type)(size // 4 // STREAM_ROW_ELEMENTS, STREAM_ROW_ELEMENTS, device=device)
        for _ in range(2)
    )

    def work() -> None:
        torch.add(first, second)
        torch.nn.functional.silu(first)
        torch.softmax(first, -1)

    return 7.0 * size / time_action(work, device)


def measure_attention(device: torch.device) -> float:
    """Returns the FLOP/s of fused attention in the backend's profiling dtype. The FLOPs are counted without a causal
    mask: two products, each over all pairs of positions."""
    sizes = backend_of(device).profiling
    heads, sequence, width = sizes.attention
    query = tensor_factory(device.type)(1, heads, sequence, width, device=device, dtype=sizes.dtype)
    work = lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query)
    return 4.0 * heads * sequence**2 * width / time_action(work, device)


def measure_launch_overhead() -> float:
    """Returns the CPU seconds per operation of a block's forward, which has BLOCK_OPERATIONS operations. Forward and
    backward are timed together and count as three forwards. The tensors are so small that nearly all of the time is the
    overhead of launching operations."""
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

    return time_action(step, torch.device("cpu")) / (4 * 3 * BLOCK_OPERATIONS)


def cgroup_cpu_quota() -> float:
    """Returns the number of processors that the cgroup of this process may use, or inf if there is no limit."""
    folder = Path("/sys/fs/cgroup")
    places = (
        [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()] if folder.is_dir() else []
    )
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


def measure_host_bandwidth(device: torch.device) -> float:
    """Returns the bytes/s of a copy from host memory to the device. For a CPU, the copy is within host memory."""
    size = backend_of(device).profiling.stream_bytes
    if not backend_of(device).memory_is_host:
        far = backend_of(device).host_buffer(size // 16)
        near = torch.empty_like(far, device=device)
        return far.numel() / time_action(lambda: near.copy_(far, non_blocking=True), device)
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    return size / time_action(lambda: target.copy_(source), device)


def measure_update_rate(device: torch.device, neighbours: int = 1) -> float:
    """Returns the number of parameters per second that AdamW updates on the host, as for an optimizer that is offloaded
    to CPU.

    The fused kernel updates float32 weights and states. The weights alone have UPDATE_BYTES bytes, more than the
    caches. If the device is an accelerator, the `neighbours` ranks of this machine share its processors equally, as in
    training. If the device is a CPU, the update uses one thread.
    """
    weights = torch.nn.Parameter(torch.ones(UPDATE_BYTES // 4))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    before = torch.get_num_threads()
    torch.set_num_threads(
        1 if backend_of(device).memory_is_host else max(1, len(os.sched_getaffinity(0)) // neighbours)
    )
    try:
        return weights.numel() / time_action(optimizer.step, device)
    finally:
        torch.set_num_threads(before)


def measure_storage_bandwidth() -> float:
    """Returns the mean bytes/s of writing and then reading a file in the temporary folder. As for offload to disk, the
    page cache is bypassed, and STORAGE_PIECE_BYTES are transferred at a time. Returns 0 if the folder cannot be
    written."""
    try:
        scratch, piece = SwapFile(Path(tempfile.gettempdir())), page_aligned_buffer(STORAGE_PIECE_BYTES)
        piece.fill_(1)
        start = scratch.extend(STORAGE_FILE_BYTES)
        scratch.write(start, piece)
        began = time.perf_counter()
        for move in (scratch.write, scratch.read):
            for at in range(start, start + STORAGE_FILE_BYTES, STORAGE_PIECE_BYTES):
                move(at, piece)
        return 2 * STORAGE_FILE_BYTES / (time.perf_counter() - began)
    except MeshwrightError:
        return 0.0


def time_action(action: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds per call of `action`, measured in NUM_BURSTS bursts of calls. On an accelerator, the result
    is that of the fastest burst in wall-clock time. On a CPU, it is that of the median burst in thread time."""
    backend = backend_of(device)
    on_cpu, clock = backend.memory_is_host, time.thread_time if backend.memory_is_host else time.perf_counter
    action()
    backend.synchronize(device)
    found: list[float] = []
    for _ in range(NUM_BURSTS):
        began, count = clock(), 0
        while True:
            action()
            count += 1
            if on_cpu and (passed := clock() - began) >= BURST_SECONDS:
                break
            if not on_cpu and count >= NUM_BURSTS:
                backend.synchronize(device)
                passed = clock() - began
                break
        found.append(passed / count)
    return median(found) if on_cpu else min(found)


def measure_cpu_share() -> float:
    """Returns the CPU seconds per wall-clock second that this rank gets while it multiplies matrices without pause. The
    result is the largest of the values in 3 time windows."""
    matrix = torch.ones(128, 128)
    most = 0.0
    for _ in range(3):
        began, used = time.perf_counter(), time.thread_time()
        while (passed := time.perf_counter() - began) < CPU_SHARE_WINDOW_SECONDS:
            torch.mm(matrix, matrix)
        most = max(most, (time.thread_time() - used) / passed)
    return min(most, 1.0)


def measure_cluster() -> ClusterProfile:
    """Returns the profile of all ranks of the default process group, or of this process if there is no group. All ranks
    call this function. In the result, `seconds` is the wall-clock time of this call on this rank. `busy` is the mean
    number of processors of this rank's machine that other programs used meanwhile. Sets torch's number of threads to 1.
    """
    began, ours, all_before = time.perf_counter(), time.process_time(), machine_busy_seconds()
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.set_num_threads(1)
    mesh = make_parallel_context(Plan(dp_replicate=world))
    hosts = _gather_from_all(host_id(), world)
    device = measure_device(mesh.rank, mesh.device, hosts.count(host_id()))
    if backend_of(mesh.device).memory_is_host:
        device = device.but(memory=device.host_memory / hosts.count(device.host))
    found = ClusterProfile(devices=tuple(_gather_from_all(device, world)))
    if world > 1:
        network = CollectiveProfiler(mesh, found.hosts, quota=min(1.0, cgroup_cpu_quota()), share=device.share)
        found = found.but(
            pairs=tuple(network.pairs()), timings=tuple(network.timings()), meetings=tuple(network.meetings())
        )
    seconds = time.perf_counter() - began
    spent = _gather_from_all((time.process_time() - ours, machine_id()), world)  # emulated hosts share one machine
    here = [seconds for seconds, machine in spent if machine == machine_id()]
    others = (machine_busy_seconds() - all_before - sum(here)) / seconds
    return found.but(seconds=seconds, busy=max(others, 0.0) if all_before else 0.0)


def _gather_from_all(mine: Any, world: int) -> list[Any]:
    if world == 1:
        return [mine]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found


def machine_busy_seconds() -> float:
    """Returns the CPU seconds that all processors of this machine have been busy since it started, or 0 if /proc/stat
    cannot be read."""
    try:
        user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(rest[:2])) / os.sysconf("SC_CLK_TCK")
