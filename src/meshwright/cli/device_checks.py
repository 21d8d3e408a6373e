"""Compares the devices of a job with this machine and with its torch, before ranks start. Ranks ask torch for devices.
If torch cannot use them, ranks would train on CPU cores, or several ranks would share one device.

Nothing here imports torch or starts a driver. The build of torch is read from its file `version.py`, the devices and
the version of the driver from the files of the kernel.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

if TYPE_CHECKING:
    from meshwright.spec.job import Job

DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
AMD_TOPOLOGY_FOLDER = Path("/sys/class/kfd/kfd/topology/nodes")
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
AMD_VISIBLE_VARIABLE = "HIP_VISIBLE_DEVICES"

OLDEST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""The oldest Linux driver for each major version of CUDA. Source: CUDA release notes, table of minor version
compatibility."""


class TorchBuild(NamedTuple):
    """The versions of CUDA and of ROCm (HIP) for which torch was built, '' for none."""

    cuda: str = ""
    hip: str = ""


def torch_build() -> TorchBuild | None:
    """Returns the build of the installed torch, None if it cannot be found."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "version.py"
        if path.is_file():
            text = path.read_text(errors="replace")
            found = (re.search(rf"^{name}\b[^=\n]*=\s*'([^']*)'", text, re.MULTILINE) for name in ("cuda", "hip"))
            return TorchBuild(*(match[1] if match else "" for match in found))
    return None


def driver_version() -> str:
    """Returns the version of the NVIDIA kernel driver, such as 535.129.03, or '' if it is unknown."""
    try:
        text = DRIVER_VERSION_FILE.read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else ""


def count_amd_devices() -> int:
    """Returns the number of AMD GPUs that the kernel driver lists. A CPU is listed too, without SIMD units."""
    count = 0
    for path in AMD_TOPOLOGY_FOLDER.glob("*/properties"):
        try:
            match = re.search(r"^simd_count (\d+)", path.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        count += match is not None and int(match[1]) > 0
    return count


def check_torch_build(cards: list[str], amd: int, build: TorchBuild | None, driver: str) -> None:
    """Raises InputError if torch cannot use the visible NVIDIA devices `cards` or the `amd` AMD devices: it is built
    without CUDA and ROCm, the NVIDIA driver of version `driver` is too old for it, or its NCCL is missing or too old.

    >>> check_torch_build(["NVIDIA H200"], 0, TorchBuild("12.8"), "535.129.03")
    >>> check_torch_build(["NVIDIA H200"], 0, TorchBuild("13.0"), "535.129.03")
    Traceback (most recent call last):
    meshwright.core.errors.InputError: the NVIDIA driver 535.129.03 is older than 580.65.6, which torch for CUDA 13.0 \
needs: update the driver, or install a torch for CUDA 12
    """
    if build is None or not (cards or amd) or (amd and build.hip):
        return
    if not (cards and build.cuda):
        raise InputError(
            Message(
                "this machine has {count} GPUs ({cards}), but the installed torch is built without {platform}: install "
                "a torch built for {platform}, or train on CPU cores with --cluster local:4 and {variable}= (empty)",
                count=len(cards) or amd,
                cards=cards[0] if cards else "AMD",
                platform="CUDA" if cards else "ROCm",
                variable=VISIBLE_VARIABLE if cards else AMD_VISIBLE_VARIABLE,
            )
        )
    oldest = OLDEST_DRIVERS.get(int(build.cuda.partition(".")[0]), (0,))
    version = tuple(int(part) for part in driver.split(".")) if driver else oldest
    if version < oldest:
        usable = [major for major, least in OLDEST_DRIVERS.items() if least <= version]
        raise InputError(
            Message(
                "the NVIDIA driver {driver} is older than {oldest}, which torch for CUDA {cuda} needs: update the "
                "driver, or install a torch for CUDA {usable}",
                driver=driver,
                oldest=".".join(map(str, oldest)),
                cuda=build.cuda,
                usable=max(usable, default=min(OLDEST_DRIVERS)),
            )
        )
    check_nccl(build)


def check_nccl(build: TorchBuild) -> None:
    """Raises InputError if the NCCL package that torch for CUDA requires is not installed, or is older than the one for
    which torch is built. Such a torch cannot be imported, or its ranks fail when they connect. A torch that names no
    NCCL package contains NCCL, or lacks it, which ranks report."""
    try:
        required = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return
    matches = (re.match(r"(nvidia-nccl-[\w-]+)==([\d.]+)", line) for line in required)
    match = next((each for each in matches if each), None)
    if match is None:
        return
    package, needed = match.groups()
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = ""
    if not found or _version_numbers(found) < _version_numbers(needed):
        raise InputError(
            Message(
                "torch for CUDA {cuda} needs NCCL {needed}, but {found}: pip install {package}=={needed}",
                cuda=build.cuda,
                needed=needed,
                found=Message("NCCL {version} is installed", version=found)
                if found
                else Message("it is not installed"),
                package=package,
            )
        )


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def check_devices(question: Job | None, ranks: int) -> None:
    """Raises InputError if the ranks of this machine would not get the devices of the job's cluster. `question`: the
    job, None if its model has no estimate. `ranks`: the number of ranks that this command starts on this machine, 0 if
    another program starts them."""
    from meshwright.elastic.launch.submission import device_vendor
    from meshwright.planner.inputs.cluster_parser import cuda_device_names

    cards, amd, build = cuda_device_names(), count_amd_devices(), torch_build()
    if question is None:
        check_torch_build(cards, amd, build, driver_version())
        return
    cluster = question.cluster
    vendors = {device_vendor(group.device) for group in cluster.groups}
    if vendors == {"cpu"}:
        return
    names = " and ".join(dict.fromkeys(group.device.name for group in cluster.groups))
    if not cards and not amd:
        if hidden := cuda_device_names(all_devices=True):
            raise InputError(
                Message(
                    "CUDA_VISIBLE_DEVICES={value} hides all {count} GPUs of this machine ({cards}): unset it, or use "
                    "--cluster local to train on CPU cores",
                    value=os.environ[VISIBLE_VARIABLE],
                    count=len(hidden),
                    cards=hidden[0],
                )
            )
        raise InputError(
            Message(
                "cluster {cluster!r} has {devices}, but this machine has no GPU: use --cluster local, or train on "
                "CPUs with `train --allow-cpu`, where the predicted times and memory do not apply",
                cluster=cluster.name,
                devices=names,
            )
        )
    used = "amd" if build is not None and build.hip else "nvidia"
    if cards and amd and vendors != {used}:
        raise InputError(
            Message(
                "this machine has NVIDIA and AMD GPUs, and its torch uses those of {vendor}, but cluster {cluster!r} "
                "has {devices}: install torch for these devices, or name others in --cluster",
                vendor=used.upper(),
                cluster=cluster.name,
                devices=names,
            )
        )
    check_torch_build(cards, amd, build, driver_version())
    if ranks > (len(cards) if used == "nvidia" else amd) > 0:
        raise InputError(
            Message(
                "plan and cluster have {ranks} ranks on this machine, but {platform} shows {count} devices ({cards}): "
                "name a smaller cluster, or make more devices visible ({variable})",
                ranks=ranks,
                platform="CUDA" if used == "nvidia" else "ROCm",
                count=len(cards) if used == "nvidia" else amd,
                cards=cards[0] if used == "nvidia" else "AMD",
                variable=VISIBLE_VARIABLE if used == "nvidia" else AMD_VISIBLE_VARIABLE,
            )
        )
