"""Every operation on a run folder fails once, by its number: in a save, in pruning, in going on, in a report. Nothing
is lost, and each is one line.

`Failing` stands in place of the module `os` in core/storage.py, which is the only place that touches the files of a run
(test_only_the_layer...).
"""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from checkpoint_worlds import empty, quick_folder

import meshwright
from meshwright.checkpoint.load import load_checkpoint
from meshwright.checkpoint.retention import list_checkpoints, newest_checkpoint, prune_checkpoints
from meshwright.checkpoint.save import SaveFailed, save_checkpoint
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.cli.main import main
from meshwright.core import storage
from meshwright.core.append_file import AppendOnlyFile
from meshwright.core.errors import MeshwrightError
from meshwright.report.run import read_run, summarize_run
from meshwright.report.run_text import run_text
from meshwright.spec.job import LaunchSpec, ModelSource, RunConfig
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import DataConfig, Workload
from meshwright.train.checkpoint_pruner import CheckpointPruner
from meshwright.train.console import RunConsole

ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.ENOTEMPTY)
CALLS = {
    "close", "fstat", "fsync", "ftruncate", "listdir", "lseek", "lstat", "mkdir", "open", "posix_fadvise", "pread",
    "preadv", "rename", "rmdir", "stat", "statvfs", "unlink", "write",
}  # fmt: skip
PIECE = ShardMetadata("model/w", (300,), "float32", None, (), 0, 300)


class Failing:
    """The module `os` whose operation number `at` fails with `number`, or does `instead`. A write that fails has
    written half of its bytes."""

    def __init__(self, at: int, number: int = errno.EIO, instead: Callable[[], None] | None = None) -> None:
        self.at, self.number, self.instead, self.count, self.failed = at, number, instead, 0, ""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count != self.at:
                return real(*arguments, **options)
            self.failed = name
            if self.instead is not None:
                self.instead()
                return real(*arguments, **options)
            if name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if name == "close":
                real(*arguments)
            raise OSError(
                self.number, os.strerror(self.number), *(arguments[:1] if isinstance(arguments[0], Path) else ())
            )

        return call


@contextmanager
def failing(at: int, number: int = errno.EIO, instead: Callable[[], None] | None = None) -> Iterator[Failing]:
    disk = Failing(at, number, instead)
    storage.os = disk  # type: ignore[assignment, attr-defined]
    try:
        yield disk
    finally:
        storage.os = os  # type: ignore[attr-defined]


def saved(folder: Path, step: int) -> Path:
    return save_checkpoint(folder, step, [(PIECE, torch.full((300,), float(step)))], {"step": step})


def of_step(path: Path) -> float:
    wanted = empty([PIECE])
    load_checkpoint(path, wanted)
    (value,) = set(wanted[0][1].tolist())
    return value


def is_one_line(text: str) -> bool:
    return bool(text.strip()) and "\n" not in text.strip() and len(text) < 700


def with_errors(*short: int) -> pytest.MarkDecorator:
    """Cases for every error; all but `short` are left to the soak."""
    cases = [pytest.param(number, marks=[pytest.mark.soak] * (number not in short)) for number in ERRORS]
    return pytest.mark.parametrize("number", cases, ids=errno.errorcode.get)


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as made:
        yield made


def each(folder: Path, number: int) -> Iterator[tuple[Path, Failing]]:
    """A fresh copy of `folder`/start for each operation that can fail, until none is left."""
    for at in range(1, 2000):
        copy = folder / str(at)
        shutil.copytree(folder / "start", copy, symlinks=True)
        with failing(at, number) as disk:
            yield copy, disk
        shutil.rmtree(copy)
        if not disk.failed:
            return
    raise AssertionError("no end of operations")


@with_errors(errno.EIO, errno.ENOSPC)
def test_a_save_whose_nth_operation_fails_is_one_line_and_loses_no_checkpoint(folder: Path, number: int) -> None:
    for step in (1, 2):
        saved(folder / "start", step)
    outcomes = []
    for copy, disk in each(folder, number):
        try:
            saved(copy, 3)
            done = True
        except SaveFailed as error:
            assert is_one_line(str(error)), str(error)
            done = False
        storage.os = os  # type: ignore[attr-defined]
        found = newest_checkpoint(copy, say=lambda line: pytest.fail(line))
        assert found is not None and of_step(found) in ((3.0,) if done else (2.0, 3.0)), disk.failed
        assert {path.name for path in list_checkpoints(copy)} >= {"step-00000001", "step-00000002"}
        saved(copy, 4)
        prune_checkpoints(copy, 9)
        assert of_step(list_checkpoints(copy)[0]) == 4.0 and not [
            name for name in os.listdir(copy) if name.startswith(".")
        ]
        outcomes.append(done)
    assert len(outcomes) > 60 and outcomes[-1] and outcomes.count(False) > 20


@with_errors(errno.EIO, errno.ENOTEMPTY)
def test_pruning_whose_nth_operation_fails_is_a_line_and_keeps_what_is_to_stay(folder: Path, number: int) -> None:
    for step in range(1, 6):
        saved(folder / "start", step)
    for copy, _ in each(folder, number):
        said: list[str] = []
        prune_checkpoints(copy, 2, verified=copy / "step-00000005", say=said.append)
        storage.os = os  # type: ignore[attr-defined]
        assert all(map(is_one_line, said)) and len(said) <= 3
        left = {path.name for path in list_checkpoints(copy)}
        assert left >= {"step-00000004", "step-00000005"} and all(verify_checkpoint(copy / name) == [] for name in left)
        assert said or len(left) <= 3, "one whose place cannot be read stays until the next time"
        saved(copy, 6)
        prune_checkpoints(copy, 2)
        assert not [name for name in os.listdir(copy) if name.startswith(".")]


@with_errors(errno.EIO, errno.ESTALE)
def test_a_resume_whose_nth_operation_fails_reads_a_whole_checkpoint_or_says_why(folder: Path, number: int) -> None:
    """Never from the beginning in silence, never a mixture; what is passed over is said."""
    for step in (1, 2):
        saved(folder / "start", step)
    went_on = []
    for copy, disk in each(folder, number):
        said: list[str] = []
        try:
            found = newest_checkpoint(copy, say=said.append)
            assert found is not None, f"began anew in silence: {disk.failed}"
            went_on.append(of_step(found))
        except MeshwrightError as error:
            assert is_one_line(str(error)), str(error)
            went_on.append(0.0)
        assert all(map(is_one_line, said)) and (said or went_on[-1] != 1.0)
        storage.os = os  # type: ignore[attr-defined]
        assert of_step(newest_checkpoint(copy)) == 2.0
    assert set(went_on) <= {0.0, 1.0, 2.0} and went_on[-1] == 2.0 and 1.0 in went_on


def run_folder(folder: Path) -> None:
    """A run of 5 steps, with a journal and two checkpoints."""
    folder.mkdir()
    lines = [
        {
            "step": step,
            "loss": 3.0 / step,
            "tokens": 64,
            "gradient_norm": 1.0,
            "lr": 0.1,
            "seconds": 0.5,
            "batch": step - 1,
        }
        for step in range(1, 6)
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text(
        '{"kind": "unsaved", "at": 1.0, "step": 3, "cause": "the disk is full", "seconds": 2.0}\n'
    )
    for step in (3, 5):
        saved(folder / "checkpoints", step)


@with_errors(errno.EROFS, errno.ESTALE)
def test_a_report_whose_nth_operation_fails_is_the_whole_report_or_one_line(folder: Path, number: int) -> None:
    """Never a report that silently knows less."""
    run_folder(folder / "start")
    whole = run_text(read_run(folder / "start")).replace(str(folder / "start"), "")
    assert "the disk is full" in whole
    refused = 0
    for copy, disk in each(folder, number):
        try:
            assert run_text(read_run(copy)).replace(str(copy), "") == whole, disk.failed
        except MeshwrightError as error:
            assert is_one_line(str(error)) and str(copy) in str(error), str(error)
            refused += 1
    assert refused > 5


@with_errors(errno.ENOSPC, errno.EDQUOT)
def test_lines_whose_nth_operation_fails_are_all_there_in_the_end_each_once(folder: Path, number: int) -> None:
    (folder / "start").mkdir()
    for copy, _ in each(folder, number):
        lines = AppendOnlyFile(copy / "a.jsonl")
        for step in range(4):
            lines.append(json.dumps({"step": step}))
        lines.close()
        assert [json.loads(line)["step"] for line in (copy / "a.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


def test_a_save_and_a_report_whose_nth_operation_hangs_are_said_while_they_hang(folder: Path) -> None:
    """The call cannot be interrupted from within; whoever waits says so, and when the disk answers all is as ever."""
    run_folder(folder / "start")
    for work in (lambda copy: saved(copy / "checkpoints", 6), read_run):
        for at in range(1, 200, 7):
            copy = folder / f"hangs-{at}"
            shutil.copytree(folder / "start", copy)
            said = threading.Event()
            answer = lambda said=said: said.wait(60.0) or pytest.fail("a silent stall")
            with failing(at, instead=answer) as disk, storage.report_if_overdue(said.set, 0.002):
                work(copy)
            shutil.rmtree(copy)
            if not disk.failed:
                break


class NoTrash:
    """The module `os` without an answer for what is being removed."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS - {"rename"}:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            if ".trash" in str(arguments[0]):
                raise OSError(errno.ETIMEDOUT, "waits for ever", str(arguments[0]))
            return real(*arguments, **options)

        return call


def test_a_removal_that_hangs_at_its_nth_operation_costs_no_later_save(folder: Path) -> None:
    """The next save began with removing what was left, and so each one hung. It must not even look at it."""
    for step in range(1, 6):
        saved(folder / "start", step)
    for at in range(1, 200, 3):
        copy, hangs, answers = folder / f"hangs-{at}", threading.Event(), threading.Event()
        shutil.copytree(folder / "start", copy)
        pruner = CheckpointPruner(copy, lambda kind, line: None)
        hang = lambda hangs=hangs, answers=answers: hangs.set() or answers.wait(60.0)
        with failing(at, instead=hang) as disk:
            writer = threading.Thread(target=prune_checkpoints, args=(copy, 2, copy / "step-00000005"))
            writer.start()
            while writer.is_alive() and not hangs.is_set():
                writer.join(0.001)
            storage.os = NoTrash()  # type: ignore[assignment, attr-defined]
            for step in (6, 7, 6):
                saved(copy, step)
            assert of_step(newest_checkpoint(copy)) == 6.0
        answers.set()
        writer.join()
        pruner.prune(2)
        assert {path.name for path in list_checkpoints(copy)} == {"step-00000006", "step-00000007"}
        assert not [name for name in os.listdir(copy) if name.startswith(".")]
        shutil.rmtree(copy)
        if not disk.failed:
            break
    assert at > 60


def test_leftovers_go_where_a_checkpoint_has_no_room_otherwise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of a full disk is the only one that waits for them."""
    saved(folder, 1)
    (folder / ".step-00000002.0123abcd.tmp").mkdir()
    is_full = lambda: os.path.exists(folder / ".step-00000002.0123abcd.tmp")
    monkeypatch.setattr(storage, "free_bytes", lambda path: 10 if is_full() else 10**9)
    saved(folder, 3)
    assert sorted(os.listdir(folder)) == ["latest", "step-00000001", "step-00000003"]


def test_the_accounts_of_a_run_that_lost_records_say_what_is_missing(folder: Path) -> None:
    """A line was torn and 55 records found no room: 5 of 60 steps are accounted for, and that is said."""
    run_folder(folder / "run")
    saved(folder / "run" / "checkpoints", 60)
    with (folder / "run" / "records.jsonl").open("a") as lines:
        lines.write('{"step": 6, "loss": 1.0, "tok')
    workload = Workload(sequence=125, batch=8, steps=60)
    source = ModelSource(name="tiny", module="a:b")
    launch = LaunchSpec(model=source, workload=workload, data=DataConfig(), plan=parse_plan("dp1"), run=RunConfig())
    (folder / "run" / "launch.json").write_text(launch.to_json())
    run = read_run(folder / "run")
    summary = summarize_run(run)
    assert (
        (run.last, run.cut, len(run.steps)) == (60, 1, 5)
        and summary.goodput is not None
        and summary.goodput.saves == 2.0
    )
    assert summary.ledger is not None and (summary.ledger.steps, summary.ledger.missing) == (5, 55)
    assert (
        "40 samples in 5 steps, each once; proven for 0 of them; 55 more steps have no record of "
        "the samples that they read" in run_text(run)
    )
    assert "another" not in run_text(run, "zh") and "no record" not in run_text(run, "zh")


def test_characters_that_control_a_terminal_are_shown_as_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the name of a tensor, of a folder, and in what a rank says."""
    path = saved(folder / "checkpoints", 1)
    manifest = path / "manifest.json"
    rest = manifest.read_bytes().partition(b"\n")[2].replace(b"model/w", "model/\x9b31m\u202ew".encode())
    manifest.write_bytes(b'{"xxh3_128": "%s",\n' % xxhash.xxh3_128(rest).hexdigest().encode() + rest)
    (path / "rank-00000.safetensors").write_bytes(b"")
    assert main(["checkpoint", "verify", str(folder)]) != 0
    RunConsole().note("a name \x1b[31m \x9b31m \u202e")
    shown = "".join(capsys.readouterr())
    assert "\\x9b31m" in shown and "\\u202e" in shown and not {"\x9b", "\u202e", "\x1b"} & set(shown)


FILE_METHODS = {
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "iterdir",
    "glob",
    "rglob",
    "unlink",
    "mkdir",
    "rmdir",
    "rename",
    "is_dir",
    "is_file",
    "exists",
    "touch",
}
PATH_CALLS = {
    "chmod",
    "ftruncate",
    "link",
    "listdir",
    "lstat",
    "makedirs",
    "mkdir",
    "open",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "scandir",
    "stat",
    "statvfs",
    "symlink",
    "truncate",
    "unlink",
    "utime",
}
READERS = {"open", "write_atomically", "read_as", "read_text_file"}


def touching(tree: ast.AST) -> Iterator[str]:
    """Calls that touch files without the layer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            if (
                (owner == "os" and name in PATH_CALLS)
                or (owner == "shutil" and name != "get_terminal_size")
                or (name in FILE_METHODS and owner != "storage")
                or (name == "open" and owner not in ("os", "self"))
            ):
                yield ast.unparse(node.func)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            yield ast.unparse(node.func)


NOT_OF_A_RUN = {
    "cli/answer_cache.py": {"entry.is_dir", "os.scandir"},  # the code
    "cli/device_checks.py": {  # of the system
        "AMD_TOPOLOGY_FOLDER.glob",
        "DRIVER_VERSION_FILE.read_text",
        "path.is_file",
        "path.read_text",
    },
    "cli/start_checks.py": {"(folder / name).is_file", "Path(begin).exists", "folder.glob"},  # weights
    "elastic/proc_stats.py": {
        "Path(f'/proc/{process}/io').read_text",
        "Path(f'/proc/{process}/schedstat').read_text",
        "Path(f'/proc/{process}/stat').read_text",
    },
    "elastic/snapshot_fd_store.py": {"os.open", "Path('/proc/self/comm').write_text"},  # memory of another process
    "elastic/snapshot_replication.py": {"os.ftruncate"},  # memory
    "train/forkserver.py": {"Path('/proc/self/fd').glob", "os.open"},  # /dev/null
    "train/memory.py": {"Path('/proc/self/clear_refs').write_text", "Path('/proc/self/status').read_text"},
    "train/rank_main.py": {"os.open"},  # /dev/null
    "checkpoint/memory_checkpoint.py": {"os.open", "os.ftruncate"},  # memory
    "checkpoint/huggingface.py": {
        "(model / GENERATION_CONFIG_FILE).is_file",
        "(model / GENERATION_CONFIG_FILE).read_bytes",
        "config.is_file",
        "read_text_file",
    },
    "checkpoint/hf_weights.py": {
        "path.is_file",
        "(path / INDEX_FILE).exists",
        "(Path(path) / MANIFEST_FILE).exists",
        "path.is_dir",
        "(path / WEIGHTS_FILE).exists",
        "folder.glob",
        "path.glob",
        "os.listdir",
        "read_text_file",
    },
    "checkpoint/formats/dcp.py": {
        "file.is_file",
        "item.file.open",
    },
    "checkpoint/formats/deepspeed.py": {
        "(path / 'zero').is_dir",
        "(path / 'zero').iterdir",
        "(path / name).is_file",
        "(path / name).read_text",
        "(path / tag).glob",
        "(path / tag).is_dir",
        "common.is_file",
        "folder.glob",
        "one.is_dir",
        "path.glob",
        "path.iterdir",
    },
    "checkpoint/formats/detect.py": {
        "(path / ACCELERATE_FOLDERS[0] / METADATA_FILE).is_file",
        "(path / MANIFEST_FILE).exists",
        "(path / METADATA_FILE).is_file",
        "(path / name / METADATA_FILE).is_file",
        "path.glob",
        "path.is_dir",
        "path.is_file",
    },
    "checkpoint/formats/inert_pickle.py": {
        "path.read_bytes",
    },
    "checkpoint/formats/torch_state.py": {
        "file.open",
        "file.parent.mkdir",
    },
    "checkpoint/formats/megatron.py": {
        "file.is_file",
        "file.read_text",
    },
    "cli/export.py": {"out.mkdir", "write_atomically"},
    "cli/import_.py": {"out.mkdir", "write_atomically"},
    "cli/recording_options.py": {"write_atomically"},
    "report/page/plan_page.py": {"(resources.files('meshwright.report.page') / name).read_text"},
    "report/trace.py": {"write_atomically"},  # a file that a person names, as all below
    "cli/application.py": {"Path(__file__).parent.glob", "file.exists", "file.open"},
    "cli/checkpoint.py": {"named.is_dir", "tokenizer.is_dir", "config.exists", "read_text_file"},
    "cli/doctor.py": {"os.statvfs"},
    "cli/launch.py": {"save.mkdir", "write_atomically"},
    "cli/launch_plan.py": {
        "path.is_dir",
        "Path(source.folder, 'tokenizer.json').is_file",
        "path.exists",
        "path.is_file",
    },
    "cli/main.py": {"os.open"},
    "cli/options.py": {"path.is_dir", "path.is_file", "path.parent.is_dir"},
    "cli/plan.py": {"write_atomically"},
    "cli/probe.py": {"write_atomically"},
    "cli/report.py": {"write_atomically"},
    "cli/trace_model.py": {
        "folder.is_dir",
        "(folder / SPEC_FILE).write_text",
        "config.read_bytes",
        "(Path(__file__).parents[1] / package).rglob",
        "Path(name).expanduser().is_dir",
        "path.read_bytes",
        "(folder / SPEC_FILE).is_file",
        "read_as",
    },
    "cli/train.py": {"offloaded.is_dir"},
    "cli/verify.py": {"shutil.rmtree"},
}
"""Calls of the packages that know run folders, on files that are not of a run."""


def test_only_the_layer_touches_the_files_of_a_run() -> None:
    root, found = Path(meshwright.__file__).parent, dict[str, set[str]]()
    for package in ("checkpoint", "cli", "elastic", "report", "train"):
        for source in sorted((root / package).rglob("*.py")):
            if calls := set(touching(ast.parse(source.read_text()))):
                found[str(source.relative_to(root))] = calls
    for place in ("core/append_file.py", "core/storage_deadline.py", "data/tokens.py", "core/secure_channel.py"):
        if calls := set(touching(ast.parse((root / place).read_text()))):
            found[place] = calls
    settings = "(folder / 'tokenizer_config.json').read_text"
    tokenizer = {
        "place.is_dir",
        "file.read_text",
        "(folder / name).is_file",
        "file.read_bytes",
        settings,
    }  # a person names it
    allowed = {**NOT_OF_A_RUN, "data/tokens.py": tokenizer}
    assert {place: calls - allowed.get(place, set()) for place, calls in found.items()} == {
        place: set() for place in found
    }
