"""Selects the device of this rank and identifies its host."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from meshwright.core.messages import Message
from meshwright.runtime.backend import CUBLAS_WORKSPACE, accelerators, backend_of


def local_device() -> torch.device:
    """Returns the accelerator of this rank: the one with index `LOCAL_RANK`, or the current one without this
    environment variable. Returns the CPU if the process has no accelerator."""
    rank = os.environ.get("LOCAL_RANK")
    index = None if rank is None else int(rank)
    found = (backend.local_device(index) for backend in accelerators())
    return next((device for device in found if device is not None), torch.device("cpu"))


def init_local_device() -> torch.device:
    """Makes `local_device()` the current device of this process and returns it.

    Must be called before the first collective and the first matrix product, because random states, streams, and NCCL's
    messages without a device use the current device. Warns if an accelerator has no backend.
    """
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    device = local_device()
    backend_of(device).select(device)
    if backend_of(device).memory_is_host and (
        line := unused_accelerator_warning(torch.accelerator.current_accelerator(check_available=True))
    ):
        warnings.warn(line, stacklevel=3)
    return device


def unused_accelerator_warning(found: torch.device | None) -> str:
    """Returns the warning about the accelerator `found`, which has no backend; '' if `found` is None.

    >>> unused_accelerator_warning(torch.device("mps"))
    'this machine has an accelerator of the kind mps, which is not used: training runs on its cores'
    >>> unused_accelerator_warning(None)
    ''
    """
    return (
        ""
        if found is None
        else Message(
            "this machine has an accelerator of the kind {type}, which is not used: training runs on its cores",
            type=found.type,
        )
    )


def host_id() -> str:
    """Returns a text that is equal on ranks that share a machine and a network namespace."""
    try:
        return f"{machine_id()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return machine_id()


def machine_id() -> str:
    """Returns a text that is equal on ranks that share a machine, that is, an operating system kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
