"""Requests to stop in the middle of a save, of trials, of a probe, of a page: the documented line and code, nothing lost, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cluster import need_networks
from test_train_run import JOB, environment, furnished, losses, wait_for_step
from test_train_supervisor import gone

from meshwright.checkpoint.folder import newest
from meshwright.checkpoint.manifest import step_of

SLOW_DISK = """
import os, time
fsync = os.fsync
def later(handle):
    time.sleep(0.4)
    fsync(handle)
os.fsync = later
"""
PAGE = ("plan", "--model", "llama-65b", "--cluster", "8x8:a100-80gb", "--batch", "512", "--seq", "2048", "--page", "page.html")
EMULATE = ("emulate", "1x1:cpu+1x1:cpu@1Gb", "--", sys.executable, "-m", "meshwright.cli.main")


@pytest.fixture
def place(tmp_path: Path, text: Path) -> Path:
    """A job on a disk whose every flush takes long; what is temporary lies there too."""
    for name in ("slow", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_DISK)
    return furnished(tmp_path, text, JOB)


def start(place: Path, *command: str, slow: bool = False) -> subprocess.Popen[str]:
    paths = [*([str(place / "slow")] if slow else []), os.environ.get("PYTHONPATH", "")]
    surroundings = {**environment(place), "TMPDIR": str(place / "temporary"), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    surroundings["MESHWRIGHT_MEASURED"] = "0"
    words = [sys.executable, "-m", "meshwright.cli.main", *command]
    return subprocess.Popen(words, cwd=place, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)


def wait_until(true: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not true():
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()


def ended(place: Path, process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The exit code and what was said; nothing of the process is left."""
    _, err = process.communicate(timeout=300)
    assert "Traceback" not in err and "fault of meshwright" not in err, err
    assert not list((place / "temporary").iterdir())
    assert gone(place)
    return process.returncode, err.splitlines()


def saving(place: Path, step: int) -> bool:
    return bool(list((place / "runs/mine/checkpoints").glob(f".step-{step:08d}.*.tmp")))


def hidden(place: Path) -> list[Path]:
    return list((place / "runs/mine").rglob(".*"))


def test_a_ctrl_c_while_a_checkpoint_is_written_beside_training_waits_for_it_and_saves_its_own_step(place: Path) -> None:
    process = start(place, "train", "job.yaml", "--run", "mine", slow=True)
    wait_until(lambda: saving(place, 4), process)
    process.send_signal(signal.SIGINT)
    code, lines = ended(place, process)
    assert (code, lines[-1].partition(";")[0]) == (75, "meshwright: stopped by SIGINT: everything is saved")
    assert step_of(newest(place / "runs/mine/checkpoints") or Path()) == max(losses(place, "mine")) < 40
    assert not hidden(place)


def test_a_request_to_stop_during_the_save_of_the_last_step_finds_a_run_that_is_done(place: Path) -> None:
    process = start(place, "train", "job.yaml", "--run", "mine", "--steps", "6", slow=True)
    wait_until(lambda: saving(place, 6), process)
    process.send_signal(signal.SIGTERM)
    code, lines = ended(place, process)
    assert code == 0, lines
    assert lines[-1].startswith("next: meshwright report") and not hidden(place)
    assert step_of(newest(place / "runs/mine/checkpoints") or Path()) == 6


def test_a_second_ctrl_c_during_a_save_ends_it_at_once_and_leaves_the_checkpoint_before_and_nothing_else(place: Path) -> None:
    process = start(place, "train", "job.yaml", "--run", "mine", slow=True)
    wait_for_step(place, "mine", 9, process)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: saving(place, max(losses(place, "mine"))), process)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, lines = ended(place, process)
    assert time.monotonic() - began < 30
    assert (code, lines[-1].partition(";")[0]) == (75, "meshwright: stopped by SIGINT: the step in progress was given up")
    assert not hidden(place)
    saved = step_of(newest(place / "runs/mine/checkpoints") or Path())
    again = start(place, "train", "job.yaml", "--run", "mine", "--steps", "40")
    code, lines = ended(place, again)
    assert code == 0 and f"goes on from the checkpoint of step {saved}" in lines
    assert sorted(losses(place, "mine")) == list(range(41))


@pytest.mark.parametrize("request_", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("command", ["train", "plan", "probe", "verify"])
def test_a_request_to_stop_before_there_is_a_step_to_save_is_one_line_that_says_what_it_cost(
    place: Path, command: str, request_: signal.Signals
) -> None:
    words = {
        "train": ("train", "job.yaml", "--run", "mine", "--trials", "3"),
        "plan": ("plan", "--cluster", "local:2", "--trials", "3", "--save", "best.json"),
        "probe": ("probe", "--cluster", "local:2", "--save", "best.json"),
        "verify": ("verify", "job.yaml"),
    }[command]
    if command == "train":
        (place / "job.yaml").write_text(JOB.replace("plan: {name: dp2.z1}\n", ""))
    process = start(place, *words)
    wait_until(lambda: list((place / "temporary").glob("meshwright-*/logs/rank-1.log")), process)
    process.send_signal(request_)
    code, lines = ended(place, process)
    early = {"probe": "before all was measured", "verify": "before all was compared"}.get(
        command, "during trials, of which nothing is kept"
    )
    assert (code, lines[-1]) == (75, f"meshwright: stopped by {request_.name} {early}; the same command starts again")
    assert not (place / "best.json").exists() and not (place / "runs").exists()
    assert not list((place / "cache").glob("clusters/*"))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("probe", "--save", "best.json"), id="probe"),
        pytest.param(("plan", "--trials", "3", "--save", "best.json"), id="plan"),
    ],
)
def test_ranks_of_another_launcher_end_together_and_one_of_them_says_why(place: Path, command: tuple[str, ...]) -> None:
    need_networks()
    process = start(place, *EMULATE, *command)
    assert process.stderr is not None
    said = [process.stderr.readline()]
    while said[-1] and not said[-1].startswith(("measuring", "trial")):
        said.append(process.stderr.readline())
    time.sleep(4.0 if command[0] == "probe" else 0.0)  # the other rank says nothing when it comes
    process.send_signal(signal.SIGINT)
    code, lines = ended(place, process)
    early = "before all was measured" if command[0] == "probe" else "during trials, of which nothing is kept"
    assert (code, lines[-1]) == (75, f"meshwright: stopped by SIGINT {early}; the same command starts again")
    assert sum(line.startswith("meshwright:") for line in lines) == 1
    assert not (place / "best.json").exists()


@pytest.mark.parametrize("request_", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_request_to_stop_while_a_page_is_computed_ends_its_processes_too(place: Path, request_: signal.Signals) -> None:
    """A terminal sends it to all of them."""
    process = start(place, *PAGE)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("page: a search"):
        pass
    time.sleep(1.0)
    (os.killpg if request_ == signal.SIGINT else os.kill)(process.pid, request_)
    code, lines = ended(place, process)
    assert (code, lines) == (75, ["meshwright: interrupted; the same command goes on"])
    assert not (place / "page.html").exists()
