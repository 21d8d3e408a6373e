"""The layer under a run folder: what it opens, what it removes, what it says of a disk that fails."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
import xxhash
from checkpoint_worlds import empty, quick_folder

from meshwright.checkpoint.load import load_checkpoint
from meshwright.checkpoint.retention import list_checkpoints, newest_checkpoint, prune_checkpoints
from meshwright.checkpoint.save import save_checkpoint
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.core import storage
from meshwright.core.append_file import AppendOnlyFile
from meshwright.core.errors import InputError
from meshwright.spec.layout import ShardMetadata

PIECE = ShardMetadata("model/w", (1000,), "float32", None, (), 0, 1000)


def saved(folder: Path, *steps: int) -> list[Path]:
    return [save_checkpoint(folder, step, [(PIECE, torch.full((1000,), float(step)))], {}) for step in steps]


@pytest.fixture
def folder():
    with quick_folder() as made:
        yield made


def test_an_old_checkpoint_that_is_a_link_loses_the_link_and_what_it_leads_to_stays(folder: Path) -> None:
    saved(folder, 1, 2)
    (folder / "step-00000001").rename(folder.parent / f"{folder.name}-archive")
    archive = folder.parent / f"{folder.name}-archive"
    (folder / "step-00000001").symlink_to(archive)
    try:
        assert newest_checkpoint(folder) == folder / "step-00000002" and len(list_checkpoints(folder)) == 2
        assert prune_checkpoints(folder, 1) == [folder / "step-00000001"]
        assert verify_checkpoint(archive) == [] and saved(folder, 3)
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
    finally:
        storage.remove(archive)


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE])
def test_an_old_checkpoint_that_cannot_be_removed_is_a_line_and_fails_no_later_save(
    folder: Path, monkeypatch, number: int
) -> None:
    real, said = os.rmdir, list[str]()

    def refuse(path: Path) -> None:
        if ".trash" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        real(path)

    saved(folder, 1, 2)
    monkeypatch.setattr(os, "rmdir", refuse)
    assert prune_checkpoints(folder, 1, say=said.append) == []
    assert len(said) == 1 and "step-00000001" in said[0] and errno.errorcode[number] in said[0] and "\n" not in said[0]
    for step in (3, 4):
        assert saved(folder, step) == [newest_checkpoint(folder)]
    monkeypatch.undo()
    saved(folder, 5)
    prune_checkpoints(folder, 9)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_files_that_come_into_a_folder_while_it_is_removed_go_too(folder: Path, monkeypatch) -> None:
    """A network file system keeps a file that is open under another name."""
    real, left = os.rmdir, [2]

    def come(path: Path) -> None:
        if left[0]:
            left[0] -= 1
            (Path(path) / f".nfs{left[0]}").touch()
        real(path)

    (folder / "a").mkdir()
    (folder / "a" / "b").touch()
    monkeypatch.setattr(os, "rmdir", come)
    storage.remove(folder / "a")
    assert os.listdir(folder) == []


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**36)


@pytest.mark.parametrize("make", [pipe, endless, huge, Path.mkdir])
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_anything_in_place_of_a_file_is_one_line_and_the_older_checkpoint_loads(folder: Path, make, name: str) -> None:
    """A pipe nobody writes to, a device without an end, a file of 64 GiB of which nothing is on disk, a folder."""
    first, second = saved(folder, 1, 2)
    (second / name).unlink()
    make(second / name)
    said: list[str] = []
    found: list[Path | None] = []
    reading = threading.Thread(target=lambda: found.append(newest_checkpoint(folder, say=said.append)), daemon=True)
    reading.start()
    reading.join(60.0)
    assert found == [first], "nobody waits for what has no end"
    assert len(said) == 1 and name in said[0] and "\n" not in said[0]
    with pytest.raises(InputError):
        load_checkpoint(second, empty([PIECE]))


def test_a_crafted_tensor_without_bytes_on_the_disk_takes_no_memory(folder: Path) -> None:
    """The manifest and the file agree on 16 GiB of zeros; the digest of its header is right."""
    (path,) = saved(folder, 1)
    manifest, shard = path / "manifest.json", path / "rank-00000.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, 2**34)
    rest = manifest.read_bytes().partition(b"\n")[2]
    rest = rest.replace(b'"bytes":%d' % size, b'"bytes":%d' % 2**34)
    manifest.write_bytes(b'{"xxh3_128": "%s",\n' % xxhash.xxh3_128(rest).hexdigest().encode() + rest)
    (problem,) = verify_checkpoint(path)
    assert "less than 1 % of them are on disk" in problem and shard.name in problem


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_header_that_cannot_be_read_is_passed_over_as_data_are(folder: Path, monkeypatch, number: int) -> None:
    first, second = saved(folder, 1, 2)
    real = os.preadv

    def fail(handle: int, buffers, offset: int) -> int:
        if str(second) in os.readlink(f"/proc/self/fd/{handle}") and offset == 0:
            raise OSError(number, os.strerror(number))
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    said: list[str] = []
    assert newest_checkpoint(folder, say=said.append) == first
    assert len(said) == 1 and os.strerror(number) in said[0]


def test_a_line_that_finds_no_room_waits_and_the_file_holds_whole_lines_only(folder: Path, monkeypatch) -> None:
    lines, real, room = AppendOnlyFile(folder / "a.jsonl"), os.write, [10**9]

    def small(handle: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(handle, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", small)
    for number, there in enumerate((10**9, 4, 0, 10**9)):
        room[0] = there
        error = lines.append(f'{{"number": {number}}}')
        assert (error is None) == (there > 4)
        assert all(line.endswith("}") for line in (folder / "a.jsonl").read_text().splitlines())
    assert (folder / "a.jsonl").read_text().splitlines() == [f'{{"number": {number}}}' for number in range(4)]


def test_a_line_that_a_kill_cut_off_is_ended_before_the_next_one(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"number": 0}\n{"num')
    assert AppendOnlyFile(folder / "a.jsonl").append('{"number": 2}') is None
    assert (folder / "a.jsonl").read_text() == '{"number": 0}\n{"num\n{"number": 2}\n'


def test_whoever_waits_for_a_disk_is_told() -> None:
    told = threading.Event()
    with storage.report_if_overdue(told.set, 0.01):
        assert told.wait(60.0)
    told.clear()
    with storage.report_if_overdue(told.set, 60.0):
        pass
    assert not told.is_set()


def test_a_file_in_place_of_a_folder_is_an_error_and_not_a_folder(folder: Path) -> None:
    (folder / "logs").write_text("")
    for path in (folder / "logs", folder / "logs" / "inner"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            storage.make_folder(path)
    storage.make_folder(folder / "other" / "inner")
    storage.make_folder(folder / "other" / "inner")
    assert (folder / "other").stat().st_mode & 0o777 == 0o700
