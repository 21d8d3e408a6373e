"""Reads the shards of a checkpoint and checks their digests, and verifies whole checkpoints. Loading, export, retention
and `meshwright checkpoint` use it.

Every file that is missing, truncated, swapped or stale, or has a wrong byte, is reported with its name and its tensors.
A file is checked in this order:
- It exists and is a regular file.
- Its metadata name this save, and the rank that its file name contains. This detects stale and swapped files.
- It has the recorded size.
- If it has more than MAX_INLINE_FILE_BYTES bytes, at least 1 % of them are on disk.
- Its header has the recorded xxh3.
- Each shard that is read has the recorded xxh3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash

from meshwright.checkpoint.manifest import CheckpointManifest, CorruptCheckpoint, SavedShard, TensorEntry, read_manifest
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME, MAX_METADATA_BYTES, parse_metadata, shard_name
from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

MAX_INLINE_FILE_BYTES = 2**20
"""Files of up to this many bytes are not checked for holes, because a file system may store them outside of data
blocks."""


class CheckpointReader:
    """Reads the shards of one checkpoint. Metadata, size and header of a file are checked when it is first opened.

    Raises:
        InputError: there is no checkpoint at `path`, or its manifest is corrupt.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest: CheckpointManifest = read_manifest(path)
        self.checked: set[str] = set()

    def open(self, file: str) -> int:
        """Opens a file of the checkpoint and returns its file descriptor, which the caller must close.

        Raises:
            CorruptCheckpoint: the file is not the one that the manifest describes.
        """
        try:
            handle = storage.open_regular_file(self.path / file)
        except OSError as error:
            raise CorruptCheckpoint(
                Message(
                    "{path}: {reason}",
                    path=self.path / file,
                    reason=Message("the file is missing") if isinstance(error, FileNotFoundError) else error.strerror,
                )
            ) from None
        if file not in self.checked:
            try:
                problem = self._problem(file, handle)
            except (OSError, EOFError) as error:
                problem = Message(
                    "its header cannot be read: {reason}{lost}",
                    reason=getattr(error, "strerror", None) or Message("the file ends inside the header"),
                    lost=self._lost_tensors(file, 0),
                )
            if problem:
                storage.close_quietly(handle)
                raise CorruptCheckpoint(Message("{path}: {problem}", path=self.path / file, problem=problem))
            self.checked.add(file)
        return handle

    def _problem(self, file: str, handle: int) -> str | None:
        entry = self.manifest.files[file]
        size = storage.handle_size(handle)
        other = self._foreign_file_problem(file, _read_metadata(handle, size))
        if other:
            return other
        if size != entry.bytes:
            return Message(
                "the file has {size} bytes, but {bytes} were written{lost}",
                size=size,
                bytes=entry.bytes,
                lost=self._lost_tensors(file, size) if size < entry.bytes else "",
            )
        if size > MAX_INLINE_FILE_BYTES and storage.is_sparse(handle):
            return Message(
                "the file has {size} bytes, but less than 1 % of them are on disk: damaged, or never completely "
                "written{lost}",
                size=size,
                lost=self._lost_tensors(file, 0),
            )
        digest = storage.digest_range(handle, 0, entry.data)
        if digest != entry.xxh3:
            return Message(
                "its header is damaged: xxh3 {digest}, {xxh3} was written{lost}",
                digest=digest,
                xxh3=entry.xxh3,
                lost=self._lost_tensors(file, 0),
            )
        return None

    def _foreign_file_problem(self, file: str, said: dict[str, str]) -> str | None:
        """Returns a message if the rank, step or save in the metadata `said` of the file is not the expected one.
        Returns None otherwise."""
        if not {"step", "id", "rank", "world"} <= set(said):
            return None
        if said["step"] != str(self.manifest.step):
            return Message(
                "the file is stale: it belongs to step {step}, but this checkpoint is of step {expected}{lost}",
                step=said["step"][:20],
                expected=self.manifest.step,
                lost=self._lost_tensors(file, 0),
            )
        if said["id"] != self.manifest.id:
            return Message(
                "the file is stale: it belongs to save {id}, but this checkpoint is of save {expected}{lost}",
                id=said["id"][:20],
                expected=self.manifest.id,
                lost=self._lost_tensors(file, 0),
            )
        if said["rank"].isdigit() and len(said["rank"]) < 10 and shard_name(int(said["rank"])) != file:
            return Message(
                "the file contains the shards of rank {rank}: files are swapped{lost}",
                rank=said["rank"],
                lost=self._lost_tensors(file, 0),
            )
        return None

    def _lost_tensors(self, file: str, end: int) -> str:
        """Returns a clause that names the tensors with data after byte `end` of `file`, '' if there are none."""
        names = [
            name
            for name, entry in self.manifest.tensors.items()
            if any(part.file == file and part.offset + entry.bytes_of(part) > end for part in entry.pieces)
        ]
        more = Message(" and {count} more", count=len(names) - 1) if len(names) > 1 else ""
        return (
            Message("; it holds {names}{more}", names=names[0], more=more)
            if names and not end
            else Message("; it has lost {names}{more}", names=names[0], more=more)
            if names
            else ""
        )

    def read(self, name: str, part: SavedShard, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the elements of the shard `part` of tensor `name` as a flat tensor, after checking their digest.

        If `out` is given (flat, of the saved dtype, on the CPU), the elements are written to it.

        Raises:
            CorruptCheckpoint: the digest differs, or the file cannot be read.
        """
        entry = self.manifest.tensors[name]
        dtype = DTYPE_BY_NAME[entry.dtype]
        result = torch.empty(part.stop - part.start, dtype=dtype) if out is None else out
        if not result.numel():
            return result
        view = result.view(torch.uint8).numpy().data
        handle = self.open(part.file)
        try:
            storage.read_into(handle, part.offset, view)
        except (OSError, EOFError):
            raise CorruptCheckpoint(
                Message("{path}: tensor {name} cannot be read to its end", path=self.path / part.file, name=name)
            ) from None
        finally:
            storage.close_quietly(handle)
        self.check_digest(name, entry, part, xxhash.xxh3_64(view).hexdigest())
        return result

    def check_digest(self, name: str, entry: TensorEntry, part: SavedShard, digest: str) -> None:
        """Checks that `digest` equals the recorded digest of the shard `part` of tensor `name`.

        Raises:
            CorruptCheckpoint: the digests differ.
        """
        if digest != part.xxh3:
            what = f" {[list(interval) for interval in part.intervals]}" if part.intervals else ""
            raise CorruptCheckpoint(
                Message(
                    "{path}: {name}{what} [{start}, {stop}): xxh3 {digest}, {xxh3} was saved: damaged",
                    path=self.path / part.file,
                    name=name,
                    what=what,
                    start=part.start,
                    stop=part.stop,
                    digest=digest,
                    xxh3=part.xxh3,
                )
            )

    def verify(self) -> Iterator[str]:
        """Verifies all files and shards, and yields every problem as a sentence. Only one chunk of data is in memory at
        a time."""
        broken = set()
        for file in self.manifest.files:
            try:
                storage.close_quietly(self.open(file))
            except InputError as error:
                broken.add(file)
                yield str(error)
        for name, entry in self.manifest.tensors.items():
            for part in entry.pieces:
                if part.file not in broken:
                    try:
                        self._verify(name, entry, part)
                    except InputError as error:
                        yield str(error)

    def _verify(self, name: str, entry: TensorEntry, part: SavedShard) -> None:
        handle = self.open(part.file)
        try:
            digest = storage.digest_range(handle, part.offset, part.offset + entry.bytes_of(part))
        except (OSError, EOFError):
            raise CorruptCheckpoint(
                Message("{path}: tensor {name} cannot be read to its end", path=self.path / part.file, name=name)
            ) from None
        finally:
            storage.close_quietly(handle)
        self.check_digest(name, entry, part, digest)


def _read_metadata(handle: int, size: int) -> dict[str, str]:
    """Returns the metadata from the beginning of the header of a file of `size` bytes."""
    head = bytearray(min(size, MAX_METADATA_BYTES))
    storage.read_into(handle, 0, memoryview(head))
    return parse_metadata(bytes(head))


def verify_checkpoint(path: Path | str) -> list[str]:
    """Returns the problems of the checkpoint at `path`, one sentence each, or [] if it is intact."""
    try:
        return list(CheckpointReader(path).verify())
    except InputError as error:
        return [str(error)]
