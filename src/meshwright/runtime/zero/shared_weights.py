"""ZeRO-3 weights that the ranks of one host store once: every rank writes its shard into one shared memory, and
unsharding is only a barrier.

[Note: once] The full weights of a parameter group are one anonymous file that every rank of its shard group maps, and
of which it writes its own shard. Unsharding waits until every rank has reached the barrier, and so has written its
shard of the last update. No rank writes while another one reads: before that, ranks quiesce and pass a barrier too
(`GradReducer.quiesce`).

[Note: gone] Gathered weights are freed while their group is sharded, and an access too early or too late raises an
error of one line. The same holds for ranks of one host: their parameters are then views of a buffer without storage.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.runtime.comm.async_collectives import CollectiveWork, all_gather
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.shm.memory import SharedMemory


class SharedWeights:
    """The full weights `full`, shared by all ranks of `group`, which create it at the same time."""

    def __init__(self, host: SharedMemory, group: CommGroup, numel: int, dtype: torch.dtype) -> None:
        self._group = group
        segment = host.segment(numel * dtype.itemsize) if group.index == 0 else None
        files = torch.zeros(group.size, dtype=torch.int64)
        all_gather(files, torch.tensor([0 if segment is None else segment.fd]), group).wait()
        if segment is not None:
            host.staging_bytes -= segment.size
        self.full = host.map_file(group.ranks[0], int(files[0])).view(dtype)[:numel]
        self._views: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        self._is_visible = True

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Registers parameters that are views of `full`."""
        none = torch.empty_like(self.full)
        parameters_data = [(parameter, parameter.data) for parameter in parameters]
        self._views = [
            (each, none.as_strided(data.shape, data.stride(), data.storage_offset()), data)
            for each, data in parameters_data
        ]
        none.untyped_storage().resize_(0)

    def set_visible(self, whole: bool) -> None:
        """Makes the parameters views of `full`, or of a buffer without storage."""
        for parameter, hidden, visible in self._views if whole != self._is_visible else ():
            parameter.data = visible if whole else hidden
        self._is_visible = whole

    def barrier(self) -> CollectiveWork:
        """Returns a work that completes when every rank of the group has called this."""
        return all_gather(
            torch.zeros(self._group.size, dtype=torch.int8), torch.zeros(1, dtype=torch.int8), self._group
        )


def make_shared_weights(
    host: SharedMemory | None, group: CommGroup | None, numel: int, dtype: torch.dtype
) -> SharedWeights | None:
    """Returns shared weights, or None if the ranks of `group` do not all share memory."""
    if host is None or group is None or group.shm is None or group.process_group is not None or not numel:
        return None
    return SharedWeights(host, group, numel, dtype)
