"""Part A, device: measures matrix products of the shapes of Llama 3 8B with clock and power, attention by kernel,
memory bandwidth, pinned copies in both directions, and the bytes of a context. Compares the results with the probe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench.gpu_check.common import Bench, Findings, first_line, relative
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from meshwright.core.units import show_bytes, show_rate
from meshwright.planner.cost import constants

TOKENS = 8192
PRODUCTS = {
    "qkv": (4096, 6144),
    "out": (4096, 4096),
    "gate-up": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
"""Input and output features of the products of a block of Llama 3 8B, and of its head."""

SECONDS_EACH = 3.0
"""Duration of each measurement of a product. The clock falls while the device becomes warm."""

PROBE_TOLERANCE = 0.10


def timed(work: Callable[[], Any], seconds: float) -> float:
    """Seconds per call, of calls that repeat for at least `seconds`, by events of the device."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    per_call, calls = 0.0, 4
    while True:
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        per_call = start.elapsed_time(stop) / 1e3 / calls
        left = seconds - (time.perf_counter() - began)
        if left <= 0:
            return per_call
        calls = max(4, min(int(left / 2 / per_call) + 1, 5000))


def clock_and_power() -> dict[str, float | None]:
    """MHz of the multiprocessors and watts of the device, None where the driver does not say."""
    found: dict[str, float | None] = {"clock": None, "power": None}
    with contextlib.suppress(Exception):
        found["clock"] = float(torch.cuda.clock_rate())
    with contextlib.suppress(Exception):
        found["power"] = torch.cuda.power_draw() / 1e3
    return found


def attention_kernels() -> Iterator[tuple[str, SDPBackend]]:
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        if hasattr(SDPBackend, name):
            yield name.lower(), getattr(SDPBackend, name)


def time_attention(device: torch.device, kernel: SDPBackend) -> tuple[float, float]:
    """Seconds of forward and of backward of causal attention of one sequence of TOKENS, 32 heads of width 128."""
    query, key, value = (
        torch.randn(1, 32, TOKENS, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn_like(query)
    with sdpa_kernel([kernel]):
        forward = timed(lambda: scaled_dot_product_attention(query, key, value, is_causal=True), 0.5)

        def both() -> None:
            scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)

        return forward, timed(both, 0.5) - forward


def measure_copies(device: torch.device) -> dict[str, float]:
    """Bytes/s of copies on the device (read and written), and of pinned copies to the device and to the host."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    part = source[: host.numel()]
    return {
        "bandwidth": 2 * source.numel() / timed(lambda: target.copy_(source), 1.0),
        "to_device": host.numel() / timed(lambda: part.copy_(host, non_blocking=True), 1.0),
        "to_host": host.numel() / timed(lambda: host.copy_(part, non_blocking=True), 1.0),
    }


def run(bench: Bench) -> Findings:
    found = Findings()
    if bench.tiny:
        found.data["cluster"] = bench.cluster.model_dump(mode="json")
        found.claim("figures of the device", "need a CUDA device")
        return found
    device, data = bench.device, found.data
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.synchronize()
    data["context"] = total - free - torch.cuda.memory_reserved()
    properties = torch.cuda.get_device_properties(device)
    data |= {
        "memory": total, "capability": [properties.major, properties.minor], "torch": torch.__version__,
        "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip
    found.claim("memory in use before the first tensor (driver and context)", show_bytes(data["context"]))
    data["products"] = {}
    for name, (inputs, outputs) in PRODUCTS.items():
        left = torch.randn(TOKENS, inputs, device=device, dtype=torch.bfloat16)
        right = torch.randn(inputs, outputs, device=device, dtype=torch.bfloat16)
        seconds = timed(lambda left=left, right=right: left @ right, SECONDS_EACH)  # type: ignore[misc]
        rate = 2 * TOKENS * inputs * outputs / seconds
        data["products"][name] = {"rate": rate} | clock_and_power()
        noted = data["products"][name]
        clock = f", {noted['clock']:.0f} MHz" if noted["clock"] else ""
        power = f", {noted['power']:.0f} W" if noted["power"] else ""
        found.claim(f"product {name}, {TOKENS} x {inputs} x {outputs}, bf16", show_rate(rate, "FLOP/s") + clock + power)
        del left, right
    data["attention"] = {}
    flops = 2 * 2 * 32 * TOKENS * TOKENS * 128 / 2
    for name, kernel in attention_kernels():
        try:
            forward, backward = time_attention(device, kernel)
        except RuntimeError as error:
            found.claim(f"attention by {name}", first_line(error))
            continue
        data["attention"][name] = {"forward": forward, "backward": backward}
        rates = (
            f"{show_rate(flops / forward, 'FLOP/s')} forward, {show_rate(2.5 * flops / backward, 'FLOP/s')} backward"
        )
        found.claim(f"attention by {name}, causal", rates)
    data |= measure_copies(device)
    found.claim("memory bandwidth, bytes read and written", show_rate(data["bandwidth"]))
    ways = f"{show_rate(data['to_device'])} to the device, {show_rate(data['to_host'])} to the host"
    found.claim("pinned copies", ways)
    torch.cuda.empty_cache()
    found.save()
    began = time.perf_counter()
    cluster = bench.probe()
    data["probe_seconds"], data["cluster"] = time.perf_counter() - began, cluster.model_dump(mode="json")
    group = cluster.groups[0]
    best = max(entry["rate"] for entry in data["products"].values())
    for name, measured, probed in (
        ("bf16 products", best, group.device.peak.get("bf16", 0.0)),
        ("memory bandwidth", data["bandwidth"], group.device.bandwidth * constants.MEMORY_BANDWIDTH_EFFICIENCY),
        ("link to the host", min(data["to_device"], data["to_host"]), group.host_bandwidth),
    ):
        off = relative(probed, measured)
        unit = "FLOP/s" if "products" in name else "B/s"
        found.claim(
            f"probe: {name} within {PROBE_TOLERANCE:.0%}",
            f"{show_rate(probed, unit)} probed, {show_rate(measured, unit)} measured ({off:+.1%})",
            abs(off) <= PROBE_TOLERANCE,
            required=False,
        )
    found.claim("duration of the probe", f"{data['probe_seconds']:.1f} s")
    return found
