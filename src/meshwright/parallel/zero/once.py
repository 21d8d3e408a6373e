"""Weights of ZeRO 3 that lie once on a host: its ranks write their shards into one memory, and gathering them is no more than meeting.

[Note: once] What ranks of other hosts or devices must be sent can be read here where it lies. A unit's whole weights are one anonymous file that
every rank of its shard group maps twice: its own run, which it alone writes, and the whole, whose first page nobody may touch while the unit is
closed: gathered weights are gone then, and what reads them too early or too late should end on ranks of one host as it does elsewhere. (All
pages would take 0.2 ms of 7 MiB, a third of gathering them.) To open it is to hear that every rank has come there, and has therefore written its run of the last update.
Nobody writes while another one reads: before that ranks settle, and meet there too (`Zero.settle`).
"""

from __future__ import annotations

import ctypes

import torch

from meshwright.parallel.exchange.exchange import Pending, all_gather
from meshwright.parallel.exchange.group import Group
from meshwright.parallel.exchange.shared import PAGE, Host

_NONE, _BOTH = 0, 1 | 2
"""PROT_NONE; PROT_READ and PROT_WRITE."""


class Once:
    """`whole` and `own` are the same memory, all of it; `own` is always there. Every rank of `group` makes one at the same time."""

    def __init__(self, host: Host, group: Group, numel: int, dtype: torch.dtype) -> None:
        self._group = group
        made = host.segment(numel * dtype.itemsize) if group.index == 0 else None
        files = torch.zeros(group.size, dtype=torch.int64)
        all_gather(files, torch.tensor([0 if made is None else made.file]), group).wait()
        if made is not None:
            host.passing -= made.size
        self.whole, self.own = (host.opened(group.ranks[0], int(files[0])).view(dtype)[:numel] for _ in range(2))
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect

    def meet(self) -> Pending:
        """Finished when every rank of the group has come here."""
        return all_gather(torch.zeros(self._group.size, dtype=torch.int8), torch.zeros(1, dtype=torch.int8), self._group)

    def show(self, whole: bool) -> None:
        """Whether `whole` may be touched."""
        done = self._protect(ctypes.c_void_p(self.whole.data_ptr()), ctypes.c_size_t(PAGE), _BOTH if whole else _NONE)
        if done:
            raise OSError(ctypes.get_errno(), "mprotect")


def once(host: Host | None, group: Group | None, numel: int, dtype: torch.dtype) -> Once | None:
    """None where ranks of `group` do not all share memory."""
    if host is None or group is None or group.lanes is None or group.process is not None or not numel:
        return None
    return Once(host, group, numel, dtype)
