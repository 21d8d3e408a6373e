"""Writes checkpoints of torch.distributed.checkpoint (DCP) with torch's own `FileSystemWriter`: {"model": weights,
"optimizer": {"state", "param_groups"}}, or tensors that are given as boxes.

The planner reads each tensor or box when it is written, so only one is in memory.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.checkpoint.formats.torch_state import LazyTensor, TorchState
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME


class _StreamingPlanner(DefaultSavePlanner):
    """Plans a save of meta tensors. The real tensor of a key is read when it is written."""

    def __init__(self, read: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the object to write for `index`."""
        return self.read[index.fqn]() if index.fqn in self.read else super().lookup_object(index)


class _StreamingWriter(FileSystemWriter):
    """Writes several files in order. torch's writer retains all tensors of a file until the file is complete, so a file
    has at most the bytes of the largest tensor."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of `plan`. Returns the place of each item."""
        sizes = {id(item): _item_bytes(item) for item in plan.items}
        room = largest = max(sizes.values(), default=0)
        files: list[list[WriteItem]] = [[]]
        for item in plan.items:
            if sizes[id(item)] > room:
                files.append([])
                room = largest
            files[-1].append(item)
            room -= sizes[id(item)]
        results: list[WriteResult] = []
        for at, items in enumerate(files):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{at}_")
            results += super().write_data(dataclasses.replace(plan, items=items, storage_data=prefix), planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _item_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def write_dcp(content: TorchState, folder: Path) -> None:
    """Writes `content` as a DCP checkpoint into the new folder `folder`, with the keys 'model' and 'optimizer'."""
    read: dict[str, Callable[[], torch.Tensor]] = {}

    def meta(key: str, tensor: LazyTensor) -> torch.Tensor:
        read[key] = tensor.read
        return torch.empty(tensor.shape, dtype=DTYPE_BY_NAME[tensor.dtype], device="meta")

    state: dict[str, Any] = {"model": {name: meta(f"model.{name}", one) for name, one in content.weights.items()}}
    if content.states:
        states = {
            name: {kind: meta(f"optimizer.state.{name}.{kind}", one) for kind, one in kinds.items()}
            | {key: torch.tensor(value) for key, value in content.scalars[name].items()}
            for name, kinds in content.states.items()
        }
        state["optimizer"] = {"state": states, "param_groups": content.groups}
    _save(state, folder, _StreamingPlanner(read))


class StoredBox(NamedTuple):
    """A box of the tensor `key`, which has the shape `full`: the part from `offsets` on, which `tensor` reads."""

    key: str
    full: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: LazyTensor


class _BoxPlanner(DefaultSavePlanner):
    """Plans a save of boxes and objects. A box is read when it is written."""

    def __init__(self, boxes: Sequence[StoredBox], objects: Mapping[str, Any]) -> None:
        super().__init__()
        self.boxes = {(box.key, torch.Size(box.offsets)): box for box in boxes}
        self.objects = objects

    def create_local_plan(self) -> SavePlan:
        """Returns the plan to write all boxes and objects."""
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]
        for (key, offsets), box in self.boxes.items():
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, torch.Size(box.tensor.shape)),
                TensorProperties(dtype=DTYPE_BY_NAME[box.tensor.dtype]),
                torch.Size(box.full),
            )
            items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the object to write for `index`."""
        if index.offset is None:
            return self.objects[index.fqn]
        return self.boxes[index.fqn, index.offset].tensor.read()


def write_boxes(folder: Path, boxes: Sequence[StoredBox], objects: Mapping[str, Any]) -> None:
    """Writes a DCP checkpoint of tensors, given as boxes that cover them, and of objects by key."""
    _save({}, folder, _BoxPlanner(boxes, objects))


def _save(state: dict[str, Any], folder: Path, planner: SavePlanner) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a single process saves
        try:
            dcp.save(state, storage_writer=_StreamingWriter(folder, overwrite=False), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
