"""Tests a run whose ports are scanned and flooded, while one save fails with EIO, the checkpoint writer is stopped for
some seconds and one rank is killed. The losses must equal those of a quiet run, and every line of the report must agree
with the raw files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from attacked_run import FAILS
from report_lines import cells, expected
from sample_accounting import check, raw
from test_train_run import JOB, environment, furnished, held, let_go, losses, train, wait_for_step, weights
from test_train_supervisor import gone
from test_untrusted_connections import flood, scan

STEPS, STOPPED = 40, 7.0
"""Steps of the run, and seconds for which its writer is stopped: more than those after which a line says so."""
FAULTS = {"eio": 8, "stopped": 16, "killed": 30}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    place = furnished(tmp_path_factory.mktemp("together"), text, JOB)
    code, _, err = train(place, "quiet")
    assert code == 0, err
    return place


def start(place: Path, run: str, faults: dict[str, int]) -> subprocess.Popen[str]:
    """Starts a run that waits at its second step."""
    (place / "faults.json").write_text(json.dumps(faults))
    there = {**environment(place), **held(place, run, 2), FAILS: str(place / "faults.json")}
    command = [sys.executable, "-m", "attacked_run", "train", "job.yaml", "--folder", f"runs/{run}"]
    return subprocess.Popen(command, cwd=place, env=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ports(process: subprocess.Popen[str]) -> list[int]:
    """Returns the ports on which the processes of a run listen, except those of ranks, which are gloo's."""
    found = set()
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        if not member.name().startswith("mesh-rank"):
            found |= {it.laddr.port for it in member.net_connections("tcp") if it.status == psutil.CONN_LISTEN}
    return sorted(found)


def stopped_writer(place: Path, process: subprocess.Popen[str]) -> psutil.Process:
    """Returns the process that writes a checkpoint, once it is stopped."""
    mark = place / "faults.json.stopped"
    while not (mark.exists() and mark.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    writer = psutil.Process(int(mark.read_text()))
    while writer.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    return writer


def attack(place: Path, run: str) -> str:
    """Trains under all attacks. Returns the output of the command."""
    process = start(place, run, FAULTS)
    wait_for_step(place, run, 1, process)
    listening = ports(process)
    assert listening, "the store at least"
    for port in listening:
        scan(port)
    with flood(listening):
        let_go(place, run)
        writer = stopped_writer(place, process)
        time.sleep(STOPPED)
        writer.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert "Traceback" not in err and gone(place)
    return err


@pytest.mark.soak
def test_the_report_of_a_run_under_all_of_it_at_once_is_right_line_by_line(place: Path) -> None:
    err = attack(place, "attacked")
    folder = place / "runs" / "attacked"
    assert losses(place, "attacked") == losses(place, "quiet")
    assert weights(place, "attacked", STEPS) == weights(place, "quiet", STEPS) != {}
    assert "no checkpoint at step 8: " in err and "training has waited" in err and "rank 1 killed by SIGKILL" in err
    events = raw(folder / "events.jsonl")
    kinds = [event["kind"] for event in events]
    assert (kinds.count("fault"), kinds.count("recovery"), kinds.count("unsaved")) == (1, 1, 1)
    saved = [event["step"] for event in events if event["kind"] == "save"]
    assert saved == [step for step in range(4, STEPS + 1, 4) if step != FAULTS["eio"]], "none of the others is lost"
    assert STOPPED - 1.0 < check(folder)["saves"] < STOPPED + 5.0, "the wait for the writer that was stopped"
    command = [sys.executable, "-m", "meshwright.cli.main", "report", "runs/attacked"]
    asked = subprocess.run(command, cwd=place, env=dict(os.environ), capture_output=True, text=True, check=True)
    printed, due = cells(asked.stdout), expected(folder, "runs/attacked", "dp2.z1.mb2")
    assert len(printed) == len(due), asked.stdout
    for number, (line, right) in enumerate(zip(printed, due, strict=True), 1):
        assert line == right, f"line {number} of\n{asked.stdout}"
