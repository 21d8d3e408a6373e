"""The device of this rank, and what must be so before anything runs on it.

Messages of NCCL that say nothing of a device, random states and streams go by the current one: it is this rank's own.
cuBLAS adds up in the same
order each time only in a workspace of fixed size, which it asks the environment for when it starts; torch refuses
deterministic products otherwise.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def local_device() -> torch.device:
    """The CUDA device of this rank (LOCAL_RANK; without it the current one), or the CPU."""
    if torch.cuda.is_available():
        number = os.environ.get("LOCAL_RANK")
        return torch.device(
            "cuda", torch.cuda.current_device() if number is None else int(number) % torch.cuda.device_count()
        )
    return torch.device("cpu")


def init_local_device() -> torch.device:
    """The same, made this process's own. Before the first collective and the first product."""
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif line := unused_accelerator_warning(torch.accelerator.current_accelerator(check_available=True)):
        warnings.warn(line, stacklevel=3)
    return device


def unused_accelerator_warning(found: torch.device | None) -> str:
    """What is to be said of an accelerator that nothing here runs on.

    >>> unused_accelerator_warning(torch.device("mps"))
    'this machine has an accelerator of the kind mps, which is not used: training runs on its cores'
    >>> unused_accelerator_warning(None)
    ''
    """
    return (
        ""
        if found is None
        else f"this machine has an accelerator of the kind {found.type}, which is not used: training runs on its cores"
    )


def host_id() -> str:
    """The same text for ranks of one machine and network: a container with a network of its own is a host of its
    own."""
    try:
        return f"{machine_id()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return machine_id()


def machine_id() -> str:
    """The same text for ranks of one machine, whose processors one kernel counts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
