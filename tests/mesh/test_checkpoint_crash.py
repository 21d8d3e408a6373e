"""A save that is cut short anywhere leaves the newest complete checkpoint loadable; a save that fails says so on every
rank and leaves nothing."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import held, layouts, quick_folder, random_tensor, run_world, same_bits, save_world

from meshwright.checkpoint import save as saving
from meshwright.checkpoint.load import iter_full_tensors
from meshwright.checkpoint.retention import list_checkpoints, newest_checkpoint, prune_checkpoints
from meshwright.checkpoint.save import RankExchange, SaveFailed, save_checkpoint
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.spec.layout import ShardMetadata

CALLS = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")
WORLD = 2


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def quick_path():
    with quick_folder() as folder:
        yield folder


def _tensors(step):
    return {f"model/{index}": random_tensor((6, 4), "float32", 10 * step + index) for index in range(3)}


def _save(folder, step):
    tensors = _tensors(step)
    return save_world(folder, step, tensors, layouts(tensors, WORLD, random.Random(1)))


class Killed(BaseException):
    """One rank's death."""


@contextmanager
def _cut_at(call_number, die, who=lambda: True):
    """The `call_number`-th call that reaches the disk runs `die` in its place; a write then leaves half of its
    bytes."""
    real = {name: getattr(os, name) for name in CALLS}
    left = [call_number]
    lock = threading.RLock()

    def counted(name):
        def call(*arguments, **options):
            with lock:
                left[0] -= who()
                if left[0] == 0 and who():
                    if name == "write":
                        real["write"](arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    left[0] = -1
                    die()
                return real[name](*arguments, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, counted(name))
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class Cache:
    """What a power cut takes: bytes of files never flushed, and names changed since their folder was last flushed.
    Source: ALICE (OSDI 2014)."""

    def __init__(self):
        self.dirty, self.moved, self.open = set(), [], {}

    def watch(self):
        """Notes every call from now on, beneath whatever is laid over later."""
        real = {name: getattr(os, name) for name in CALLS}

        def opened(path, *arguments, **options):
            handle = real["open"](path, *arguments, **options)
            self.open[handle] = Path(path)
            return handle

        def written(handle, data):
            self.dirty.add(os.fstat(handle).st_ino)
            return real["write"](handle, data)

        def flushed(handle):
            self.dirty.discard(os.fstat(handle).st_ino)
            self.moved = [move for move in self.moved if move[0].parent != self.open[handle]]
            return real["fsync"](handle)

        def renamed(source, target, **options):
            source, target = Path(source), Path(target)
            before = target.read_bytes() if target.is_file() else None
            real["rename"](source, target)
            self.moved.append((source, target, before))

        os.open, os.write, os.fsync, os.rename, os.replace = opened, written, flushed, renamed, renamed

    def lose(self, folder, dice=None):
        """All of it, or, with `dice`, of the names any part: a disk may keep a later one and lose an earlier."""
        for source, target, before in list(reversed(self.moved)):
            if not target.exists() or source.exists() or (dice and dice.random() < 0.5):
                continue
            shutil.move(target, source)
            if before is not None:
                target.write_bytes(before)
        for file in folder.rglob("*"):
            if file.is_file() and file.stat().st_ino in self.dirty:
                file.write_bytes(b"")


def _in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _holds_a_whole_checkpoint(folder, steps):
    said = []
    path = newest_checkpoint(folder, say=said.append)
    assert path is not None and said == []
    step = int(path.name[5:13])
    assert step in steps
    expected = _tensors(step)
    found = dict(iter_full_tensors(path))
    assert {"model/" + name for name in found} == set(expected)
    assert all(same_bits(full, expected["model/" + name]) for name, full in found.items())
    latest = (folder / "latest").read_text().strip()
    assert verify_checkpoint(folder / latest) == [] or any(
        path.name.startswith(f"{latest}.replaced") for path in list_checkpoints(folder)
    )
    return step


CASES = [("a new step", "kept"), ("a step saved before", "lost in part")]
MORE = [("a new step", "lost"), ("a new step", "lost in part"), ("a step saved before", "kept")]
MORE += [("a step saved before", "lost")]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)], ids=["each fourth call", "each call"])
@pytest.mark.parametrize(("what", "power"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE)])
def test_a_save_killed_at_any_call_leaves_a_whole_newest_checkpoint(quick_path, what, power, every):
    """Killed, or with the power cut: then all that was not flushed is lost, too."""
    before = (1,) if what == "a new step" else (1, 2)
    for step in before:
        _save(quick_path / "start", step)
    seen = []
    for number in range(1, 1000, every):
        folder = quick_path / str(number)
        shutil.copytree(quick_path / "start", folder)

        def work(folder=folder, number=number):
            cache = Cache()

            def die():
                if power != "kept":
                    cache.lose(folder, random.Random(number) if power == "lost in part" else None)
                os._exit(9)

            cache.watch()
            with _cut_at(number, die):
                _save(folder, 2)
                prune_checkpoints(folder, 1)

        code = _in_child(work)
        assert code in (0, 9)
        seen.append(_holds_a_whole_checkpoint(folder, (1, 2)))
        _save(folder, 3)
        assert _holds_a_whole_checkpoint(folder, (3,)) == 3
        prune_checkpoints(folder, 9)
        assert [name for name in os.listdir(folder) if name.startswith(".")] == []
        shutil.rmtree(folder)
        if code == 0:
            break
    assert number > 40 and seen[-1] == 2 and (1 in seen) == (before == (1,))


@pytest.mark.parametrize("victim", range(WORLD))
def test_one_rank_that_dies_at_any_call_leaves_a_whole_newest_checkpoint(quick_path, victim):
    layout = layouts(_tensors(2), WORLD, random.Random(1))
    _save(quick_path / "start", 1)
    for number in range(1, 1000):
        folder = quick_path / str(number)
        shutil.copytree(quick_path / "start", folder)
        dying = threading.local()

        def die():
            raise Killed

        def work(ranks, folder=folder, dying=dying):
            dying.here = ranks.rank == victim
            return save_checkpoint(folder, 2, held(layout[ranks.rank], _tensors(2)), {}, ranks=ranks)

        with _cut_at(number, die, lambda dying=dying: getattr(dying, "here", False)):
            results = run_world(WORLD, work)
        whole = not any(isinstance(result, BaseException) for result in results)
        assert (
            whole
            or all(isinstance(result, BaseException) for result in results)
            or _holds_a_whole_checkpoint(folder, (2,))
        )
        assert _holds_a_whole_checkpoint(folder, (1, 2)) == 2 or not whole
        shutil.rmtree(folder)
        if whole:
            break
    assert number > 10


@contextmanager
def _small_disk(folder, size):
    """A file system of `size` bytes, where this machine lets us mount one; the next test needs none."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"this machine does not let us mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # a mapping of a test before may still be open


def _piece(numel):
    return ShardMetadata("model/w", (numel,), "float32", None, (), 0, numel)


def test_a_disk_too_small_is_said_before_anything_is_written(tmp_path):
    with _small_disk(tmp_path / "disk", 2**20) as folder:
        save_checkpoint(folder, 1, [(_piece(50_000), torch.ones(50_000))], {})
        with pytest.raises(
            SaveFailed, match=r"rank 0: no space left: the checkpoint needs 1\.\d+ MiB, \d+\.\d KiB are free"
        ) as caught:
            save_checkpoint(folder, 2, [(_piece(300_000), torch.ones(300_000))], {})
        assert "\n" not in str(caught.value)
        assert (
            sorted(os.listdir(folder)) == ["latest", "step-00000001"]
            and newest_checkpoint(folder) == folder / "step-00000001"
        )


@pytest.mark.parametrize("victim", range(3))
def test_a_disk_that_fills_up_in_a_save_is_an_error_on_every_rank(tmp_path, victim):
    with _small_disk(tmp_path / "disk", 2**20) as folder:
        save_checkpoint(folder, 1, [(_piece(10_000), torch.ones(10_000))], {})

        def work(ranks):
            meetings = []

            def share(text):
                answers = ranks.all_gather(text)
                meetings.append(text)
                if len(meetings) == 3 and ranks.rank == victim:
                    room = os.statvfs(folder)
                    (folder / "other").write_bytes(bytes((room.f_bavail - 20) * room.f_frsize))
                return ranks.all_gather(text) and answers

            pieces = [
                (
                    ShardMetadata(
                        "model/w", (90_000,), "float32", 0, ((30_000 * rank, 30_000 * rank + 30_000),), 0, 30_000
                    ),
                    torch.ones(30_000),
                )
                for rank in (ranks.rank,)
            ]
            return save_checkpoint(folder, 2, pieces, {}, ranks=RankExchange(ranks.rank, ranks.world, share))

        results = run_world(3, work)
        assert all(isinstance(result, SaveFailed) for result in results)
        assert len({str(result) for result in results}) == 1
        assert "no space left: the checkpoint needs 3" in str(results[0]) and "are free" in str(results[0])
        assert (
            sorted(os.listdir(folder)) == ["latest", "other", "step-00000001"]
            and newest_checkpoint(folder) == folder / "step-00000001"
        )
        (folder / "other").unlink()
        assert newest_checkpoint(folder) == folder / "step-00000001" and save_checkpoint(
            folder, 2, [(_piece(10_000), torch.ones(10_000))], {}
        )


def test_a_file_that_may_not_grow_is_an_error_and_leaves_nothing(tmp_path):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(SaveFailed, match=r"File too large \(EFBIG\)"):
            save_checkpoint(tmp_path, 2, [(_piece(50_000), torch.ones(50_000))], {})

    save_checkpoint(tmp_path, 1, [(_piece(50_000), torch.ones(50_000))], {})
    assert _in_child(work) == 0
    assert (
        sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]
        and newest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    )


@pytest.mark.parametrize("call", ["fsync", "write", "rename"])
def test_a_disk_that_refuses_is_an_error_on_every_rank_and_leaves_nothing(tmp_path, monkeypatch, call):
    _save(tmp_path, 1)
    real = getattr(os, call)
    dying = threading.local()

    def refuse(*arguments, **options):
        if getattr(dying, "rank", 1) == (0 if call == "rename" else 1):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, refuse)

    def work(ranks):
        dying.rank = ranks.rank if threading.current_thread() is not threading.main_thread() else None
        layout = layouts(_tensors(2), WORLD, random.Random(1))
        return save_checkpoint(tmp_path, 2, held(layout[ranks.rank], _tensors(2)), {}, ranks=ranks)

    results = run_world(WORLD, work)
    assert all(isinstance(result, SaveFailed) and "Input/output error (EIO)" in str(result) for result in results), (
        results
    )
    monkeypatch.undo()
    assert newest_checkpoint(tmp_path).name == "step-00000001"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]


def test_a_save_that_writes_an_old_buffer_is_caught_when_it_saves(tmp_path, monkeypatch):
    old = {}

    def cached(tensor, key, live):
        return old.setdefault(tensor.numel(), tensor.clone())

    monkeypatch.setattr(saving, "_copy_to_host", cached)
    save_checkpoint(tmp_path, 1, [(_piece(100), torch.ones(100))], {})
    with pytest.raises(SaveFailed, match="model/w differs from memory when it is read back"):
        save_checkpoint(tmp_path, 2, [(_piece(100), torch.full((100,), 2.0))], {})
    assert newest_checkpoint(tmp_path).name == "step-00000001" and sorted(os.listdir(tmp_path)) == [
        "latest",
        "step-00000001",
    ]


def test_a_disk_that_flips_a_bit_on_the_way_is_caught_when_it_saves(tmp_path, monkeypatch):
    real = os.write

    def lying(handle, data):
        data = bytearray(data)
        if len(data) >= 400:
            data[200] ^= 4
        return real(handle, data)

    monkeypatch.setattr(os, "write", lying)
    with pytest.raises(SaveFailed, match="differs from memory when it is read back"):
        save_checkpoint(tmp_path, 2, [(_piece(100), torch.full((100,), 2.0))], {})
    assert os.listdir(tmp_path) == []


def test_storage_that_hosts_do_not_share_is_said(tmp_path):
    def work(ranks):
        return save_checkpoint(
            tmp_path / str(ranks.rank),
            2,
            held(layouts(_tensors(2), WORLD, random.Random(1))[ranks.rank], _tensors(2)),
            {},
            ranks=ranks,
        )

    results = run_world(WORLD, work)
    assert all(
        isinstance(result, SaveFailed) and "must be on storage that all hosts share" in str(result)
        for result in results
    ), results
