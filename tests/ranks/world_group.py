"""The group of all ranks of a test, as a mesh makes it: through shared memory, or over gloo where MESHWRIGHT_SHARED is
0; and who counts its collectives there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.shm.memory import SHARED_MEMORY_ENV
from meshwright.spec.plan import Plan


@contextmanager
def between_hosts(apart: bool = True) -> Iterator[None]:
    """As on ranks of different hosts: no memory is shared."""
    before = os.environ.get(SHARED_MEMORY_ENV)
    try:
        if apart:
            os.environ[SHARED_MEMORY_ENV] = "0"
        yield
    finally:
        os.environ.pop(SHARED_MEMORY_ENV, None)
        if before is not None:
            os.environ[SHARED_MEMORY_ENV] = before


def world_comm_group(shared: bool = True) -> CommGroup:
    """All ranks call it, equally often."""
    with between_hosts(not shared):
        group = make_parallel_context(Plan(tp=dist.get_world_size())).world
    assert group is not None
    return group


class Collectives(TorchDispatchMode):
    """Counts what goes to the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.namespace == "c10d"
        return function(*args, **(kwargs or {}))
