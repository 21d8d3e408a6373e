"""The group of all ranks of a test, as a mesh makes it: through shared memory, or over gloo where MESHWRIGHT_SHARED is 0."""

from __future__ import annotations

import os

import torch.distributed as dist

from meshwright.parallel.group import Group
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.shared import SWITCH
from meshwright.spec.plan import Plan


def everyone(shared: bool = True) -> Group:
    """All ranks call it, equally often."""
    before = os.environ.get(SWITCH)
    try:
        if not shared:
            os.environ[SWITCH] = "0"
        group = make_mesh(Plan(tp=dist.get_world_size())).world
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before
    assert group is not None
    return group
