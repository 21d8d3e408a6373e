"""`meshwright train` as a person runs it: killed, interrupted, started twice, started by torchrun; the end is always
the same."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fork_server import kill
from paced_steps import PACED
from ports import reserved
from safetensors import safe_open
from test_train_supervisor import gone

from meshwright.checkpoint.manifest import parse_step
from meshwright.checkpoint.retention import newest_checkpoint
from meshwright.elastic.snapshot_adoption import SOCKET_NAME_FILE
from meshwright.report.faults import read_events
from meshwright.spec.record import EVENTS_FILE_NAME
from meshwright.spec.workload import OptimizerConfig
from meshwright.train.optimizer import learning_rate

JOB = """
model: {name: llama-tiny, sizes: {layers: 2, hidden: 32, heads: 4, kv_heads: 4, head_dim: 8, ffn: 64, vocab: 258, seq: \
64}}
workload: {sequence: 32, batch: 8, steps: 40, precision: fp32, optimizer: {lr: 1.0e-2, warmup: 5}}
data: {source: text.txt, tokenizer: bytes, held_out: 0.1}
cluster: {name: "local:2"}
plan: {name: dp2.z1.mb2}
run: {checkpoint_every: 4, evaluate_every: 20, prove: never}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(tmp_path_factory.mktemp("train"), text, JOB)


def furnished(folder: Path, text: Path, job: str) -> Path:
    """With a job and the text that it reads."""
    shutil.copy(text, folder)
    (folder / "job.yaml").write_text(job)
    return folder


def environment(place: Path, checked: bool = False) -> dict[str, str]:
    """`checked`: with the checks of rows and writes before the first steps also outside of the soak."""
    surroundings = {"MESHWRIGHT_CACHE": str(place / "cache"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    checks = "first" if checked else os.environ.get("MESHWRIGHT_TEST_CHECKS", "first")
    return {**os.environ, **surroundings, "MESHWRIGHT_CHECKS": checks}


def held(place: Path, run: str, step: int) -> dict[str, str]:
    """What a run is to know (paced_steps.py) whose steps from `step` on come slowly, so that it does not end before a
    test has done with it, until it is let go."""
    (place / f"{run}.held").write_text(str(step))
    return {
        PACED: str(place / f"{run}.held"),
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }


def let_go(place: Path, run: str) -> None:
    (place / f"{run}.held").unlink()


def start(
    place: Path,
    run: str,
    *more: str,
    launcher: tuple[str, ...] = (sys.executable,),
    until: int = 0,
    checked: bool = False,
) -> subprocess.Popen:
    """`until`: the step from which on it is held."""
    command = [
        *launcher,
        "-m",
        "paced_steps" if until else "meshwright.cli.main",
        "train",
        "job.yaml",
        "--folder",
        f"runs/{run}",
        *more,
    ]
    there = {**environment(place, checked), **(held(place, run, until) if until else {})}
    return subprocess.Popen(command, cwd=place, env=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(place: Path, run: str, *more: str, checked: bool = False) -> tuple[int, str, str]:
    process = start(place, run, *more, checked=checked)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def wait_for_step(place: Path, run: str, step: int, process: subprocess.Popen) -> None:
    records = place / "runs" / run / "records.jsonl"
    while process.poll() is None and not (records.exists() and f'{{"step":{step},' in records.read_text()):
        time.sleep(0.005)


def weights(place: Path, run: str, step: int) -> dict[str, bytes]:
    """Every byte that the ranks saved at `step`: weights, optimizer, random states."""
    saved: dict[str, bytes] = {}
    for file in sorted((place / "runs" / run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            saved |= {f"{file.name}: {name}": tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118
    return saved


def losses(place: Path, run: str) -> dict[int, float]:
    """By step; a step that was run again counts as it was run last."""
    lines = (place / "runs" / run / "records.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[int, str, str]:
    """A run that nothing disturbed, with all checks."""
    return train(place, "whole", "--json", checked=True)


def test_a_run_learns_records_every_step_and_says_what_comes_next(place: Path, whole: tuple[int, str, str]) -> None:
    code, out, err = whole
    assert code == 0, err
    assert "\r" not in out + err and "\x1b" not in out + err
    curve = losses(place, "whole")
    assert sorted(curve) == list(range(41))
    assert curve[40] < 0.6 * curve[0]
    answer = json.loads(out)
    assert answer["steps"] == 40
    assert answer["held_out"]["last"]["loss"] < 0.6 * answer["held_out"]["first"]["loss"]
    for kind in ("parameters", "gradients", "optimizer"):
        row = next(row for row in answer["memory"] if row["name"] == kind)
        assert row["measured"] == row["predicted"] > 0
    assert {"job.json", "plan.json", "estimate.json", "launch.json", "records.jsonl"} <= {
        p.name for p in (place / "runs/whole").iterdir()
    }
    assert "next: meshwright report" in err and "  | def " in err
    assert gone(place)


def holder_of(place: Path, run: str) -> psutil.Process | None:
    """The process that holds the snapshots of a run, if it lives."""
    with suppress(OSError):
        name = (place / "runs" / run / SOCKET_NAME_FILE).read_text().strip()
        return next((process for process in psutil.process_iter() if name in words_of(process)), None)
    return None


def words_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.soak
def test_a_run_killed_at_once_with_all_its_processes_ends_in_the_same_bytes(
    place: Path, whole: tuple[int, str, str]
) -> None:
    process = start(place, "killed", until=20)
    wait_for_step(place, "killed", 13, process)
    holder = holder_of(place, "killed")
    assert holder is not None
    holder.kill()
    process.kill()
    process.communicate()
    assert gone(place)
    assert max(losses(place, "killed")) < 40
    saved = newest_checkpoint(place / "runs" / "killed" / "checkpoints")
    assert saved is not None and parse_step(saved) >= 8
    code, _, err = train(place, "killed")
    assert code == 0, err
    assert f"goes on from the checkpoint of step {parse_step(saved)}" in err
    assert losses(place, "killed") == losses(place, "whole")
    assert weights(place, "killed", 40) == weights(place, "whole", 40) != {}


@pytest.mark.soak
def test_an_interrupted_run_saves_the_step_it_is_at_and_ends_in_the_same_bytes(
    place: Path, whole: tuple[int, str, str]
) -> None:
    run = "stopped"
    process = start(place, run, until=20)
    wait_for_step(place, run, 6, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("meshwright: stopped by SIGINT: everything is saved")
    last = max(losses(place, run))
    assert weights(place, run, last) != {}
    assert gone(place)
    code, _, err = train(place, run)
    assert code == 0, err
    assert f"goes on from the checkpoint of step {last}" in err
    assert losses(place, run) == losses(place, "whole")
    assert weights(place, run, 40) == weights(place, "whole", 40)


@pytest.mark.soak
def test_a_run_is_trained_on_by_asking_for_more_steps(place: Path, whole: tuple[int, str, str]) -> None:
    shutil.copytree(place / "runs" / "whole", place / "runs" / "longer")
    code, _, err = train(place, "longer", "--steps", "44")
    assert code == 0, err
    assert "goes on to step 44 instead of 40: from here on the learning rate follows the cosine over 44 steps" in err
    records = [json.loads(line) for line in (place / "runs" / "longer" / "records.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(45))
    rule = OptimizerConfig(lr=1e-2, warmup=5)
    assert [record["lr"] for record in records[41:]] == [learning_rate(rule, step, 44) for step in range(40, 44)]
    code, _, err = train(place, "longer")
    assert code == 2 and "workload.steps is 44 there and 40 here" in err


def test_a_run_folder_of_another_job_is_refused_with_the_difference(place: Path, whole: tuple[int, str, str]) -> None:
    code, _, err = train(place, "whole", "--batch", "16")
    assert code == 2
    assert err.strip() == (
        "meshwright: run 'runs/whole' belongs to another job: workload.batch is 8 there and 16 here; choose another "
        "--run, or repeat its options"
    )


def test_a_run_folder_of_another_version_is_refused_in_one_line(place: Path, whole: tuple[int, str, str]) -> None:
    for name, before, after in (("later", '"version": 1', '"version": 2'), ("cut", '"plan"', "")):
        folder = place / "runs" / name
        folder.mkdir()
        text = (place / "runs" / "whole" / "launch.json").read_text()
        assert before in text
        (folder / "launch.json").write_text(text.replace(before, after))
        code, _, err = train(place, name)
        assert code == 2
        words = (
            rf"meshwright: run 'runs/{name}' was begun by another version, or its launch.json is damaged \(.+\): go "
            r"on with that version, or choose another --run\n"
        )
        assert re.fullmatch(words, err), err


@pytest.mark.soak
def test_a_second_launch_of_a_run_is_refused_while_the_first_one_lasts(place: Path) -> None:
    first = start(place, "twice", until=2)
    while first.poll() is None and not (place / "runs" / "twice" / "launch.json").exists():
        time.sleep(0.01)
    code, _, err = train(place, "twice")
    first.kill()
    first.communicate()
    assert code == 2
    assert re.fullmatch(
        rf"meshwright: run 'runs/twice' is being trained by process {first.pid} on \S+: wait for it, or choose "
        r"another --run\n",
        err,
    )
    assert gone(place)


def kill_rank(place: Path, run: str, process: subprocess.Popen) -> None:
    wait_for_step(place, run, 3, process)
    ranks = [
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit() and _name(int(pid)) == "mesh-rank-1" and _belongs(int(pid), place)
    ]
    os.kill(ranks[0], signal.SIGKILL)


@pytest.mark.soak
def test_a_killed_rank_is_replaced_and_the_run_ends_in_the_same_bytes(place: Path, whole: tuple[int, str, str]) -> None:
    process = start(place, "healed", until=20)
    kill_rank(place, "healed", process)
    let_go(place, "healed")
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert re.search(
        r"rank 1 killed by SIGKILL.*: ranks start again\n(.*\n)*restored from in-memory checkpoint in .*, 0 steps lost",
        err,
    )
    assert losses(place, "healed") == losses(place, "whole")
    assert weights(place, "healed", 40) == weights(place, "whole", 40) != {}
    assert gone(place)


@pytest.mark.soak
def test_without_retries_a_killed_rank_ends_the_run_with_few_lines_that_name_it(place: Path) -> None:
    process = start(place, "rank-killed", "--set", "run.retries=0", until=20)
    kill_rank(place, "rank-killed", process)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1
    report = err[err.index("meshwright: ") :].splitlines()
    assert len(report) <= 12
    assert re.match(r"meshwright: rank 1 of 2 on \S+: killed by SIGKILL", report[0])
    assert gone(place)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _belongs(pid: int, place: Path) -> bool:
    return Path(f"/proc/{pid}/fd/1").resolve().is_relative_to(place)


@pytest.mark.soak
@pytest.mark.parametrize("times", [2, 5])
def test_a_fork_server_killed_again_while_it_loads_costs_no_step(
    place: Path, whole: tuple[int, str, str], times: int
) -> None:
    """The process that forks ranks, and the one that takes its place: both count as failures of the run."""
    run = f"fork-{times}"
    process = start(place, run, until=20, checked=True)
    wait_for_step(place, run, 10, process)
    assert len(kill(process, times)) == times
    let_go(place, run)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert losses(place, run) == losses(place, "whole") and weights(place, run, 40) == weights(place, "whole", 40) != {}
    faults = [event for event in read_events(place / "runs" / run / EVENTS_FILE_NAME) if event.kind == "fault"]
    assert len(faults) == times and all(
        "the process that starts ranks died (signal 9)" in event.cause for event in faults
    )
    recoveries = [event for event in read_events(place / "runs" / run / EVENTS_FILE_NAME) if event.kind == "recovery"]
    assert [(event.lost, event.source) for event in recoveries] == [(0, "memory")]
    assert gone(place)


def test_two_agents_of_torchrun_train_to_the_same_losses(place: Path, whole: tuple[int, str, str]) -> None:
    def agent(node: int) -> tuple[str, ...]:
        torchrun = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={node}",
        )
        return (*torchrun, "--master-addr=127.0.0.1", f"--master-port={port}", "--no-python", sys.executable)

    with reserved() as port:
        agents = [start(place, "torchrun", launcher=agent(node)) for node in range(2)]
        try:
            said = [process.communicate(timeout=900)[1] for process in agents]
        finally:
            for process in agents:
                process.kill()
    assert [process.returncode for process in agents] == [0, 0], "\n".join(said)
    assert losses(place, "torchrun") == losses(place, "whole")
    assert gone(place)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--set", "workload.stesp=3"), "$.workload: Workload has no field 'stesp'; did you mean 'steps'?"),
        pytest.param(
            ("--plan", "dp3.tp2"),
            "plan dp3.tp2: dp(3) * tp(2) * pp(1) = 6 but the cluster has 2 devices",
            marks=pytest.mark.soak,
        ),
        pytest.param(("--set", "data.source=nowhere.txt"), "nowhere.txt", marks=pytest.mark.soak),
        (("--set", "data.source=empty.txt"), "empty.txt"),
        (("--batch", "7"), "7"),
    ],
)
def test_what_a_person_writes_wrong_is_one_line_and_exit_code_2(
    place: Path, change: tuple[str, ...], words: str
) -> None:
    (place / "empty.txt").write_text("")
    code, _, err = train(place, "wrong", *change)
    said = err.strip().splitlines()
    assert code == 2, err
    assert said[-1].startswith("meshwright: ") and words in said[-1]
    assert "Traceback" not in err
    assert gone(place)
