"""Twenty each of faults that end no rank: damaged checkpoints, saves of wrong data, wrong clocks, and jobs that drift
from one start to the next. What is measured stands in bench/results/faults.md."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_runs import events, launch, random_faults, train, warm_process
from test_faults_soak import FAULTS, LONG, is_named
from test_faults_soak_rows import PLAN, same, settle
from test_nodes import JOB as NODES
from test_nodes import Nodes
from test_train_run import JOB, furnished, start, wait_for_step, weights
from test_train_run import losses as losses_of
from test_train_run import train as launched

from meshwright.checkpoint.retention import newest_checkpoint
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.core.errors import Interrupted
from meshwright.elastic.local_agent import LocalAgent

pytestmark = pytest.mark.soak


def heard(notes: list[str]) -> Callable[[int, dict[str, Any]], None]:
    return lambda rank, message: notes.append(message["line"]) if message["kind"] == "note" else None


@pytest.fixture(scope="module")
def whole(agent: LocalAgent, tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    train(agent, launch(text, folder, PLAN, LONG), [])
    return folder


# --- row 16
# -------------------------------------------------------------------------------------------------------------------

DAMAGES = ("flip", "zeros", "cut", "missing", "swap", "stale")


def damage(checkpoint: Path, how: str, chance: random.Random) -> str:
    """The name of the file that is damaged."""
    files = sorted(checkpoint.glob("rank-*.safetensors"))
    file, other = chance.sample(files, 2)
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    if how == "flip":
        data[at] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    elif how == "zeros":
        at = next(place for place in [*range(at, len(data)), *range(at)] if data[place])
        data[at : at + 512] = bytes(len(data[at : at + 512]))
        file.write_bytes(data)
    elif how == "cut":
        os.truncate(file, at)
    elif how == "missing":
        file.unlink()
    elif how == "swap":
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        before = sorted(checkpoint.parent.glob("step-*"))[-2]
        shutil.copy(next(before.glob("rank-*.safetensors")), file)
    return file.name


def test_twenty_damaged_checkpoints_are_named_and_passed_over(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: Path
) -> None:
    """Row 16: the newest one of a run that was stopped; it goes on from the one before and ends in the same bits."""
    chance, passed, begun = random.Random(16), 0, tmp_path / "begun"

    def hear(rank: int, message: dict[str, Any]) -> None:
        if rank == 0 and message["kind"] == "record" and message["record"]["step"] == LONG - 10:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="everything is saved"):
        train(agent, launch(text, begun, PLAN, LONG, checkpoint_every=20, keep=9), [], hear=hear)
    for number in range(FAULTS):
        folder, notes = tmp_path / str(number), list[str]()
        shutil.copytree(begun, folder)
        last = newest_checkpoint(folder / "checkpoints")
        assert last is not None
        name = damage(last, DAMAGES[number % len(DAMAGES)], chance)
        train(agent, launch(text, folder, PLAN, LONG, checkpoint_every=20, keep=9), [], hear=heard(notes))
        said = [note for note in notes if note.startswith(f"checkpoint {last.name} is skipped: ")]
        passed += len(said) == 1 and (name in said[0] or "more problems" in said[0]) and same(folder, whole)
    settle("16 a damaged checkpoint", PLAN, passed, tmp_path / "0", True)


# --- row 17
# -------------------------------------------------------------------------------------------------------------------


def test_twenty_saves_of_an_old_buffer_are_caught_when_they_are_written(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: Path
) -> None:
    """Row 17: one tensor of one rank, where each rank writes its own; every save that is right stands, and no other."""
    chance, every, folder, notes = random.Random(17), 3, tmp_path / "hurt", list[str]()
    saves = range(every, LONG, every)
    stale = {str(step): chance.randrange(4) for step in chance.sample(saves[1:], FAULTS)}
    work = launch(text, folder, PLAN, LONG, checkpoint_every=every, keep=99, memory_checkpoints=False)
    train(agent, work, [], notes, stale=stale)
    there = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert there == {f"step-{step:08d}" for step in (*saves, LONG) if str(step) not in stale}
    assert all(verify_checkpoint(folder / "checkpoints" / name) == [] for name in there)
    assert [event.kind for event in events(folder)] == ["unsaved"] * FAULTS
    words = (
        r"no checkpoint at step {0}: .* rank {1}: .*: (model|optimizer)/\S+ differs from "
        r"memory when it is read back: wrong data were written.*"
    )
    passed = sum(any(re.fullmatch(words.format(step, rank), note) for note in notes) for step, rank in stale.items())
    settle("17 a save of wrong data", PLAN, passed, folder, same(folder, whole))


# --- row 27
# -------------------------------------------------------------------------------------------------------------------

HOUR = 3600


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """clock.c: who is started with it asks it for the time of day."""
    compiler, made = shutil.which("cc"), tmp_path_factory.mktemp("clock") / "clock.so"
    if compiler is None:
        pytest.skip("this needs a C compiler")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", made, Path(__file__).parent / "clock.c"], check=True)
    return made


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Iterator[LocalAgent]:
    yield from warm_process(tmp_path_factory.mktemp("turned"), LD_PRELOAD=str(library))


def test_twenty_clocks_that_jump_by_an_hour_change_nothing(
    turned: LocalAgent, tmp_path: Path, text: Path, whole: Path
) -> None:
    """Row 27: of one rank after another, forth and back, while checkpoints are written; who dies or freezes afterwards
    is found as ever."""
    folder = tmp_path / "hurt"
    jumps = [
        {**jump, "delay": 0.0} for jump in random_faults(FAULTS, 4, [f"clock+{HOUR}", f"clock-{HOUR}"], 27, LONG - 16)
    ]
    ends = [
        {"rank": rank, "step": step, "phase": "backward", "how": how}
        for rank, step, how in ((1, LONG - 12, "SIGKILL"), (2, LONG - 6, "SIGSTOP"))
    ]
    train(turned, launch(text, folder, PLAN, LONG, checkpoint_every=5), [*jumps, *ends])
    passed = sum((folder / f"fault-{number}.1").exists() for number in range(FAULTS))
    found = [event for event in events(folder) if event.kind == "fault"]
    assert [event.rank for event in found] == [1, 2] and all(is_named(end, found) for end in ends), found
    settle("27 clocks", PLAN, passed, folder, same(folder, whole))


class Skewed(Nodes):
    """The second node in another time: an hour ahead, and up for two hours longer, as another machine may be."""

    def __init__(self, place: Path, run: str, library: Path) -> None:
        self.library = library
        super().__init__(place, run)

    def start(self, number: int, **more: str) -> subprocess.Popen:
        longer = [
            "unshare",
            "--time",
            "--monotonic",
            str(2 * HOUR),
            "--boottime",
            str(2 * HOUR),
            "--fork",
            "--kill-child",
        ]
        skew = {"LD_PRELOAD": str(self.library), "CLOCK_SKEW": str(HOUR)} if number else {}
        return super().start(number, behind=longer if number else [], **skew, **more)


def test_nodes_whose_clocks_differ_by_hours_train_and_heal_as_one(tmp_path: Path, text: Path, library: Path) -> None:
    """Row 27, on two nodes: neither the time of day nor the time since a machine began means anything on another
    one."""
    if subprocess.run(["unshare", "--time", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this needs the right to make time namespaces")
    place = furnished(tmp_path, text, NODES)
    for run in ("whole", "hurt"):
        nodes = Nodes(place, run) if run == "whole" else Skewed(place, run, library)
        for step, node in ((10, 1), (25, 0), (40, 1)) if run == "hurt" else ():
            nodes.wait_for(step)
            nodes.ranks(node)[-1].kill()
        code, err, other = nodes.end()
        assert (code, other) == (0, 0), err
    found = events(place / "runs" / "hurt")
    assert [event.kind for event in found] == ["fault", "recovery"] * 3 and not any(event.lost for event in found)
    assert (
        losses_of(place, "hurt") == losses_of(place, "whole")
        and weights(place, "hurt", 60) == weights(place, "whole", 60) != {}
    )


# --- row 32
# -------------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, list[Any]] = {
    "model.sizes.layers": [1, 3],
    "model.sizes.ffn": [96, 128],
    "model.sizes.vocab": [260, 300],
    "workload.sequence": [16, 64],
    "workload.batch": [4, 16],
    "workload.steps": [30, 39],
    "workload.seed": [2, 77],
    "workload.precision": ["bf16", "fp32"],
    "workload.optimizer.lr": [3e-3, 2e-2],
    "workload.optimizer.warmup": [4, 6],
    "workload.optimizer.schedule": ["constant"],
    "workload.optimizer.weight_decay": [0.0, 0.2],
    "data.held_out": [0.05, 0.2],
    "data.documents": ["apart"],
    "data.source": ["other.txt"],
}
"""What decides the data and their order, the vocabulary, the model, or how it learns."""

ALLOWED: dict[str, list[Any]] = {
    "plan": ["dp1.mb1", "tp2.mb1", "dp2.z3.mb1", "dp2.mb2"],
    "ranks": ["dp4.z1.mb1", "dp2.tp2.mb1"],
    "run.checkpoint_every": [3, 10],
    "run.evaluate_every": [0, 10],
    "run.keep": [1, 5],
    "run.hang_timeout": [3.0, 5.0],
}
"""What changes nothing beyond the order of sums."""


def drift(name: str, value: Any) -> list[str]:
    if name == "plan":
        return ["--plan", value, *(["--cluster", "local:1"] if value == "dp1.mb1" else [])]
    return ["--plan", value, "--cluster", "local:4"] if name == "ranks" else ["--set", f"{name}={value}"]


def test_twenty_drifts_of_a_job_are_refused_with_the_difference_or_go_on_with_a_line(
    tmp_path: Path, text: Path
) -> None:
    """Row 32: of a run that was stopped in the middle; where the plan is another one the losses are the same but for
    the order of sums."""
    place, chance, passed, later = (
        furnished(tmp_path, text, JOB.replace("fp32", "fp64")),
        random.Random(32),
        0,
        set[str](),
    )
    shutil.copy(text, place / "other.txt")
    code, _, err = launched(place, "whole")
    assert code == 0, err
    process = start(place, "begun")
    wait_for_step(place, "begun", 14, process)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=900) and process.returncode == 75
    last = max(losses_of(place, "begun"))
    assert 14 <= last < 40
    names = [*chance.sample(sorted(REFUSED), FAULTS - len(ALLOWED)), *ALLOWED]
    for number, name in enumerate(names):
        value, run = chance.choice({**REFUSED, **ALLOWED}[name]), f"drift-{number}"
        shutil.copytree(place / "runs" / "begun", place / "runs" / run)
        code, _, err = launched(place, run, *drift(name, value))
        if name in REFUSED:
            words = (
                rf"meshwright: run 'runs/{run}' belongs to another job: {re.escape(name)} is \S+ there and \S+ here; "
                r"choose another --run, or repeat its options\n"
            )
            right = (
                code == 2
                and re.fullmatch(words, err) is not None
                and losses_of(place, run) == losses_of(place, "begun")
            )
        else:
            expected, ours = losses_of(place, "whole"), losses_of(place, run)
            right = code == 0 and f"goes on from the checkpoint of step {last}" in err
            right = right and (
                name.startswith("run.")
                or (
                    f"plan {value}, as requested" in err
                    and "instead of plan dp2.z1.mb2, which the run used so far" in err
                )
            )
            right = right and all(abs(ours[step] - loss) <= 1e-6 * loss for step, loss in expected.items())
            if name.startswith("run."):
                right = right and weights(place, run, 40) == weights(place, "whole", 40) != {}
        passed += right
        if not right:
            later.add(f"{name}={value}: {err[-400:]}")
    print("\n".join(later))
    settle("32 another job in the folder", "dp2.z1", passed, place / "runs" / "whole")


def test_a_text_that_has_changed_under_its_name_is_refused(tmp_path: Path, text: Path) -> None:
    """Row 32: nothing that was written on the command line says so."""
    place = furnished(tmp_path, text, JOB)
    process = start(place, "begun")
    wait_for_step(place, "begun", 10, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=900)
    file = place / "text.txt"
    file.write_text(file.read_text().replace("return x", "return y", 1))
    code, _, err = launched(place, "begun")
    assert code == 2 and "was trained on other data" in err, err
