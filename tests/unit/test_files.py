"""Files that a person names: whole or not there, whatever the disk says."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.files import write_atomically

PLAN = ("plan", "--cluster", "1x4:cpu")
STEP = ("simulate", "--cluster", "1x4:cpu", "--plan", "dp4")
LAUNCH = ("launch", "--model", "llama-7b", "--cluster", "2x8:h100", "--lang", "en")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk on which one old file has taken all room, where this machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"this machine does not let us mount a tmpfs: {done.stderr.strip()}")
    (folder / "old").write_bytes(b"o" * 4096)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("meshwright: ")]


@pytest.mark.parametrize("name", ["new", "old"])
@pytest.mark.parametrize(
    "command",
    [(*PLAN, "--save"), pytest.param((*PLAN, "--page"), marks=pytest.mark.soak), (*STEP, "--trace")],
    ids=lambda words: words[-1],
)
def test_on_a_full_disk_a_file_is_the_one_before_or_none(
    full: Path, command: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(full / name)]) == 1
    assert said(capsys) == [f"meshwright: the disk is full ({full / name}): make room, then run the same command again"]
    assert [path.name for path in full.iterdir()] == ["old"] and (full / "old").read_bytes() == b"o" * 4096


def test_on_a_full_disk_no_script_is_left_without_its_job(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCH, "--save", str(full / "files")]) == 1
    assert said(capsys) == [
        f"meshwright: the disk is full ({full / 'files' / 'job.json'}): make room, then run the same command again"
    ]
    assert not list((full / "files").iterdir())


@pytest.mark.parametrize("command", [(*PLAN, "--save"), (*STEP, "--trace")], ids=lambda words: words[-1])
def test_what_is_no_plain_file_is_written_to_and_never_replaced(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "/dev/full"]) == 1
    assert said(capsys) == ["meshwright: the disk is full (/dev/full): make room, then run the same command again"]
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True) as reader:
        write_atomically(tmp_path / "pipe", "text")
        assert reader.stdout is not None and reader.stdout.read() == "text"


def test_a_file_that_is_replaced_keeps_its_rights_and_a_link_to_it_stays_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "after"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    write_atomically(tmp_path / "file", "secret", private=True)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_stop_while_a_file_is_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "file").write_text("before")
    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "before"


def test_an_answer_that_finds_no_room_is_one_line_too() -> None:
    with open("/dev/full", "wb") as nowhere:
        command = [sys.executable, "-m", "meshwright", *PLAN, "--lang", "en"]
        done = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, text=True, timeout=900)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("meshwright: the disk is full (")
