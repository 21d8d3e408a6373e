"""Ranks of one machine that count as ranks of several hosts: neighbours, `each` to a host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from meshwright.runtime.comm.shm.memory import HOST_ENV


@contextmanager
def hosts(each: int) -> Iterator[None]:
    os.environ[HOST_ENV] = str(dist.get_rank() // each)
    try:
        yield
    finally:
        del os.environ[HOST_ENV]
