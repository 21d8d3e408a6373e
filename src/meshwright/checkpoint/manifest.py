"""Defines, reads and writes the manifest of a checkpoint: its tensors, the location of each shard, and the digests of
all data. save.py writes the manifest; loading and verification read it.

The file is one JSON object. Its first line is `{"xxh3_128": "...",`, the digest of all bytes after that line. So the
digest covers every byte of the file.

Guarantees:
- Reading returns a consistent `CheckpointManifest`, or raises an InputError with a one-line message. In a consistent
  manifest, shards cover every tensor, every shard is inside its file, and no two shards overlap in a file.
- Reading takes no more memory than the size of the files.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field

from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME, SHARD_NAME_PATTERN
from meshwright.core import storage
from meshwright.core.codec import StrictModel, parse_text, validate_data
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.layout import ShardMetadata

MANIFEST_FILE = "manifest.json"
STEP_FOLDER_PATTERN = re.compile(r"step-(\d{8,18})(\.replaced\.[0-9a-f]{8})?")
_DIGEST_LINE_PATTERN = re.compile(rb'\{"xxh3_128": "([0-9a-f]{32})",\n')
_MAX_COUNT = 2**62

BoundedCount = Annotated[int, Field(ge=0, le=_MAX_COUNT, strict=True)]
TENSOR_NAME_PATTERN = r"^[^\x00-\x1f]{1,1000}$"
TensorName = Annotated[str, Field(pattern=TENSOR_NAME_PATTERN)]


class CorruptCheckpoint(InputError):
    """Reports that a checkpoint differs from what was saved. The message names the file, the tensor and the fault."""

    def __init__(self, sentence: str) -> None:
        """Joins `sentence` into one line, because quoted contents of a corrupt file may contain line ends."""
        line = " ".join(sentence.split())
        super().__init__(line if len(line) < 600 else f"{line[:500]} ...")


class SavedShard(StrictModel):
    """A saved shard: the elements [start, stop) of a flattened local tensor, the location of their bytes, and the xxh3
    of the bytes. The local tensor contains the `intervals` of the split dimension of the full tensor
    (spec/layout.py)."""

    intervals: tuple[tuple[BoundedCount, BoundedCount], ...]
    start: BoundedCount
    stop: BoundedCount
    file: str
    key: str
    offset: BoundedCount
    xxh3: str = Field(pattern="^[0-9a-f]{16}$")


class TensorEntry(StrictModel):
    """A tensor of the checkpoint and its shards. `split` is the dimension along which tensor ranks split the tensor,
    None if each local tensor is the full tensor."""

    shape: tuple[BoundedCount, ...] = Field(max_length=16)
    dtype: str
    split: Annotated[int, Field(ge=0, lt=16, strict=True)] | None
    pieces: tuple[SavedShard, ...]

    @property
    def numel(self) -> int:
        """Returns the number of elements of the full tensor."""
        return math.prod(self.shape)

    def piece(self, name: str, part: SavedShard) -> ShardMetadata:
        """Returns the metadata of the shard `part` of tensor `name`."""
        return ShardMetadata(name, self.shape, self.dtype, self.split, part.intervals, part.start, part.stop)

    def bytes_of(self, part: SavedShard) -> int:
        """Returns the number of bytes of the shard `part`."""
        return (part.stop - part.start) * DTYPE_BY_NAME[self.dtype].itemsize


class ShardFileEntry(StrictModel):
    """A file of shards: its size in bytes, the offset where data begin, and the xxh3 of all bytes before the data."""

    bytes: BoundedCount
    data: BoundedCount
    xxh3: str = Field(pattern="^[0-9a-f]{16}$")


class CheckpointManifest(StrictModel):
    """The manifest of one checkpoint.

    `serial` counts the saves into a folder. The newest save has the largest `serial`, even after a rollback to an
    earlier step. `id` is random for each save. `world` is the number of ranks. `state` is the JSON state of the
    trainer.
    """

    version: int = Field(ge=1, le=1)
    step: BoundedCount
    serial: BoundedCount
    id: str = Field(pattern="^[0-9a-f]{8}$")
    world: int = Field(ge=1, le=2**31)
    plan: str
    plan_digest: str
    files: dict[str, ShardFileEntry]
    tensors: dict[TensorName, TensorEntry]
    state: dict[str, Any]

    def encode(self) -> bytes:
        """Returns the bytes of the file. The first line is the digest."""
        rest = json.dumps(self.model_dump(), allow_nan=False, separators=(",", ":")).encode()[1:]
        return b'{"xxh3_128": "%s",\n' % xxhash.xxh3_128(rest).hexdigest().encode() + rest


def step_folder_name(step: int) -> str:
    """Returns the name of the folder of `step`.

    >>> step_folder_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def parse_step(folder: Path) -> int | None:
    """Returns the step in the name of a checkpoint folder, None for any other folder."""
    match = STEP_FOLDER_PATTERN.fullmatch(folder.name)
    return int(match[1]) if match else None


def read_manifest(folder: Path | str) -> CheckpointManifest:
    """Returns the checked manifest of the checkpoint `folder`.

    Raises:
        InputError: the folder does not exist.
        CorruptCheckpoint: the manifest is missing, corrupt or inconsistent, or its step differs from that in the name
            of the folder.
    """
    folder = Path(folder)
    where = f"{folder / MANIFEST_FILE}"
    try:
        if not storage.is_folder(folder):
            raise InputError(
                Message(
                    "checkpoint {folder!r} does not exist; `meshwright checkpoint list FOLDER` shows those that do",
                    folder=str(folder),
                )
            )
        data = storage.read_file(folder / MANIFEST_FILE)
    except OSError as error:
        raise CorruptCheckpoint(
            Message(
                "{where} cannot be read: {reason}; the checkpoint is incomplete", where=where, reason=error.strerror
            )
        ) from None
    head = _DIGEST_LINE_PATTERN.match(data)
    if head is None:
        raise CorruptCheckpoint(
            Message("{where} does not begin with its digest: damaged, or not a checkpoint of Meshwright", where=where)
        )
    rest = data[head.end() :]
    digest = xxhash.xxh3_128(rest).hexdigest()
    if digest.encode() != head[1]:
        raise CorruptCheckpoint(
            Message(
                "{where}: its xxh3 is {digest}, but its first line records {recorded}: damaged",
                where=where,
                digest=digest,
                recorded=head[1].decode(),
            )
        )
    try:
        manifest = validate_data(CheckpointManifest, parse_text("{" + rest.decode(), where), where)
    except InputError as error:
        raise CorruptCheckpoint(str(error)) from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(Message("{where}: not a manifest: {error}", where=where, error=error)) from None
    if parse_step(folder) not in (None, manifest.step):
        raise CorruptCheckpoint(
            Message(
                "{where} is stale: it belongs to step {step}, but its folder is {folder}",
                where=where,
                step=manifest.step,
                folder=folder.name,
            )
        )
    problem = next(_manifest_contradictions(manifest), None)
    if problem:
        raise CorruptCheckpoint(Message("{where}: {problem}", where=where, problem=problem))
    return manifest


def first_contradiction(tensors: dict[str, TensorEntry]) -> str | None:
    """Returns the first reason why an entry of `tensors` is invalid or its shards do not cover the tensor. Returns None
    if all entries are valid and complete.
    """
    for name, entry in tensors.items():
        problem = _shape_problem(entry) or _coverage_problem(entry)
        if problem:
            return f"{name}: {problem}"
    return None


def _manifest_contradictions(manifest: CheckpointManifest) -> Iterator[str]:
    used: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for file, shard in manifest.files.items():
        if not SHARD_NAME_PATTERN.fullmatch(file):
            yield Message("{file!r} is not the name of a checkpoint file", file=file[:80])
        if shard.data > shard.bytes:
            yield Message(
                "{file}: its data begin at byte {data}, but it has only {bytes} bytes",
                file=file,
                data=shard.data,
                bytes=shard.bytes,
            )
    problem = first_contradiction(manifest.tensors)
    if problem:
        yield problem
    for name, entry in manifest.tensors.items():
        for part in entry.pieces:
            shard_entry = manifest.files.get(part.file)
            if shard_entry is None:
                yield Message("{name}: file {file!r} is not in the list of files", name=name, file=part.file[:80])
                return
            end = part.offset + entry.bytes_of(part)
            if part.offset < shard_entry.data or end > shard_entry.bytes:
                yield Message(
                    "{name}: bytes {offset} to {end} are outside {file}",
                    name=name,
                    offset=part.offset,
                    end=end,
                    file=part.file,
                )
            used[part.file].append((part.offset, end, name))
    for file, spans in used.items():
        spans.sort()
        for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
            if begin < end:
                yield Message(
                    "{file}: {first} and {second} share bytes {begin} to {end}",
                    file=file,
                    first=first,
                    second=second,
                    begin=begin,
                    end=end,
                )


def _shape_problem(entry: TensorEntry) -> str | None:
    if entry.dtype not in DTYPE_BY_NAME:
        return Message("dtype {dtype!r} is not one of {names}", dtype=entry.dtype[:40], names=", ".join(DTYPE_BY_NAME))
    if entry.numel > _MAX_COUNT:
        return Message("shape {shape} is too large for any memory", shape=list(entry.shape))
    if entry.split is not None and entry.split >= len(entry.shape):
        return Message(
            "the tensor is split along dimension {split}, but its shape is {shape}",
            split=entry.split,
            shape=list(entry.shape),
        )
    for part in entry.pieces:
        size = 0 if entry.split is None else entry.shape[entry.split]
        if entry.split is None and part.intervals:
            return Message("a shard has intervals, but the tensor has no split dimension")
        if any(not start <= stop <= size for start, stop in part.intervals):
            return Message(
                "intervals {intervals} are outside dimension {split} of {size}",
                intervals=[list(interval) for interval in part.intervals[:4]],
                split=entry.split,
                size=size,
            )
        local = math.prod(entry.piece("", part).local_shape)
        if not part.start <= part.stop <= local:
            return Message(
                "elements [{start}, {stop}) are outside a shard of {local} elements",
                start=part.start,
                stop=part.stop,
                local=local,
            )
    return None


def _coverage_problem(entry: TensorEntry) -> str | None:
    """Returns a description of the first element that no shard covers, None if all elements are covered.

    The shards must cover the local tensor of every tensor rank, and the local tensors together must cover the full
    tensor.
    """
    if entry.numel == 0:
        return None
    runs: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = defaultdict(list)
    for part in entry.pieces:
        runs[part.intervals].append((part.start, part.stop))
    covered: list[tuple[int, int]] = []
    for intervals, spans in runs.items():
        local = math.prod(ShardMetadata("", entry.shape, "", entry.split, intervals, 0, 0).local_shape)
        missing = first_gap(spans, local)
        if missing is not None:
            where = (
                Message(" of {intervals}", intervals=[list(interval) for interval in intervals]) if intervals else ""
            )
            return Message(
                "no shard contains element {missing}{where} of {local}", missing=missing, where=where, local=local
            )
        covered += intervals
    if entry.split is None:
        return None if runs else Message("the tensor has no shards")
    missing = first_gap(covered, entry.shape[entry.split])
    return (
        None
        if missing is None
        else Message(
            "no shard contains index {missing} of dimension {split} ({shape})",
            missing=missing,
            split=entry.split,
            shape=entry.shape[entry.split],
        )
    )


def first_gap(spans: Iterable[tuple[int, int]], end: int) -> int | None:
    """Returns the first index in [0, end) that none of the ranges `spans` [start, stop) covers. Returns None if all
    indices are covered.

    >>> first_gap([(4, 8), (0, 3)], 8), first_gap([(0, 3), (2, 8)], 8)
    (3, None)
    """
    reached = 0
    for start, stop in sorted(spans):
        if start > reached:
            break
        reached = max(reached, stop)
    return reached if reached < end else None


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Writes the manifest into `folder`."""
    storage.write_file(folder / MANIFEST_FILE, [manifest.encode()])
