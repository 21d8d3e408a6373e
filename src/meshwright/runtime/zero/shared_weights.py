"""Weights of ZeRO 3 that lie once on a host: its ranks write their shards into one memory, and gathering them is no
more than meeting.

[Note: once] What ranks of other hosts or devices must be sent can be read here where it lies. A unit's whole weights
are one anonymous file that
every rank of its shard group maps, and of which it writes its own run. To open it is to hear that every rank has come
there, and has therefore
written its run of the last update. Nobody writes while another one reads: before that ranks settle, and meet there too
(`GradReducer.settle`).

[Note: gone] Gathered weights are gone while their unit is closed, and what reads them too early or too late ends in one
line (train/oom.py). So it
does on ranks of one host: parameters are then parts of a buffer without memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.runtime.comm.async_collectives import CollectiveWork, all_gather
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.shm.memory import SharedMemory


class SharedWeights:
    """`whole` is there for every rank of `group`, who make one at the same time."""

    def __init__(self, host: SharedMemory, group: CommGroup, numel: int, dtype: torch.dtype) -> None:
        self._group = group
        made = host.segment(numel * dtype.itemsize) if group.index == 0 else None
        files = torch.zeros(group.size, dtype=torch.int64)
        all_gather(files, torch.tensor([0 if made is None else made.fd]), group).wait()
        if made is not None:
            host.staging_bytes -= made.size
        self.full = host.map_file(group.ranks[0], int(files[0])).view(dtype)[:numel]
        self._views: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        self._is_visible = True

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Those that lie in `whole` now."""
        none = torch.empty_like(self.full)
        held = [(parameter, parameter.data) for parameter in parameters]
        self._views = [
            (each, none.as_strided(data.shape, data.stride(), data.storage_offset()), data) for each, data in held
        ]
        none.untyped_storage().resize_(0)

    def set_visible(self, whole: bool) -> None:
        """What the parameters are: parts of `whole`, or gone."""
        for parameter, gone, there in self._views if whole != self._is_visible else ():
            parameter.data = there if whole else gone
        self._is_visible = whole

    def barrier(self) -> CollectiveWork:
        """Finished when every rank of the group has come here."""
        return all_gather(
            torch.zeros(self._group.size, dtype=torch.int8), torch.zeros(1, dtype=torch.int8), self._group
        )


def make_shared_weights(
    host: SharedMemory | None, group: CommGroup | None, numel: int, dtype: torch.dtype
) -> SharedWeights | None:
    """None where ranks of `group` do not all share memory."""
    if host is None or group is None or group.shm is None or group.process_group is not None or not numel:
        return None
    return SharedWeights(host, group, numel, dtype)
