"""Saving: every rank writes its own file into a folder with a temporary name; the folder gets its name only when all of
it is durable and right.

Order: agree on who writes what; write, flush and read back each file; merge the manifest; rename; flush the parent;
then `latest`. Ranks meet
only in `Ranks.share` and in small JSON files inside the temporary folder. What a rank holds that another holds too is
written once, the
bytes spread evenly. A failure on any rank is a failure on all, with one sentence; the temporary folder goes, the
checkpoint before stays.

[Note: read back] The xxh3 in the manifest is that of the live tensor, taken apart from writing; the file is read again,
from the disk,
and must have it. A save that wrote an old buffer, or a disk that lies, is caught at the save and not at the load.
"""

from __future__ import annotations

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
from meshwright.core.units import show_bytes
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.plan import Plan

LATEST_LINK = "latest"
LocalShard = tuple[ShardMetadata, torch.Tensor]
TensorKey = tuple[str, tuple[int, ...], str, int | None]
ShardsByTensor = dict[TensorKey, list[SavedShard]]


class SaveFailed(MeshwrightError):
    """No rank saved this step; the checkpoint before is untouched. Training may go on."""


class RankExchange(NamedTuple):
    """This rank among `world`. `share` gives every rank's text, in order of rank: all that ranks need to act
    together."""

    rank: int
    world: int
    share: Callable[[str], list[str]]


SINGLE_RANK = RankExchange(0, 1, lambda text: [text])


def save_checkpoint(
    folder: Path | str,
    step: int,
    pieces: Iterable[LocalShard],
    state: Mapping[str, Any],
    *,
    plan: Plan | None = None,
    ranks: RankExchange = SINGLE_RANK,
    local: Mapping[str, torch.Tensor] | None = None,
    world: int = 0,
) -> Path:
    """Saves `pieces` of all ranks as FOLDER/step-N and returns that path once it is durable and read back. Every rank
    calls it.

    `world`: of how many ranks the pieces are, where one process writes them for all. `state` (JSON; rank 0's counts) is
    the trainer's; `local` are tensors of this rank alone (random states), given back only
    to the same rank of the same plan. Raises SaveFailed on every rank when any rank failed.
    """
    held = [
        (_normalized_shard(piece), tensor.detach())
        for piece, tensor in pieces
        if piece.start < piece.stop or not math.prod(piece.shape)
    ]
    held += [
        (
            ShardMetadata(
                f"rank/{ranks.rank}/{name}", tuple(tensor.shape), dtype_name(tensor.dtype), None, (), 0, tensor.numel()
            ),
            tensor.reshape(-1),
        )
        for name, tensor in (local or {}).items()
    ]
    work = _SaveOperation(Path(folder), step, held, ranks, Plan(dp_replicate=ranks.world) if plan is None else plan)
    work.world = world or ranks.world
    try:
        work.begin(work.together(work.open))
        work.together(work.offer)
        work.together(work.assign)
        work.together(work.write)
        work.together(lambda: work.commit(dict(state)))
    except BaseException:
        work.abandon()
        raise
    return work.final


class _SaveOperation:
    """One save on one rank; each method is a stage between two meetings."""

    def __init__(self, folder: Path, step: int, held: list[LocalShard], ranks: RankExchange, plan: Plan) -> None:
        self.folder, self.step, self.held, self.ranks, self.plan = folder, step, held, ranks, plan
        self.final = folder / step_folder_name(step)
        self.temporary: Path | None = None
        self.id = ""
        self.needs = sum(_shard_bytes(piece) for piece, _ in held)
        self.world = ranks.world

    def together(self, stage: Callable[[], str | None]) -> str:
        """Runs `stage` here and everywhere; the result is rank 0's. One failure is everyone's."""
        word, problem, cause = "", "", None
        try:
            word = stage() or ""
        except Exception as error:
            cause, problem = error, self.sentence(error)
        answers = [json.loads(text) for text in self.ranks.share(json.dumps([word, problem]))]
        failed = [(rank, answer[1]) for rank, answer in enumerate(answers) if answer[1]]
        if failed:
            rank, first = failed[0]
            more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise SaveFailed(
                f"checkpoint of step {self.step} is not saved in {str(self.folder)!r}: rank {rank}{more}: {first}; earlier checkpoints are untouched"
            ) from cause
        return str(answers[0][0])

    def sentence(self, error: Exception) -> str:
        if isinstance(error, OSError):
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return self.no_room()
            return storage.describe_failure(error, self.temporary or self.folder)
        if isinstance(error, MeshwrightError | _SaveRefused):
            return str(error)
        return f"{type(error).__name__}: {error}"

    def no_room(self) -> str:
        try:
            free = f"{show_bytes(storage.free_bytes(self.folder) + _folder_bytes(self.temporary))} are free; "
        except OSError:  # nobody can say how much
            free = ""
        return (
            f"no space left: the checkpoint needs {show_bytes(self.needs)}, {free}make room or keep fewer checkpoints"
        )

    # Stages, in order.

    def open(self) -> str | None:
        """Rank 0 makes the temporary folder, after removing what killed saves left."""
        if self.ranks.rank:
            return None
        storage.make_folder(self.folder)
        storage.remove_leftovers(self.folder)
        self.begin(os.urandom(4).hex())
        storage.make_new_folder(self.place())
        return self.id

    def begin(self, id: str) -> None:
        self.id, self.temporary = id, self.folder / f".{step_folder_name(self.step)}.{id}.tmp"

    def offer(self) -> None:
        """What this rank holds."""
        for piece, tensor in self.held:
            _check_shard(piece, tensor)
        self.put("offer", self.ranks.rank, [piece for piece, _ in self.held])

    def assign(self) -> None:
        """Rank 0 gives each distinct piece to one of its holders, the one with the fewest bytes so far."""
        if self.ranks.rank:
            return
        holders: dict[ShardMetadata, list[int]] = defaultdict(list)
        for rank in range(self.ranks.world):
            for fields in self.get("offer", rank):
                holders[_parse_shard(fields)].append(rank)
        _check_complete(holders)
        self.needs = sum(_shard_bytes(piece) for piece in holders) + 4096 * self.ranks.world + 512 * len(holders)
        if self.needs > storage.free_bytes(self.folder):
            raise _SaveRefused(self.no_room())
        load: Counter[int] = Counter()
        tasks: dict[int, list[ShardMetadata]] = {rank: [] for rank in range(self.ranks.world)}
        for piece in sorted(
            holders, key=lambda piece: (-_shard_bytes(piece), piece.name, piece.intervals, piece.start)
        ):
            rank = min(holders[piece], key=lambda rank: (load[rank], rank))
            load[rank] += _shard_bytes(piece)
            tasks[rank].append(piece)
        for rank, task in tasks.items():
            self.put("task", rank, [self.needs, task])

    def write(self) -> None:
        """This rank's file: written, flushed, read back, and listed for rank 0 ([Note: read back])."""
        rank, temporary = self.ranks.rank, self.place()
        self.needs, task = self.get("task", rank)
        held = dict(self.held)
        mine = {shard_key(piece): piece for piece in map(_parse_shard, task)}
        live = {key: tensor_digest(held[piece]) for key, piece in mine.items() if held[piece].device.type == "cpu"}
        items = [
            PendingTensor(
                key,
                piece.dtype,
                (piece.stop - piece.start,),
                _shard_bytes(piece),
                partial(_copy_to_host, held[piece], key, live),
            )
            for key, piece in mine.items()
        ]
        metadata = {"step": str(self.step), "id": self.id, "rank": str(rank), "world": str(self.ranks.world)}
        path = temporary / shard_name(rank)
        written = write_shard(path, items, metadata)
        handle = storage.open_regular_file(path)
        try:
            if storage.digest_range(handle, 0, written.data) != written.header_xxh3:
                raise _SaveRefused(
                    f"{path.name}: its header reads back otherwise than written; the disk or its driver is at fault"
                )
            for key, piece in mine.items():
                at = written.offsets[key]
                if storage.digest_range(handle, at, at + _shard_bytes(piece)) != live[key]:
                    raise _SaveRefused(
                        f"{path.name}: {piece.name} reads back otherwise than it is in memory: wrong data were written"
                    )
        finally:
            storage.close_quietly(handle)
        shard = ShardFileEntry(bytes=written.size, data=written.data, xxh3=written.header_xxh3)
        self.put(
            "index",
            rank,
            [shard.model_dump(), [[piece, key, written.offsets[key], live[key]] for key, piece in mine.items()]],
        )

    def commit(self, state: dict[str, Any]) -> None:
        """Rank 0 merges the manifest and gives the folder its name, then `latest`."""
        if self.ranks.rank:
            return
        temporary = self.place()
        files: dict[str, ShardFileEntry] = {}
        parts: ShardsByTensor = defaultdict(list)
        for rank in range(self.ranks.world):
            shard, listed = self.get("index", rank)
            files[shard_name(rank)] = ShardFileEntry(**shard)
            for fields, key, offset, xxh3 in listed:
                piece = _parse_shard(fields)
                part = SavedShard(
                    intervals=piece.intervals,
                    start=piece.start,
                    stop=piece.stop,
                    file=shard_name(rank),
                    key=key,
                    offset=offset,
                    xxh3=xxh3,
                )
                parts[_tensor_key(piece)].append(part)
        manifest = CheckpointManifest(
            version=1, step=self.step, serial=next_serial(self.folder), id=self.id, world=self.world,
            plan=self.plan.name, plan_digest=self.plan.digest, files=files, tensors=_tensor_entries(parts), state=_json_round_trip(state),
        )  # fmt: skip
        for name in storage.list_names(temporary):
            if name.endswith(".json"):
                storage.remove(temporary / name)
        write_manifest(temporary, manifest)
        storage.sync_folder(temporary)
        self.name_it(temporary)

    def name_it(self, temporary: Path) -> None:
        """The moment at which the checkpoint exists. One of the same step from before stays beside it until this one is
        named."""
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
                storage.remove_if_possible(path)

    def abandon(self) -> None:
        """After a failure: what was begun goes. What cannot be removed now, the next save removes."""
        if self.ranks.rank == 0 and self.temporary is not None:
            for path in (self.temporary, self.folder / f".{LATEST_LINK}.{self.id}.tmp"):
                storage.remove_if_possible(path)

    # Notes between ranks.

    def place(self) -> Path:
        assert self.temporary is not None
        return self.temporary

    def put(self, kind: str, rank: int, value: Any) -> None:
        path = self.place() / f"{kind}-{rank:05d}.json"
        try:
            storage.write_file(path, [json.dumps(value).encode()], durable=False)
        except FileNotFoundError:
            raise self.unshared(path) from None

    def get(self, kind: str, rank: int) -> Any:
        path = self.place() / f"{kind}-{rank:05d}.json"
        try:
            return json.loads(storage.read_file(path))
        except FileNotFoundError:
            raise self.unshared(path) from None

    def unshared(self, path: Path) -> _SaveRefused:
        return _SaveRefused(
            f"rank {self.ranks.rank} does not see {str(path)!r}: checkpoints must be on storage that all hosts share"
        )


class _SaveRefused(Exception):
    """A sentence for all ranks."""


def _parse_shard(fields: Iterable[Any]) -> ShardMetadata:
    """A piece as JSON gave it back."""
    name, shape, dtype, split, intervals, start, stop = fields
    return ShardMetadata(
        name, tuple(shape), dtype, split, tuple((first, last) for first, last in intervals), start, stop
    )


def _normalized_shard(piece: ShardMetadata) -> ShardMetadata:
    """Two ranks that hold the same elements say so in the same words."""
    return normalize_shard(_parse_shard(piece))


def _shard_bytes(piece: ShardMetadata) -> int:
    return (piece.stop - piece.start) * DTYPE_BY_NAME[piece.dtype].itemsize if piece.dtype in DTYPE_BY_NAME else 0


def _copy_to_host(tensor: torch.Tensor, key: str, live: dict[str, str]) -> torch.Tensor:
    """On the host; what comes there from a device comes once, and is digested on its way to the file."""
    host = tensor.detach().cpu()
    if key not in live:
        live[key] = tensor_digest(host)
    return host


def shard_key(piece: ShardMetadata) -> str:
    """The key in the file: the name, then what of it.

    >>> shard_key(ShardMetadata("model/w", (8, 4), "float32", 0, ((0, 2), (4, 6)), 0, 16))
    'model/w|0:0-2,4-6|0-16'
    """
    part = (
        ""
        if piece.split is None
        else f"{piece.split}:" + ",".join(f"{first}-{last}" for first, last in piece.intervals)
    )
    return f"{piece.name}|{part}|{piece.start}-{piece.stop}"


def _check_shard(piece: ShardMetadata, tensor: torch.Tensor) -> None:
    if not re.fullmatch(TENSOR_NAME_PATTERN, piece.name):
        raise _SaveRefused(f"{piece.name[:80]!r} cannot name a tensor")
    if piece.dtype not in DTYPE_BY_NAME:
        raise _SaveRefused(f"{piece.name}: dtype {piece.dtype!r} is not one of {', '.join(DTYPE_BY_NAME)}")
    if tensor.dim() != 1 or tensor.numel() != piece.stop - piece.start or dtype_name(tensor.dtype) != piece.dtype:
        raise _SaveRefused(
            f"{piece.name}: the piece says {piece.stop - piece.start} elements of {piece.dtype}, its tensor is {dtype_name(tensor.dtype)}{list(tensor.shape)}"
        )


def _tensor_key(piece: ShardMetadata) -> TensorKey:
    return piece.name, piece.shape, piece.dtype, piece.split


def _tensor_entries(parts: ShardsByTensor) -> dict[str, TensorEntry]:
    """Entries by name; parts that do not speak of one tensor are refused."""
    entries: dict[str, TensorEntry] = {}
    for (name, shape, dtype, split), listed in parts.items():
        if name in entries:
            other = entries[name]
            raise _SaveRefused(
                f"{name}: ranks disagree: {dtype}{list(shape)} split along {split}, and {other.dtype}{list(other.shape)} along {other.split}"
            )
        entries[name] = TensorEntry(shape=shape, dtype=dtype, split=split, pieces=tuple(listed))
    return entries


def _check_complete(pieces: Iterable[ShardMetadata]) -> None:
    """What all ranks hold together must be whole tensors."""
    parts: ShardsByTensor = defaultdict(list)
    for piece in pieces:
        part = SavedShard(
            intervals=piece.intervals, start=piece.start, stop=piece.stop, file="", key="", offset=0, xxh3="0" * 16
        )
        parts[_tensor_key(piece)].append(part)
    problem = first_contradiction(_tensor_entries(parts))
    if problem:
        raise _SaveRefused(f"{problem}: the ranks together do not hold it")


def _json_round_trip(value: Any, where: str = "$") -> Any:
    """`value`, if JSON gives it back as it is (tuples as lists)."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise _SaveRefused(f"state {where}: key {key!r} is not text")
        return {key: _json_round_trip(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_round_trip(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise _SaveRefused(
        f"state {where}: {value!r} ({type(value).__name__}) is not JSON; tensors belong in pieces or in `local`"
    )


def _folder_bytes(folder: Path | None) -> int:
    """Bytes that a failed save gives back."""
    return sum(storage.file_size(folder / name) for name in storage.list_names(folder)) if folder is not None else 0
