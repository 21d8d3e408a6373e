"""Ranks of one machine that count as ranks of several hosts: neighbours, `each` to a host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from meshwright.parallel.exchange.shared import HOST


@contextmanager
def hosts(each: int) -> Iterator[None]:
    os.environ[HOST] = str(dist.get_rank() // each)
    try:
        yield
    finally:
        del os.environ[HOST]
