"""Saves a checkpoint of the trainer: every rank writes its own file into a temporary folder. The folder gets its final
name when all files are durable.

First, rank 0 decides which rank writes which shard. Then each rank writes, syncs and reads back its file. Finally, rank
0 merges the manifest, renames the folder, syncs the parent folder and writes `latest`. Ranks communicate only through
`RankExchange.all_gather` and small JSON files inside the temporary folder. A shard that several ranks have is written
once, and the bytes are balanced over the ranks. `prune_checkpoints` (retention.py) removes what interrupted saves left.

Guarantees:
- If one rank fails, all ranks raise SaveFailed with the same message. The temporary folder is removed, and earlier
  checkpoints remain.
- A checkpoint with its final name is durable and has been read back.

[Note: read back] The xxh3 in the manifest is computed from the live tensor, independently of the write. The file is
read back from the disk and must have the same digest. So a write from an outdated buffer, or a faulty disk, is already
detected when the checkpoint is saved, not only when it is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.manifest import (
    TENSOR_NAME_PATTERN,
    CheckpointManifest,
    SavedShard,
    ShardFileEntry,
    TensorEntry,
    first_contradiction,
    step_folder_name,
    write_manifest,
)
from meshwright.checkpoint.reshard import normalize_shard
from meshwright.checkpoint.retention import list_checkpoints, next_serial
from meshwright.checkpoint.safetensors_writer import (
    DTYPE_BY_NAME,
    PendingTensor,
    dtype_name,
    shard_name,
    tensor_digest,
    write_shard,
)
from meshwright.core import storage
from meshwright.core.errors import MeshwrightError
from meshwright.core.messages import Message, mark_msgid, pack_messages, unpack_messages
from meshwright.core.units import show_bytes
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.plan import Plan

LATEST_LINK = "latest"
LocalShard = tuple[ShardMetadata, torch.Tensor]
LazyShard = tuple[ShardMetadata, torch.Tensor | Callable[[], torch.Tensor]]
TensorKey = tuple[str, tuple[int, ...], str, int | None]
ShardsByTensor = dict[TensorKey, list[SavedShard]]


class SaveFailed(MeshwrightError):
    """Reports that this save failed on all ranks. Earlier checkpoints are unchanged, and training may continue."""


class RankExchange(NamedTuple):
    """Identifies this rank among `world` ranks. `all_gather(text)` returns the texts of all ranks, in order of rank."""

    rank: int
    world: int
    all_gather: Callable[[str], list[str]]


SINGLE_RANK = RankExchange(0, 1, lambda text: [text])


def save_checkpoint(
    folder: Path | str,
    step: int,
    pieces: Iterable[LazyShard],
    state: Mapping[str, Any],
    *,
    plan: Plan | None = None,
    ranks: RankExchange = SINGLE_RANK,
    local: Mapping[str, torch.Tensor] | None = None,
    world: int = 0,
) -> Path:
    """Saves the shards `pieces` of all ranks as FOLDER/step-N and returns this path once it is durable and read back.

    Collective: every rank must call this function. `state` is the JSON state of the trainer; only the `state` of rank 0
    is saved. A shard may be a function that reads it when it is written. `local` are tensors that only this rank has
    (random states); only the same rank of the same plan loads them. `world` is needed if one process writes the shards
    of all ranks: the number of these ranks. 0 means `ranks.world`.

    Raises:
        SaveFailed: a rank failed. All ranks raise this error.
    """
    shards = [
        (_normalized_shard(piece), tensor if callable(tensor) else tensor.detach())
        for piece, tensor in pieces
        if piece.start < piece.stop or not math.prod(piece.shape)
    ]
    shards += [
        (
            ShardMetadata(
                f"rank/{ranks.rank}/{name}", tuple(tensor.shape), dtype_name(tensor.dtype), None, (), 0, tensor.numel()
            ),
            tensor.reshape(-1),
        )
        for name, tensor in (local or {}).items()
    ]
    work = _SaveOperation(Path(folder), step, shards, ranks, Plan(dp_replicate=ranks.world) if plan is None else plan)
    work.world = world or ranks.world
    try:
        work.begin(work.run_stage(work.open))
        work.run_stage(work.list_shards)
        work.run_stage(work.assign)
        work.run_stage(work.write)
        work.run_stage(lambda: work.commit(dict(state)))
    except BaseException:
        work.abandon()
        raise
    return work.final


class _SaveOperation:
    """One save on one rank. Each stage is a method. The ranks synchronise after each stage."""

    def __init__(self, folder: Path, step: int, shards: list[LazyShard], ranks: RankExchange, plan: Plan) -> None:
        self.folder, self.step, self.shards, self.ranks, self.plan = folder, step, shards, ranks, plan
        self.final = folder / step_folder_name(step)
        self.temporary: Path | None = None
        self.id = ""
        self.needs = sum(_shard_bytes(piece) for piece, _ in shards)
        self.world = ranks.world

    def run_stage(self, stage: Callable[[], str | None]) -> str:
        """Runs `stage` on every rank and returns the result of rank 0.

        Raises:
            SaveFailed: the stage failed on any rank.
        """
        word, problem, cause = "", "", None
        try:
            word = stage() or ""
        except Exception as error:
            cause, problem = error, self.describe_error(error)
        answers = [
            unpack_messages(json.loads(text))
            for text in self.ranks.all_gather(json.dumps(pack_messages([word, problem])))
        ]
        failed = [(rank, answer[1]) for rank, answer in enumerate(answers) if answer[1]]
        if failed:
            rank, first = failed[0]
            who = f"rank {rank}"
            if len(failed) > 1:
                who = Message("rank {rank} (and {more} more ranks)", rank=rank, more=len(failed) - 1)
            raise SaveFailed(
                Message(
                    "checkpoint of step {step} is not saved in {folder!r}: {who}: {reason}; earlier checkpoints are "
                    "untouched",
                    step=self.step,
                    folder=str(self.folder),
                    who=who,
                    reason=first,
                )
            ) from cause
        return str(answers[0][0])

    def describe_error(self, error: Exception) -> str:
        """Returns the message of `error` as one sentence."""
        if isinstance(error, OSError):
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return self.out_of_space_message()
            return storage.describe_failure(error, self.temporary or self.folder)
        if isinstance(error, MeshwrightError | _SaveRefused):
            return str(error)
        return f"{type(error).__name__}: {error}"

    def out_of_space_message(self) -> str:
        """Returns the message for a full disk, with the required and the free bytes."""
        needs = show_bytes(self.needs)
        try:
            free = show_bytes(storage.free_bytes(self.folder) + _folder_bytes(self.temporary))
        except OSError:  # the free space is unknown, so the message omits it
            return Message(
                "no space left: the checkpoint needs {needs}, make room or keep fewer checkpoints", needs=needs
            )
        return Message(
            "no space left: the checkpoint needs {needs}, {free} are free; make room or keep fewer checkpoints",
            needs=needs,
            free=free,
        )

    # The following methods are the stages of a save, in order.

    def open(self) -> str | None:
        """On rank 0, makes the temporary folder, and returns the id of this save."""
        if self.ranks.rank:
            return None
        storage.make_folder(self.folder)
        self.begin(os.urandom(4).hex())
        storage.make_new_folder(self.temporary_folder())
        return self.id

    def begin(self, id: str) -> None:
        """Sets the id of this save and the path of its temporary folder."""
        self.id, self.temporary = id, self.folder / f".{step_folder_name(self.step)}.{id}.tmp"

    def list_shards(self) -> None:
        """Checks the shards of this rank and sends rank 0 a list of them."""
        for piece, tensor in self.shards:
            _check_shard(piece, tensor)
        self.write_note("offer", self.ranks.rank, [piece for piece, _ in self.shards])

    def assign(self) -> None:
        """On rank 0, assigns each distinct shard to one of the ranks that have it: to the rank with the fewest assigned
        bytes."""
        if self.ranks.rank:
            return
        holders: dict[ShardMetadata, list[int]] = defaultdict(list)
        for rank in range(self.ranks.world):
            for fields in self.read_note("offer", rank):
                holders[_parse_shard(fields)].append(rank)
        _check_complete(holders)
        self.needs = sum(_shard_bytes(piece) for piece in holders) + 4096 * self.ranks.world + 512 * len(holders)
        if self.needs > storage.free_bytes(self.folder):
            storage.remove_leftovers(self.folder, retained=self.temporary)
        if self.needs > storage.free_bytes(self.folder):
            raise _SaveRefused(self.out_of_space_message())
        load: Counter[int] = Counter()
        tasks: dict[int, list[ShardMetadata]] = {rank: [] for rank in range(self.ranks.world)}
        for piece in sorted(
            holders, key=lambda piece: (-_shard_bytes(piece), piece.name, piece.intervals, piece.start)
        ):
            rank = min(holders[piece], key=lambda rank: (load[rank], rank))
            load[rank] += _shard_bytes(piece)
            tasks[rank].append(piece)
        for rank, task in tasks.items():
            self.write_note("task", rank, [self.needs, task])

    def write(self) -> None:
        """Writes and syncs the file of this rank, reads it back ([Note: read back]), and sends rank 0 the list of the
        written shards."""
        rank, temporary = self.ranks.rank, self.temporary_folder()
        self.needs, task = self.read_note("task", rank)
        shards = dict(self.shards)
        mine = {shard_key(piece): piece for piece in map(_parse_shard, task)}
        here = {key: data for key, piece in mine.items() if not callable(data := shards[piece])}
        live = {key: tensor_digest(data) for key, data in here.items() if data.device.type == "cpu"}
        items = [
            PendingTensor(
                key,
                piece.dtype,
                (piece.stop - piece.start,),
                _shard_bytes(piece),
                partial(_copy_to_host, shards[piece], key, live),
            )
            for key, piece in mine.items()
        ]
        metadata = {"step": str(self.step), "id": self.id, "rank": str(rank), "world": str(self.ranks.world)}
        path = temporary / shard_name(rank)
        written = write_shard(path, items, metadata)
        handle = storage.open_regular_file(path)
        try:
            if storage.digest_range(handle, 0, written.data) != written.header_xxh3:
                text = mark_msgid("{path}: its header differs when it is read back; the disk or its driver is faulty")
                raise _SaveRefused(Message(text, path=path.name))
            for key, piece in mine.items():
                at = written.offsets[key]
                if storage.digest_range(handle, at, at + _shard_bytes(piece)) != live[key]:
                    text = mark_msgid(
                        "{path}: {piece} differs from memory when it is read back: wrong data were written"
                    )
                    raise _SaveRefused(Message(text, path=path.name, piece=piece.name))
        finally:
            storage.close_quietly(handle)
        shard = ShardFileEntry(bytes=written.size, data=written.data, xxh3=written.header_xxh3)
        self.write_note(
            "index",
            rank,
            [shard.model_dump(), [[piece, key, written.offsets[key], live[key]] for key, piece in mine.items()]],
        )

    def commit(self, state: dict[str, Any]) -> None:
        """On rank 0, merges the manifest and publishes the folder."""
        if self.ranks.rank:
            return
        temporary = self.temporary_folder()
        files: dict[str, ShardFileEntry] = {}
        parts: ShardsByTensor = defaultdict(list)
        for rank in range(self.ranks.world):
            shard, listed = self.read_note("index", rank)
            files[shard_name(rank)] = ShardFileEntry(**shard)
            for fields, key, offset, xxh3 in listed:
                piece = _parse_shard(fields)
                part = SavedShard(
                    intervals=piece.intervals, start=piece.start, stop=piece.stop, file=shard_name(rank), key=key,
                    offset=offset, xxh3=xxh3,
                )  # fmt: skip
                parts[_tensor_key(piece)].append(part)
        manifest = CheckpointManifest(
            version=1, step=self.step, serial=next_serial(self.folder), id=self.id, world=self.world,
            plan=self.plan.name, plan_digest=self.plan.digest, files=files, tensors=_tensor_entries(parts),
            state=_json_round_trip(state),
        )  # fmt: skip
        for name in storage.list_names(temporary):
            if name.endswith(".json"):
                storage.remove(temporary / name)
        write_manifest(temporary, manifest)
        storage.sync_folder(temporary)
        self.publish(temporary)

    def publish(self, temporary: Path) -> None:
        """Renames the temporary folder to its final name. From then on the checkpoint exists.

        An earlier checkpoint of this step is renamed first, and again at the end: then `prune_checkpoints` removes it.
        """
        latest = self.folder / f".{LATEST_LINK}.{self.id}.tmp"
        storage.write_file(latest, [f"{self.final.name}\n".encode()])
        if storage.path_exists(self.final):
            storage.rename(self.final, self.final.with_name(f"{self.final.name}.replaced.{self.id}"))
        storage.rename(temporary, self.final)
        storage.sync_folder(self.folder)
        storage.rename(latest, self.folder / LATEST_LINK)
        storage.sync_folder(self.folder)
        for path in list_checkpoints(self.folder):
            if path.name.startswith(f"{self.final.name}."):
                with contextlib.suppress(OSError):  # it then counts as an older checkpoint
                    storage.move_to_trash(path)

    def abandon(self) -> None:
        """Removes the temporary files after a failure. Files that cannot be removed become leftovers."""
        if self.ranks.rank == 0 and self.temporary is not None:
            for path in (self.temporary, self.folder / f".{LATEST_LINK}.{self.id}.tmp"):
                storage.remove_if_possible(path)

    # Ranks communicate by notes, which are small JSON files in the temporary folder.

    def temporary_folder(self) -> Path:
        """Returns the temporary folder."""
        assert self.temporary is not None
        return self.temporary

    def write_note(self, kind: str, rank: int, value: Any) -> None:
        """Writes a JSON note of `kind` for `rank` into the temporary folder."""
        path = self.temporary_folder() / f"{kind}-{rank:05d}.json"
        try:
            storage.write_file(path, [json.dumps(value).encode()], durable=False)
        except FileNotFoundError:
            raise self.not_shared_error(path) from None

    def read_note(self, kind: str, rank: int) -> Any:
        """Reads a JSON note of `kind` for `rank` from the temporary folder."""
        path = self.temporary_folder() / f"{kind}-{rank:05d}.json"
        try:
            return json.loads(storage.read_file(path))
        except FileNotFoundError:
            raise self.not_shared_error(path) from None

    def not_shared_error(self, path: Path) -> _SaveRefused:
        """Returns the error for a file of the temporary folder that this rank cannot see."""
        return _SaveRefused(
            Message(
                "rank {rank} does not see {path!r}: checkpoints must be on storage that all hosts share",
                rank=self.ranks.rank,
                path=str(path),
            )
        )


class _SaveRefused(Exception):
    """Reports why this rank cannot save. All ranks raise SaveFailed with its message."""


def _parse_shard(fields: Iterable[Any]) -> ShardMetadata:
    """Returns shard metadata from its JSON form."""
    name, shape, dtype, split, intervals, start, stop = fields
    return ShardMetadata(
        name, tuple(shape), dtype, split, tuple((first, last) for first, last in intervals), start, stop
    )


def _normalized_shard(piece: ShardMetadata) -> ShardMetadata:
    """Returns the canonical form of a shard. Two ranks with the same elements then list equal shards."""
    return normalize_shard(_parse_shard(piece))


def _shard_bytes(piece: ShardMetadata) -> int:
    return (piece.stop - piece.start) * DTYPE_BY_NAME[piece.dtype].itemsize if piece.dtype in DTYPE_BY_NAME else 0


def _copy_to_host(tensor: torch.Tensor | Callable[[], torch.Tensor], key: str, live: dict[str, str]) -> torch.Tensor:
    """Returns the tensor on the CPU. If `live` has no digest of the shard `key`, stores the digest there."""
    host = (tensor() if callable(tensor) else tensor).detach().cpu()
    if key not in live:
        live[key] = tensor_digest(host)
    return host


def shard_key(piece: ShardMetadata) -> str:
    """Returns the key of a shard in its file: the name, the split with its intervals, and the range.

    >>> shard_key(ShardMetadata("model/w", (8, 4), "float32", 0, ((0, 2), (4, 6)), 0, 16))
    'model/w|0:0-2,4-6|0-16'
    """
    part = (
        ""
        if piece.split is None
        else f"{piece.split}:" + ",".join(f"{first}-{last}" for first, last in piece.intervals)
    )
    return f"{piece.name}|{part}|{piece.start}-{piece.stop}"


def _check_shard(piece: ShardMetadata, tensor: torch.Tensor | Callable[[], torch.Tensor]) -> None:
    if not re.fullmatch(TENSOR_NAME_PATTERN, piece.name):
        raise _SaveRefused(Message("{piece!r} is not a valid tensor name", piece=piece.name[:80]))
    if piece.dtype not in DTYPE_BY_NAME:
        text = mark_msgid("{piece}: dtype {dtype!r} is not one of {names}")
        raise _SaveRefused(Message(text, piece=piece.name, dtype=piece.dtype, names=", ".join(DTYPE_BY_NAME)))
    if callable(tensor):
        return
    if tensor.dim() != 1 or tensor.numel() != piece.stop - piece.start or dtype_name(tensor.dtype) != piece.dtype:
        text = mark_msgid("{piece}: expected {count} elements of {dtype}, but its tensor is {type}{shape}")
        fields = {"piece": piece.name, "count": piece.stop - piece.start, "dtype": piece.dtype}
        raise _SaveRefused(Message(text, **fields, type=dtype_name(tensor.dtype), shape=list(tensor.shape)))


def _tensor_key(piece: ShardMetadata) -> TensorKey:
    return piece.name, piece.shape, piece.dtype, piece.split


def _tensor_entries(parts: ShardsByTensor) -> dict[str, TensorEntry]:
    """Returns the entries by name. Raises _SaveRefused if shards of one name differ in shape, dtype or split."""
    entries: dict[str, TensorEntry] = {}
    for (name, shape, dtype, split), listed in parts.items():
        if name in entries:
            other = entries[name]
            raise _SaveRefused(
                Message(
                    "{name}: ranks disagree: {dtype}{shape} split along {split}, and {other_dtype}{other_shape} along "
                    "{other_split}",
                    name=name,
                    dtype=dtype,
                    shape=list(shape),
                    split=split,
                    other_dtype=other.dtype,
                    other_shape=list(other.shape),
                    other_split=other.split,
                )
            )
        entries[name] = TensorEntry(shape=shape, dtype=dtype, split=split, pieces=tuple(listed))
    return entries


def _check_complete(pieces: Iterable[ShardMetadata]) -> None:
    """Checks that the shards of all ranks make complete tensors."""
    parts: ShardsByTensor = defaultdict(list)
    for piece in pieces:
        part = SavedShard(
            intervals=piece.intervals, start=piece.start, stop=piece.stop, file="", key="", offset=0, xxh3="0" * 16
        )
        parts[_tensor_key(piece)].append(part)
    problem = first_contradiction(_tensor_entries(parts))
    if problem:
        raise _SaveRefused(Message("{problem}: the shards of all ranks together are incomplete", problem=problem))


def _json_round_trip(value: Any, where: str = "$") -> Any:
    """Returns `value` with tuples as lists. Raises _SaveRefused if JSON cannot represent a value in it."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise _SaveRefused(Message("state {where}: key {key!r} is not text", where=where, key=key))
        return {key: _json_round_trip(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_round_trip(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise _SaveRefused(
        Message(
            "state {where}: {value!r} ({type}) is not JSON; tensors belong in pieces or in `local`",
            where=where,
            value=value,
            type=type(value).__name__,
        )
    )


def _folder_bytes(folder: Path | None) -> int:
    """Returns the number of bytes in the temporary `folder`, which a failed save removes. Returns 0 for None."""
    return sum(storage.file_size(folder / name) for name in storage.list_names(folder)) if folder is not None else 0
