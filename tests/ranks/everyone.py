"""The group of all ranks of a test, as a mesh makes it: through shared memory, or over gloo where MESHWRIGHT_SHARED is 0; and who counts its
collectives there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallel.exchange.group import Group
from meshwright.parallel.exchange.shared import SWITCH
from meshwright.parallel.mesh import make_mesh
from meshwright.spec.plan import Plan


@contextmanager
def between_hosts(apart: bool = True) -> Iterator[None]:
    """As on ranks of different hosts: no memory is shared."""
    before = os.environ.get(SWITCH)
    try:
        if apart:
            os.environ[SWITCH] = "0"
        yield
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before


def everyone(shared: bool = True) -> Group:
    """All ranks call it, equally often."""
    with between_hosts(not shared):
        group = make_mesh(Plan(tp=dist.get_world_size())).world
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
