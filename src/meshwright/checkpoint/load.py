"""Loads a checkpoint: fills the tensors of a rank under any layout, and returns the state of the trainer. The trainer
uses this file to load on-disk and in-memory checkpoints.

Guarantees:
- Names, shapes and dtypes are checked before any tensor is written.
- The digest of every shard that is read from disk is checked.

If a shard is corrupt, some tensors are already overwritten when the error is raised. So the caller must load another
checkpoint before training continues.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from meshwright.checkpoint.manifest import CheckpointManifest, SavedShard, TensorEntry
from meshwright.checkpoint.reshard import CopyRange, FullTensor, overlapping_shards, plan_copies
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME, dtype_name
from meshwright.checkpoint.save import SINGLE_RANK, LocalShard, RankExchange
from meshwright.checkpoint.verify import CheckpointReader
from meshwright.core.errors import InputError, MeshwrightError, did_you_mean
from meshwright.core.messages import Message
from meshwright.spec.plan import Plan


class LoadResult(NamedTuple):
    """The contents of a checkpoint except the tensors that were loaded.

    `state` is the JSON state of the trainer. `plan` and `world` are the plan and the world size of the run that saved
    the checkpoint. `local` contains tensors that only this rank has, such as random states. It is None if the world
    size or the plan has changed. In that case random states must start from the seed.
    """

    step: int
    state: dict[str, Any]
    plan: str
    world: int
    local: dict[str, torch.Tensor] | None


class CheckpointSource(Protocol):
    """The interface of a checkpoint that can be loaded: `CheckpointReader` of a folder, or `MemoryCheckpoint`."""

    @property
    def path(self) -> Path:
        """Returns the path for error messages."""

    @property
    def manifest(self) -> CheckpointManifest:
        """Returns the manifest of the checkpoint."""

    def read(self, name: str, part: SavedShard, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the elements of the shard `part` of tensor `name`, written to the flat tensor `out` if given."""


def load_checkpoint(
    path: Path | str | CheckpointSource,
    wanted: Iterable[LocalShard],
    *,
    plan: Plan | None = None,
    ranks: RankExchange = SINGLE_RANK,
    cast: bool = False,
) -> LoadResult:
    """Fills the tensor of each shard in `wanted`. The tensor must be flat and have the length of its shard.

    `cast`: whether values are converted from the saved dtype to that of the tensor. If False, the two dtypes must be
    equal. If `plan` and the world size are those of the checkpoint, the result contains the local tensors of this rank.
    With `ranks`, every rank must call this function, and a failure on one rank raises an InputError with the same
    message on all ranks.

    Raises:
        InputError: a tensor is missing or has a wrong shape or dtype, or a shard is corrupt.
    """
    result: list[LoadResult] = []

    def work() -> None:
        result.append(
            _load_tensors(
                CheckpointReader(path) if isinstance(path, str | Path) else path, list(wanted), plan, ranks, cast
            )
        )

    _raise_on_all_ranks(ranks, work)
    return result[0]


def _raise_on_all_ranks(ranks: RankExchange, work: Callable[[], None]) -> None:
    problem, cause = "", None
    try:
        work()
    except (MeshwrightError, OSError) as error:
        problem, cause = str(error), error
    answers = [json.loads(text) for text in ranks.all_gather(json.dumps(problem))]
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer]
    if failed:
        place = f"rank {failed[0][0]}: " if ranks.world > 1 else ""
        raise InputError(Message("{place}{failed}", place=place, failed=failed[0][1])) from cause


def _load_tensors(
    reader: CheckpointSource, wanted: list[LocalShard], plan: Plan | None, ranks: RankExchange, cast: bool
) -> LoadResult:
    manifest = reader.manifest
    by_name: dict[str, list[LocalShard]] = defaultdict(list)
    for piece, tensor in wanted:
        by_name[piece.name].append((piece, tensor))
    _check_tensors(reader.path, manifest, by_name, cast)
    for name, shards in by_name.items():
        _fill_tensor(reader, name, shards)
    local = None
    if manifest.world == ranks.world and plan is not None and manifest.plan_digest == plan.digest:
        prefix = f"rank/{ranks.rank}/"
        local = {
            name.removeprefix(prefix): read_full_tensor(reader, name)
            for name in manifest.tensors
            if name.startswith(prefix)
        }
    return LoadResult(manifest.step, manifest.state, manifest.plan, manifest.world, local)


def _check_tensors(path: Path, manifest: CheckpointManifest, by_name: dict[str, list[LocalShard]], cast: bool) -> None:
    missing = [name for name in by_name if name not in manifest.tensors]
    if missing:
        more = Message(" and {count} more", count=len(missing) - 1) if len(missing) > 1 else ""
        raise InputError(
            Message(
                "{path} has no tensor {missing!r}{more}{hint}: saved from another model?",
                path=path,
                missing=missing[0],
                more=more,
                hint=did_you_mean(missing[0], manifest.tensors),
            )
        )
    for name, shards in by_name.items():
        entry = manifest.tensors[name]
        for piece, tensor in shards:
            if tuple(piece.shape) != entry.shape:
                raise InputError(
                    Message(
                        "{path}: {name} has shape {shape}, this model's is {model_shape}: saved from another model?",
                        path=path,
                        name=name,
                        shape=list(entry.shape),
                        model_shape=list(piece.shape),
                    )
                )
            if not cast and dtype_name(tensor.dtype) != entry.dtype:
                raise InputError(
                    Message(
                        "{path}: {name} is {dtype}, but this job uses {dtype_name}: use the workload.precision of "
                        "the checkpoint",
                        path=path,
                        name=name,
                        dtype=entry.dtype,
                        dtype_name=dtype_name(tensor.dtype),
                    )
                )
            if tensor.dim() != 1 or tensor.numel() != piece.stop - piece.start:
                raise InputError(
                    Message(
                        "{name}: the requested shard has {stop} elements, but its tensor has shape {shape}",
                        name=name,
                        stop=piece.stop - piece.start,
                        shape=list(tensor.shape),
                    )
                )


@torch.no_grad()
def _fill_tensor(reader: CheckpointSource, name: str, shards: list[LocalShard]) -> None:
    entry = reader.manifest.tensors[name]
    saved = [entry.piece(name, part) for part in entry.pieces]
    rest = []
    for piece, tensor in shards:
        plan = plan_copies(piece, saved) if piece.start < piece.stop else []
        if plan is None:
            rest.append((piece, tensor))
        else:
            _copy_runs(reader, name, entry, plan, tensor)
    if rest:
        whole = _assemble_full_tensor(reader, name, overlapping_shards([piece for piece, _ in rest], saved))
        for piece, tensor in rest:
            tensor.copy_(whole.extract(piece))


def _copy_runs(
    reader: CheckpointSource, name: str, entry: TensorEntry, plan: list[CopyRange], tensor: torch.Tensor
) -> None:
    """Copies the ranges of saved shards that `plan` lists into ranges of `tensor`. A shard that is copied as a whole is
    read directly into `tensor`, if `tensor` is contiguous, on the CPU, and of the saved dtype.
    """
    sources: dict[int, list[CopyRange]] = defaultdict(list)
    for copy in plan:
        sources[copy.source].append(copy)
    for source, copied in sources.items():
        part = entry.pieces[source]
        direct = tensor.is_contiguous() and tensor.device.type == "cpu" and tensor.dtype == DTYPE_BY_NAME[entry.dtype]
        if direct and len(copied) == 1 and copied[0].length == part.stop - part.start:
            reader.read(name, part, tensor[copied[0].to : copied[0].to + copied[0].length])
            continue
        data = reader.read(name, part)
        for copy in copied:
            tensor[copy.to : copy.to + copy.length].copy_(data[copy.start : copy.start + copy.length])


def _assemble_full_tensor(reader: CheckpointSource, name: str, indices: list[int]) -> FullTensor:
    """Returns the full tensor `name`, filled from the saved shards at `indices`."""
    entry = reader.manifest.tensors[name]
    whole = FullTensor(entry.shape, DTYPE_BY_NAME[entry.dtype])
    groups: dict[tuple[tuple[int, int], ...], list[SavedShard]] = defaultdict(list)
    for index in indices:
        groups[entry.pieces[index].intervals].append(entry.pieces[index])
    for parts in groups.values():
        piece = entry.piece(name, parts[0])
        memory = whole.part_buffer(piece)
        for part in parts:
            reader.read(name, part, memory[part.start : part.stop])
        whole.place_part(piece, memory)
    return whole


def read_full_tensor(reader: CheckpointSource, name: str) -> torch.Tensor:
    """Returns the full tensor `name`."""
    return _assemble_full_tensor(reader, name, list(range(len(reader.manifest.tensors[name].pieces)))).tensor


def iter_full_tensors(path: Path | str, prefix: str = "model/") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name without the prefix, full tensor) for each tensor whose name begins with `prefix`, one at a time."""
    reader = CheckpointReader(path)
    for name in reader.manifest.tensors:
        if name.startswith(prefix):
            yield name.removeprefix(prefix), read_full_tensor(reader, name)
