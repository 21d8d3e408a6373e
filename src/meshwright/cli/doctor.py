"""`meshwright doctor`: check this machine: devices, backends, bandwidth, versions.

Exit code 1 means that something must be fixed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from meshwright.cli.options import AsJson, Language, print_json, print_output
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, term, translate
from meshwright.core.units import show_rate

REPORTED_PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "cyclopts",
    "safetensors",
    "xxhash",
    "psutil",
    "tokenizers",
    "transformers",
    "tensorboard",
)
REQUIRED_PACKAGES = ("torch", "numpy", "pydantic", "cyclopts", "safetensors", "xxhash", "psutil")
REPORTED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE",
    "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "LD_PRELOAD", "PYTORCH_ALLOC_CONF",
)  # fmt: skip
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)
MATMUL_SIZE = 768
COPY_BYTES = 64 * 2**20
RENDEZVOUS_TIMEOUT = timedelta(seconds=30)


class Remedy(NamedTuple):
    """A recommended change. `must`: whether training needs the change."""

    what: str
    must: bool = False


def doctor(*, json: AsJson = False, lang: Language = None) -> int:
    """Check this machine: versions, devices, backends, speed, settings of NCCL and gloo; a verdict and remedies.

    Try: meshwright doctor --json
    """

    language = choose_language(lang, os.environ)
    facts: dict[str, Any] = {"python": sys.version.split()[0], "packages": dict(package_versions()), **hardware_facts()}
    facts["environment"] = {name: os.environ[name] for name in REPORTED_VARIABLES if name in os.environ}
    mends = [
        Remedy(Message("{name} is missing: pip install meshwright", name=name), must=True)
        for name in REQUIRED_PACKAGES
        if not facts["packages"][name]
    ]
    if facts["packages"]["torch"]:
        facts["torch"] = torch_facts()
        facts["speed"] = {**measure_all_reduce(facts["torch"]["backends"]), **measure_speed()}
        mends += torch_remedies(facts)
    mends += machine_remedies(facts)
    verdict = "broken" if any(mend.must for mend in mends) else "works"
    facts |= {"verdict": verdict, "mends": [mend._asdict() for mend in mends]}
    print_json(facts) if json else print_output(doctor_text(facts, mends, language))
    return 1 if verdict == "broken" else 0


def package_versions() -> Iterator[tuple[str, str | None]]:
    """Yields each relevant package with its version, or None if it is not installed."""
    for name in REPORTED_PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None


def hardware_facts() -> dict[str, Any]:
    """Returns the number of CPU cores, the bytes of memory and of free shared memory, and the CUDA devices that the
    driver lists."""
    from meshwright.planner.inputs.cluster_parser import available_cpus, cuda_device_names, host_memory_bytes

    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "cores": available_cpus(),
        "memory": host_memory_bytes(),
        "shared_memory": float(shared.f_bavail * shared.f_frsize) if shared else 0.0,
        "cuda_cards": cuda_device_names(),
    }


def torch_facts() -> dict[str, Any]:
    """Returns what torch reports: its backends, CUDA devices, versions of CUDA and NCCL, and number of CPU threads. The
    key `idle` has a warning about an accelerator that ranks do not use, or None."""
    import torch
    from torch import distributed

    from meshwright.core.errors import InputError
    from meshwright.runtime.backend import check_other_accelerator

    available, idle = distributed.is_available(), None
    try:
        check_other_accelerator(
            None if torch.cuda.is_available() else torch.accelerator.current_accelerator(check_available=True)
        )
    except InputError as error:
        idle = error.args[0]
    return {
        "backends": [
            name for name in ("gloo", "nccl", "mpi") if available and getattr(distributed, f"is_{name}_available")()
        ],
        "cuda_devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
        "idle": idle,
    }


def measure_all_reduce(backends: list[str]) -> dict[str, float]:
    """Measures all-reduce over gloo between two ranks of this machine. Returns the bus bandwidth of a 16 MiB all-reduce
    in bytes/s, and the seconds of a 4-byte all-reduce. Returns an empty dictionary if torch has no gloo, or if ranks
    cannot fork or connect."""
    if "gloo" not in backends or not hasattr(os, "fork"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                all_reduce_rank(folder, 1)
                code = 0
            finally:
                os._exit(code)
        try:
            return all_reduce_rank(folder, 0)
        except RuntimeError:
            return {}
        finally:
            os.waitpid(child, 0)


def all_reduce_rank(folder: str, rank: int) -> dict[str, float]:
    """Runs rank `rank` (0 or 1) of `measure_all_reduce`, and returns its measurements. `folder` has the rendezvous
    file."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=RENDEZVOUS_TIMEOUT
    )
    try:
        large, small = torch.ones(4 * 2**20), torch.ones(1)
        seconds = [
            best_seconds(lambda tensor=tensor: distributed.all_reduce(tensor), False) for tensor in (large, small)
        ]
    finally:
        distributed.destroy_process_group()
    return {"all_reduce_bytes_per_second": large.nbytes / seconds[0], "all_reduce_seconds": seconds[1]}


def measure_speed() -> dict[str, float]:
    """Measures CUDA device 0, or one CPU core if there is no CUDA device. Returns the FLOP/s of a matrix product (bf16
    on CUDA, fp32 on the CPU), and the bytes/s that a memory copy reads and writes. Each value is the best of five
    repetitions."""
    import torch

    cuda = torch.cuda.is_available()
    device, size, copied = ("cuda", 16 * MATMUL_SIZE, 16 * COPY_BYTES) if cuda else ("cpu", MATMUL_SIZE, COPY_BYTES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    product = best_seconds(lambda: torch.mm(matrix, matrix), cuda)
    copy = best_seconds(lambda: target.copy_(source), cuda)
    torch.set_num_threads(threads)
    return {"matrix_product_flops_per_second": 2 * size**3 / product, "memory_bytes_per_second": 2 * copied / copy}


def best_seconds(action: Any, cuda: bool, times: int = 5) -> float:
    """Returns the seconds of the fastest of `times` calls of `action`, after one warm-up call. With `cuda`, each call
    ends with a synchronization."""
    import torch

    seconds = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def torch_remedies(facts: dict[str, Any]) -> Iterator[Remedy]:
    """Yields the remedies for the torch installation and its devices."""
    found = facts["torch"]
    number = tuple(int(part) for part in facts["packages"]["torch"].split("+")[0].split(".")[:2])
    if number < OLDEST_TORCH:
        yield Remedy(
            Message(
                "torch {torch} is older than {oldest_torch}.{oldest_torch_2}: pip install -U torch",
                torch=facts["packages"]["torch"],
                oldest_torch=OLDEST_TORCH[0],
                oldest_torch_2=OLDEST_TORCH[1],
            ),
            must=True,
        )
    elif number > NEWEST_TORCH:
        yield Remedy(
            Message(
                "torch {torch} is newer than {newest_torch}.{newest_torch_2}, the newest that was tested",
                torch=facts["packages"]["torch"],
                newest_torch=NEWEST_TORCH[0],
                newest_torch_2=NEWEST_TORCH[1],
            )
        )
    if not found["backends"]:
        yield Remedy(
            Message("torch has no distributed backend (gloo, nccl): install a torch built with them"), must=True
        )
    if facts["cuda_cards"] and not found["cuda_devices"]:
        yield Remedy(
            Message(
                "the driver shows {cuda_cards}, torch does not: install a torch built for CUDA",
                cuda_cards=facts["cuda_cards"][0],
            ),
            must=True,
        )
    if "gloo" in found["backends"] and "all_reduce_seconds" not in facts["speed"]:
        yield Remedy(
            Message(
                "two ranks could not connect over gloo: check GLOO_SOCKET_IFNAME and that the host's own name resolves"
            ),
            must=True,
        )
    if found["idle"]:
        yield Remedy(found["idle"])
    if found["cuda_devices"] and "nccl" not in found["backends"]:
        yield Remedy(Message("torch sees CUDA devices but has no NCCL: install a torch built with NCCL"), must=True)


def machine_remedies(facts: dict[str, Any]) -> Iterator[Remedy]:
    """Yields the remedies for the environment, the shared memory and other settings of the machine."""
    environment = facts["environment"]
    for name, least in (("NCCL_P2P_DISABLE", Message("devices of a node")), ("NCCL_IB_DISABLE", Message("nodes"))):
        if environment.get(name) == "1":
            yield Remedy(
                Message(
                    "{name}=1 slows the links between {least}: unset it unless it works around a fault",
                    name=name,
                    least=least,
                )
            )
    if facts["shared_memory"] < 64 * 2**20:
        yield Remedy(Message("/dev/shm has less than 64 MiB: start the container with a larger --shm-size"))


def doctor_text(facts: dict[str, Any], mends: list[Remedy], language: str) -> str:
    """Returns the report as text in `language`."""
    from meshwright.report.text import align_facts

    rows = [(label, translate(line, language)) for label, line in fact_lines(facts)]
    verdict = [(f"{'must' if mend.must else 'may'} mend", translate(mend.what, language)) for mend in mends]
    verdict.append(
        (
            "verdict",
            translate(
                Message(
                    "training works here"
                    if facts["verdict"] == "works"
                    else "training does not work until the lines marked 'must fix' are fixed"
                ),
                language,
            ),
        )
    )
    called = [[(translate(term("doctor", label), language), line) for label, line in part] for part in (rows, verdict)]
    return "\n\n".join(map(align_facts, called))


def fact_lines(facts: dict[str, Any]) -> Iterator[tuple[str, Message | str]]:
    """Yields each known fact with its label. Names and numbers are plain text; everything else is a `Message`."""

    yield "python", facts["python"]
    yield "packages", ", ".join(f"{name} {number}" for name, number in facts["packages"].items() if number)
    absent = [name for name, number in facts["packages"].items() if not number]
    if absent:
        yield "absent", ", ".join(absent)
    yield (
        "host",
        Message(
            "{cores:count core}, {memory:bytes}, shared memory {shared:bytes}",
            cores=facts["cores"],
            memory=facts["memory"],
            shared=facts["shared_memory"],
        ),
    )
    if "torch" in facts:
        known, measured = facts["torch"], facts["speed"]
        yield "devices", ", ".join(known["cuda_devices"]) or Message("no CUDA devices: ranks run on the CPU")
        yield "backends", ", ".join(known["backends"]) or Message("none")
        product, memory = measured["matrix_product_flops_per_second"], measured["memory_bytes_per_second"]
        where = Message("device 0" if known["cuda_devices"] else "one CPU core")
        yield (
            "speed",
            Message(
                "matrix product {product}, memory {memory:rate} ({where})",
                product=show_rate(product, "FLOP/s"),
                memory=memory,
                where=where,
            ),
        )
        if "all_reduce_seconds" in measured:
            rate, wait = measured["all_reduce_bytes_per_second"], measured["all_reduce_seconds"]
            yield (
                "gloo",
                Message(
                    "2 ranks all-reduce at {rate:rate}, the smallest message in {wait:seconds}", rate=rate, wait=wait
                ),
            )
    for variable, value in facts["environment"].items():
        yield "set", f"{variable}={value}"
