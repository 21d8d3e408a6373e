"""`meshwright doctor`: what this machine is, whether training will work on it, and what to mend. Exit code 1 when something must be mended."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.base.units import show_rate
from meshwright.cli.options import AsJson, Language, say, say_json

if TYPE_CHECKING:
    from meshwright.words.say import Sentence

PACKAGES = ("torch", "numpy", "pydantic", "cyclopts", "safetensors", "xxhash", "psutil", "tokenizers", "transformers", "tensorboard")
NEEDED = ("torch", "numpy", "pydantic", "cyclopts", "safetensors", "xxhash", "psutil")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD", "PYTORCH_ALLOC_CONF",
)  # fmt: skip
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)
MATRIX = 768
COPY = 64 * 2**20
PATIENCE = timedelta(seconds=30)


class Mend(NamedTuple):
    """Something to change: `must` when training will not work before."""

    what: str
    must: bool = False


def doctor(*, json: AsJson = False, lang: Language = None) -> int:
    """Check this machine: versions, devices, backends, speed, settings of NCCL and gloo; a verdict and what to mend.

    Try: meshwright doctor --json
    """
    from meshwright.words.say import language_of

    language = language_of(lang, os.environ)
    facts: dict[str, Any] = {"python": sys.version.split()[0], "packages": dict(packages()), **hardware()}
    facts["environment"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    mends = [Mend(f"{name} is missing: pip install meshwright", must=True) for name in NEEDED if not facts["packages"][name]]
    if facts["packages"]["torch"]:
        facts["torch"] = torch_facts()
        facts["speed"] = {**exchange(facts["torch"]["backends"]), **speed()}
        mends += torch_mends(facts)
    mends += machine_mends(facts)
    verdict = "broken" if any(mend.must for mend in mends) else "works"
    facts |= {"verdict": verdict, "mends": [mend._asdict() for mend in mends]}
    say_json(facts) if json else say(text(facts, mends, language))
    return 1 if verdict == "broken" else 0


def packages() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None


def hardware() -> dict[str, Any]:
    """Cores, memory, shared memory, and the CUDA devices the driver shows."""
    from meshwright.intake.local import cores, cuda_cards, host_memory

    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "cores": cores(),
        "memory": host_memory(),
        "shared_memory": float(shared.f_bavail * shared.f_frsize) if shared else 0.0,
        "cuda_cards": cuda_cards(),
    }


def torch_facts() -> dict[str, Any]:
    """Backends and devices as torch sees them."""
    import torch
    from torch import distributed

    from meshwright.parallel.device import left_idle

    available = distributed.is_available()
    return {
        "backends": [name for name in ("gloo", "nccl", "mpi") if available and getattr(distributed, f"is_{name}_available")()],
        "cuda_devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
        "idle": left_idle(None if torch.cuda.is_available() else torch.accelerator.current_accelerator(check_available=True)),
    }


def exchange(backends: list[str]) -> dict[str, float]:
    """Two ranks over gloo and loopback: bus bandwidth of an all-reduce of 16 MiB, seconds of one of 4 bytes. Nothing where ranks cannot fork or meet."""
    if "gloo" not in backends or not hasattr(os, "fork"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                meet(folder, 1)
                code = 0
            finally:
                os._exit(code)
        try:
            return meet(folder, 0)
        except RuntimeError:
            return {}
        finally:
            os.waitpid(child, 0)


def meet(folder: str, rank: int) -> dict[str, float]:
    """One of the two ranks."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=PATIENCE)
    try:
        large, small = torch.ones(4 * 2**20), torch.ones(1)
        seconds = [best_of(lambda tensor=tensor: distributed.all_reduce(tensor), False) for tensor in (large, small)]
    finally:
        distributed.destroy_process_group()
    return {"all_reduce_bytes_per_second": large.nbytes / seconds[0], "all_reduce_seconds": seconds[1]}


def speed() -> dict[str, float]:
    """A matrix product and a copy, the best of several short ones, on device 0 or one core."""
    import torch

    cuda = torch.cuda.is_available()
    device, size, copied = ("cuda", 16 * MATRIX, 16 * COPY) if cuda else ("cpu", MATRIX, COPY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    product = best_of(lambda: torch.mm(matrix, matrix), cuda)
    copy = best_of(lambda: target.copy_(source), cuda)
    torch.set_num_threads(threads)
    return {"matrix_product_flops_per_second": 2 * size**3 / product, "memory_bytes_per_second": 2 * copied / copy}


def best_of(action: Any, cuda: bool, times: int = 5) -> float:
    """Seconds of the fastest of `times`, after one that warms up."""
    import torch

    seconds = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def torch_mends(facts: dict[str, Any]) -> Iterator[Mend]:
    found = facts["torch"]
    number = tuple(int(part) for part in facts["packages"]["torch"].split("+")[0].split(".")[:2])
    if number < OLDEST_TORCH:
        yield Mend(f"torch {facts['packages']['torch']} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}: pip install -U torch", must=True)
    elif number > NEWEST_TORCH:
        yield Mend(f"torch {facts['packages']['torch']} is newer than {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}, the newest that was tested")
    if not found["backends"]:
        yield Mend("torch has no distributed backend (gloo, nccl): install a torch built with them", must=True)
    if facts["cuda_cards"] and not found["cuda_devices"]:
        yield Mend(f"the driver shows {facts['cuda_cards'][0]}, torch does not: install a torch built for CUDA", must=True)
    if "gloo" in found["backends"] and "all_reduce_seconds" not in facts["speed"]:
        yield Mend("two ranks could not meet over gloo: check GLOO_SOCKET_IFNAME and that the host's own name resolves", must=True)
    if found["idle"]:
        yield Mend(found["idle"])
    if found["cuda_devices"] and "nccl" not in found["backends"]:
        yield Mend("CUDA devices without NCCL: install a torch built with it", must=True)


def machine_mends(facts: dict[str, Any]) -> Iterator[Mend]:
    environment = facts["environment"]
    for name, least in (("NCCL_P2P_DISABLE", "devices of a node"), ("NCCL_IB_DISABLE", "nodes")):
        if environment.get(name) == "1":
            yield Mend(f"{name}=1 slows the links between {least}: unset it unless it works around a fault")
    if facts["shared_memory"] < 64 * 2**20:
        yield Mend("/dev/shm has less than 64 MiB: start the container with a larger --shm-size")
    if facts["cuda_cards"] and "PYTORCH_ALLOC_CONF" not in environment:
        yield Mend("PYTORCH_ALLOC_CONF=expandable_segments:True wastes less device memory")


def text(facts: dict[str, Any], mends: list[Mend], language: str) -> str:
    from meshwright.report.text import lines
    from meshwright.words.lines import translated
    from meshwright.words.say import name, tell
    from meshwright.words.say import say as said

    rows = [(label, line if isinstance(line, str) else said(line, language)) for label, line in lines_of(facts)]
    verdict = [(f"{'must' if mend.must else 'may'} mend", translated(mend.what, language)) for mend in mends]
    verdict.append(("verdict", said(tell(f"doctor.{facts['verdict']}"), language)))
    called = [[(said(name("doctor", label), language), line) for label, line in part] for part in (rows, verdict)]
    return "\n\n".join(map(lines, called))


def lines_of(facts: dict[str, Any]) -> Iterator[tuple[str, Sentence | str]]:
    """What is known, each with its label: names and numbers as they are, the rest in words."""
    from meshwright.words.say import tell

    yield "python", facts["python"]
    yield "packages", ", ".join(f"{name} {number}" for name, number in facts["packages"].items() if number)
    absent = [name for name, number in facts["packages"].items() if not number]
    if absent:
        yield "absent", ", ".join(absent)
    yield "host", tell("doctor.cores", cores=facts["cores"], memory=facts["memory"], shared=facts["shared_memory"])
    if "torch" in facts:
        known, measured = facts["torch"], facts["speed"]
        yield "devices", ", ".join(known["cuda_devices"]) or tell("doctor.no devices")
        yield "backends", ", ".join(known["backends"]) or tell("doctor.no backends")
        product, memory = measured["matrix_product_flops_per_second"], measured["memory_bytes_per_second"]
        where = tell("doctor.device" if known["cuda_devices"] else "doctor.core")
        yield "speed", tell("doctor.rates", product=show_rate(product, "FLOP/s"), memory=memory, where=where)
        if "all_reduce_seconds" in measured:
            rate, wait = measured["all_reduce_bytes_per_second"], measured["all_reduce_seconds"]
            yield "gloo", tell("doctor.exchange", rate=rate, wait=wait)
    for variable, value in facts["environment"].items():
        yield "set", f"{variable}={value}"
