"""Requests to stop in the middle of a save, of trials, of a probe, of a page: the documented line and code, nothing
lost, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_emulated_cluster import children, need_networks
from test_train_run import JOB, environment, furnished, losses, wait_for_step
from test_train_supervisor import gone

from meshwright.checkpoint.manifest import parse_step
from meshwright.checkpoint.retention import newest_checkpoint

HOLDING = """
import os, time
fsync, dup2, process_time = os.fsync, os.dup2, time.process_time
def name():
    with open("/proc/self/comm") as file:
        return file.read().strip()
def hold(what):
    place, end = os.environ["HELD"], time.monotonic() + 600
    while os.path.exists(f"{place}/hold-{what}") and time.monotonic() < end:
        open(f"{place}/holds-{what}", "w").close()
        time.sleep(0.01)
def flushed(handle):
    if "/.step-" in os.readlink(f"/proc/self/fd/{handle}"):
        hold("writer" if name() == "mesh-rank--1" else "save")
    fsync(handle)
def started(*handles, **more):
    if name() == "mesh-rank-1":
        hold("start")
    return dup2(*handles, **more)
def timed():
    if os.environ.get("RANK") == "0":
        hold("measure")
    return process_time()
os.fsync, os.dup2, time.process_time = flushed, started, timed
"""
"""A process of a command stands still where a file says so: ranks in a save of their own, who writes one beside them,
the second rank when it starts, or the first one of another launcher when all are there and it begins to measure."""
PAGE = (
    "plan",
    "--model",
    "llama-65b",
    "--cluster",
    "8x8:a100-80gb",
    "--batch",
    "512",
    "--seq",
    "2048",
    "--page",
    "page.html",
)
EMULATE = ("-m", "bench.emulation", "1x1:cpu+1x1:cpu@1Gb", "--", sys.executable, "-m", "meshwright.cli.main")


@pytest.fixture
def place(tmp_path: Path, text: Path) -> Path:
    """A job; what is temporary lies there too."""
    for name in ("holding", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "holding" / "sitecustomize.py").write_text(HOLDING)
    return furnished(tmp_path, text, JOB)


def start(place: Path, *command: str, hold: str = "") -> subprocess.Popen[str]:
    """`hold`: what stands still as soon as it comes to it."""
    if hold:
        (place / f"hold-{hold}").touch()
    paths = os.pathsep.join(
        filter(None, (str(place / "holding"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    )
    surroundings = {**environment(place), "TMPDIR": str(place / "temporary"), "PYTHONPATH": paths, "HELD": str(place)}
    surroundings["MESHWRIGHT_MEASURED"] = "0"
    words = [sys.executable, *(() if command[0] == "-m" else ("-m", "meshwright.cli.main")), *command]
    return subprocess.Popen(
        words, cwd=place, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )


def wait_until(true: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not true():
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()


def wait_for_hold(place: Path, what: str, process: subprocess.Popen[str]) -> None:
    wait_until((place / f"holds-{what}").exists, process)


def let_go(place: Path, what: str) -> None:
    (place / f"hold-{what}").unlink()


def wait_for_line(begin: str, process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(begin):
            return
    raise AssertionError(f"it never said {begin!r}")


def ended(place: Path, process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The exit code and what was said; nothing of the process is left."""
    _, err = process.communicate(timeout=900)
    assert "Traceback" not in err and "fault of meshwright" not in err, err
    assert not list((place / "temporary").iterdir())
    assert gone(place)
    return process.returncode, err.splitlines()


def hidden(place: Path) -> list[Path]:
    return list((place / "runs/mine").rglob(".*"))


@pytest.mark.soak
def test_ctrl_c_during_an_async_checkpoint_waits_for_it_and_saves_its_own_step(
    place: Path,
) -> None:
    process = start(place, "train", "job.yaml", "--run", "mine", "--set", "run.grace_period=600", hold="writer")
    wait_for_hold(place, "writer", process)
    process.send_signal(signal.SIGINT)
    wait_for_line("SIGINT: ", process)
    let_go(place, "writer")
    code, lines = ended(place, process)
    assert (code, lines[-1].partition(";")[0]) == (75, "meshwright: stopped by SIGINT: everything is saved")
    assert parse_step(newest_checkpoint(place / "runs/mine/checkpoints") or Path()) == max(losses(place, "mine")) < 40
    assert not hidden(place)


def test_a_request_to_stop_during_the_save_of_the_last_step_finds_a_run_that_is_done(place: Path) -> None:
    process = start(
        place, "train", "job.yaml", "--run", "mine", "--steps", "6", "--set", "run.grace_period=600", hold="save"
    )
    wait_for_hold(place, "save", process)
    process.send_signal(signal.SIGTERM)
    wait_for_line("SIGTERM: ", process)
    let_go(place, "save")
    code, lines = ended(place, process)
    assert code == 0, lines
    assert lines[-1].startswith("next: meshwright report") and not hidden(place)
    assert parse_step(newest_checkpoint(place / "runs/mine/checkpoints") or Path()) == 6


@pytest.mark.soak
def test_a_second_ctrl_c_ends_a_save_at_once_and_keeps_the_previous_checkpoint(
    place: Path,
) -> None:
    """The save would never end."""
    process = start(place, "train", "job.yaml", "--run", "mine", "--set", "run.grace_period=600", hold="save")
    wait_for_step(place, "mine", 9, process)
    process.send_signal(signal.SIGINT)
    wait_for_hold(place, "save", process)
    process.send_signal(signal.SIGINT)
    code, lines = ended(place, process)
    assert (code, lines[-1].partition(";")[0]) == (
        75,
        "meshwright: stopped by SIGINT: the step in progress was given up",
    )
    assert not hidden(place)
    saved = parse_step(newest_checkpoint(place / "runs/mine/checkpoints") or Path())
    let_go(place, "save")
    again = start(place, "train", "job.yaml", "--run", "mine", "--steps", "40")
    code, lines = ended(place, again)
    assert code == 0 and f"goes on from the checkpoint of step {saved}" in lines
    assert sorted(losses(place, "mine")) == list(range(41))


def test_ctrl_c_saves_the_step_in_memory_if_a_rank_does_not_answer(place: Path) -> None:
    """The rank is suspended, so the ranks cannot end their step within the grace period. Without new ranks that save,
    all steps since the last checkpoint on disk would be lost."""
    options = ("--steps", "4000", "--set", "run.grace_period=1", "--set", "run.checkpoint_every=0")
    options += ("--set", "run.hang_timeout=0")
    process = start(place, "train", "job.yaml", "--run", "mine", *options)
    wait_for_step(place, "mine", 9, process)
    os.kill(find_rank(process, "mesh-rank-1"), signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, lines = ended(place, process)
    assert (code, lines[-1].partition(";")[0]) == (75, "meshwright: stopped by SIGINT: everything is saved"), lines
    assert any("no save within 1 s of the request to stop" in line for line in lines), lines
    saved = parse_step(newest_checkpoint(place / "runs/mine/checkpoints") or Path())
    assert 9 <= saved == max(losses(place, "mine")) < 4000


def find_rank(process: subprocess.Popen[str], name: str) -> int:
    """Returns the pid of a rank. Ranks are children of the fork server, a child of the command."""
    every = [grandchild for child in children(process.pid) for grandchild in children(child)]
    return next(pid for pid in every if Path(f"/proc/{pid}/comm").read_text().strip() == name)


@pytest.mark.parametrize("request_", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("command", ["train", "plan", "probe", "verify"])
@pytest.mark.covering(1)
def test_a_stop_before_the_first_step_is_one_line_that_states_its_cost(
    place: Path, command: str, request_: signal.Signals
) -> None:
    words = {
        "train": ("train", "job.yaml", "--run", "mine", "--trials", "3"),
        "plan": ("plan", "--cluster", "local:2", "--trials", "3", "--save", "best.json"),
        "probe": ("probe", "--cluster", "local:2", "--save", "best.json"),
        "verify": ("verify", "job.yaml"),
    }[command]
    if command == "train":
        (place / "job.yaml").write_text(JOB.replace("plan: {name: dp2.z1.mb2}\n", ""))
    process = start(place, *words, hold="start")
    wait_for_hold(place, "start", process)
    process.send_signal(request_)
    code, lines = ended(place, process)
    early = {"probe": "before all was measured", "verify": "before all was compared"}.get(
        command, "during trials, whose results are not saved"
    )
    assert (code, lines[-1]) == (75, f"meshwright: stopped by {request_.name} {early}; the same command starts again")
    assert not (place / "best.json").exists() and not (place / "runs").exists()
    assert not list((place / "cache").glob("clusters/*"))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("probe", "--save", "best.json"), id="probe"),
        pytest.param(("plan", "--cluster", "local:2", "--trials", "3", "--save", "best.json"), id="plan"),
    ],
)
@pytest.mark.soak
def test_ranks_of_another_launcher_end_together_and_one_of_them_says_why(place: Path, command: tuple[str, ...]) -> None:
    need_networks()
    process = start(place, *EMULATE, *command, hold="measure")
    wait_for_hold(place, "measure", process)
    process.send_signal(signal.SIGINT)
    code, lines = ended(place, process)
    early = "before all was measured" if command[0] == "probe" else "during trials, whose results are not saved"
    assert (code, lines[-1]) == (75, f"meshwright: stopped by SIGINT {early}; the same command starts again")
    assert sum(line.startswith("meshwright:") for line in lines) == 1
    assert not (place / "best.json").exists()


@pytest.mark.parametrize("request_", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.soak
def test_a_request_to_stop_while_a_page_is_computed_ends_its_processes_too(
    place: Path, request_: signal.Signals
) -> None:
    """A terminal sends it to all of them."""
    process = start(place, *PAGE)
    wait_for_line("page: searching", process)
    wait_until(lambda: len(children(process.pid)) > 1 or os.cpu_count() == 1, process)
    (os.killpg if request_ == signal.SIGINT else os.kill)(process.pid, request_)
    code, lines = ended(place, process)
    assert (code, lines) == (75, ["meshwright: interrupted; run the same command again to continue"])
    assert not (place / "page.html").exists()
