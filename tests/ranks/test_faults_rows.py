"""Faults of every kind, injected for real: what breaks, who is named, what it costs. FAULTS.md says which test stands
for which row of the table."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_runs import SIZES, STEPS, events, launch, losses, random_faults, state, train

import meshwright
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.core.errors import InputError, Interrupted, MeshwrightError
from meshwright.data.token_arrays import DIGEST_BLOCK_TOKENS
from meshwright.elastic.failure import RankFailed
from meshwright.elastic.local_agent import LocalAgent
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.model_parser import read_model
from meshwright.report.run import read_run, summarize_run
from meshwright.spec.job import Job


@pytest.fixture(scope="module")
def undisturbed(agent: LocalAgent, tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run of dp2x2.z2."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(agent, launch(text, folder, "dp2x2.z2.mb2"), [])
    return folder


@pytest.fixture(scope="module")
def whole(undisturbed: Path) -> dict[str, bytes]:
    return state(undisturbed)


def places(ranks: list[int], steps: list[int], phases: list[str], how: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "step": step, "phase": phase, "how": how, **more}
        for rank, step, phase in zip(ranks, steps, phases, strict=True)
    ]


@pytest.mark.soak
def test_both_ranks_of_a_shard_group_killed_at_once_three_times_lose_nothing(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """Rows 6 and 29, on one machine: whoever holds a copy of the other half is not among the dead, and need not be."""
    faults = [
        {"rank": rank, "step": step, "phase": phase, "how": "SIGKILL"}
        for pair, step, phase in (((0, 1), 4, "backward"), ((2, 3), 8, "update"), ((1, 3), 12, "reduce"))
        for rank in pair
    ]
    train(agent, launch(text, tmp_path / "run", "dp2x2.z2.mb2"), faults)
    assert not any(event.lost for event in events(tmp_path / "run"))
    assert state(tmp_path / "run") == whole != {}


@pytest.mark.soak
def test_a_rank_killed_during_a_recovery_only_makes_it_longer(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """Row 29: in build, in restore, and in the first step behind."""
    faults = places([1], [6], ["backward"], "SIGKILL")
    faults += places([0, 2], [0, 0], ["build", "restore"], "SIGKILL", times=2) + places(
        [3], [6], ["update"], "SIGKILL", times=2
    )
    train(agent, launch(text, tmp_path / "run", "dp2x2.z2.mb2"), faults)
    found = events(tmp_path / "run")
    assert [event.kind for event in found].count("fault") >= 3 and not any(event.lost for event in found)
    assert state(tmp_path / "run") == whole != {}


@pytest.mark.soak
def test_the_store_of_addresses_that_is_killed_is_started_anew(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """Row 26: nobody could join any more; the process that starts ranks is replaced, and no rank is special."""
    faults = random_faults(1, 4, ["store"], seed=1)
    train(agent, launch(text, tmp_path / "run", "dp2x2.z2.mb2"), faults)
    found = events(tmp_path / "run")
    assert [event.kind for event in found] == ["fault", "recovery"] * len(faults) and not any(
        event.lost for event in found
    )
    assert state(tmp_path / "run") == whole != {}


@pytest.mark.soak
def test_an_oom_rank_is_named_with_the_reason_and_the_run_goes_on(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """Row 23, as torch says it."""
    train(agent, launch(text, tmp_path / "run", "dp2x2.z2.mb2"), places([3], [5], ["update"], "memory"))
    fault, recovery = events(tmp_path / "run")
    assert fault.rank == 3 and recovery.lost == 0
    assert fault.cause.startswith(
        "OutOfMemory: rank 3 is out of memory in step 5: it requested 512.0 GiB in addition to parameters "
    )
    assert state(tmp_path / "run") == whole != {}


def test_a_lasting_oom_ends_the_run_with_the_reason(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    """Row 23, for a job without another plan that needs less memory."""
    with pytest.raises(MeshwrightError, match=r"rank 0 is out of memory in step 5: .*; something else than dp1$"):
        train(agent, launch(text, tmp_path / "again", "dp1"), places([0], [5], ["update"], "memory", always=True))


@pytest.mark.parametrize(
    ("plan", "world", "recompute"),
    [("dp2.z2.mb2", 2, "full"), pytest.param("dp2x2.z2.mb2", 4, "sac", marks=pytest.mark.soak)],
)
def test_want_of_memory_that_lasts_changes_the_plan_to_one_that_takes_less(
    agent: LocalAgent, tmp_path: Path, text: Path, undisturbed: Path, plan: str, world: int, recompute: str
) -> None:
    """Row 23, where starting again does not help: where nothing recomputes, step 5 finds no memory."""
    work = launch(text, tmp_path / "run", plan)
    question = Job(
        model=read_model("llama-tiny", **SIZES), cluster=read_cluster(f"{world}:cpu"), workload=work.workload
    )
    notes: list[str] = []
    faults = places([world - 1], [5], ["update"], "memory", always=True, spares=recompute)
    train(agent, work, faults, notes, leaner=question)
    first, second, changed, recovery = events(tmp_path / "run")
    assert (first.decision, second.decision) == (
        "ranks start again",
        "out of memory in the same step again: goes on with a plan that takes less memory",
    )
    assert (
        (changed.kind, changed.cause) == ("resize", "less memory")
        and changed.plan.endswith(f".rc-{recompute}")
        and recovery.lost == 0
    )
    assert any(note.startswith("goes on under a plan that takes less memory, plan ") for note in notes)
    found = losses(tmp_path / "run")
    assert sorted(found) == list(range(STEPS + 1))
    assert all(abs(found[step] - loss) <= 1e-6 * loss for step, loss in losses(undisturbed).items())


def test_ranks_that_are_not_in_the_same_collective_end_the_run_with_both_sizes(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Row 5."""
    words = r"rank (\d) and rank (?!\1)\d are not in the same collective: .* 3 elements of float32"
    with pytest.raises(MeshwrightError, match=words):
        train(agent, launch(text, tmp_path / "run", "dp2.z1"), places([1], [4], ["agree"], "mismatch"))
    assert max(losses(tmp_path / "run")) == 3


def test_a_failing_disk_or_a_killed_writer_costs_only_checkpoints(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """Rows 13, 14 and 15: seven checkpoints cannot be written, one is slow, and what stands under a checkpoint's name
    is whole."""
    hows = {2: "full", 4: "broken", 6: "killed", 8: "full", 10: "broken", 12: "killed", 14: "slow"}
    notes: list[str] = []
    work = launch(text, tmp_path / "run", "dp2x2.z2.mb2", checkpoint_every=2, keep=9)
    train(agent, work, [], notes, hear=hearing(notes), disk={str(step): how for step, how in hows.items()})
    folder = tmp_path / "run" / "checkpoints"
    found = sorted(path.name for path in folder.glob("step-*"))
    assert found == ["step-00000014", "step-00000016"] and all(verify_checkpoint(folder / name) == [] for name in found)
    said = "\n".join(notes)
    for step, how in hows.items():
        assert (f"no checkpoint at step {step}: " in said) == (how != "slow")
    assert (
        said.count("the process that writes it ended with status -9") == 2
        and "File too large" in said
        and "Input/output error" in said
    )
    assert [(event.kind, event.step) for event in events(tmp_path / "run")] == [
        ("unsaved", step) for step in (2, 4, 6, 8, 10, 12)
    ]
    assert "6 saves in a row have failed, and no checkpoint since the start of this command is on disk" in said
    assert state(tmp_path / "run") == whole != {}


def hearing(notes: list[str]) -> Callable[[int, dict[str, Any]], None]:
    return lambda rank, message: notes.append(message["line"]) if message["kind"] == "note" else None


@pytest.mark.soak
def test_a_run_asked_to_stop_three_times_ends_in_the_same_bits(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """Row 24: each time the step ends, everything is saved, and the same command goes on."""
    work = launch(text, tmp_path / "run", "dp2x2.z2.mb2")
    for step in (3, 7, 12):
        with pytest.raises(Interrupted, match="stopped by SIGTERM: everything is saved"):
            train(agent, work, [], asks={step: 0})
        assert step <= max(losses(tmp_path / "run")) < STEPS
    train(agent, work, [])
    assert state(tmp_path / "run") == whole != {}


def test_a_fault_after_a_stop_request_makes_the_run_save_a_step_later(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """Rows 1 and 24: the ranks that start again hear of the request too."""
    work = launch(text, tmp_path / "run", "dp2x2.z2.mb2")
    with pytest.raises(Interrupted, match="stopped by SIGTERM: everything is saved"):
        train(agent, work, places([2], [6], ["backward"], "SIGKILL"), asks={5: 0})
    assert max(losses(tmp_path / "run")) < STEPS and [event.kind for event in events(tmp_path / "run")] == [
        "fault",
        "recovery",
    ]
    train(agent, work, [])
    assert state(tmp_path / "run") == whole != {}


def test_failures_without_a_step_between_them_are_tried_so_often_and_no_more(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Row 28: with longer and longer pauses; and a rank that fails before anything has begun is not tried again at
    all."""
    with pytest.raises(RankFailed, match="gave up after 4 failures without a step between them"):
        train(
            agent,
            launch(text, tmp_path / "run", "dp2", retries=3),
            places([1], [3], ["backward"], "SIGKILL", always=True),
        )
    assert [event.kind for event in events(tmp_path / "run")] == ["fault"] * 3 + ["verdict"]
    with pytest.raises(RankFailed, match="rank 0 of 2"):
        train(agent, launch(text, tmp_path / "early", "dp2"), places([0], [0], ["build"], "SIGKILL", always=True))
    assert not (tmp_path / "early" / "events.jsonl").exists()


@pytest.mark.parametrize("loss", ["removed", "moved", "emptied"])
@pytest.mark.covering(1)
def test_a_run_that_had_saved_does_not_begin_anew_in_silence(
    agent: LocalAgent, tmp_path: Path, text: Path, loss: str
) -> None:
    """Row 30."""
    work = launch(text, tmp_path / "run", "dp1", steps=4, checkpoint_every=2)
    train(agent, work, [])
    checkpoints = tmp_path / "run" / "checkpoints"
    if loss == "removed":
        shutil.rmtree(checkpoints)
    elif loss == "moved":
        checkpoints.rename(tmp_path / "elsewhere")
    else:
        for path in checkpoints.glob("step-*"):
            shutil.rmtree(path)
    with pytest.raises(
        InputError, match=r"has reported 4 steps but no longer has a checkpoint: .* --set run\.restart=true"
    ):
        train(agent, work, [])
    train(agent, work.but(run=work.run.but(restart=True)), [])
    assert (checkpoints / "step-00000004").is_dir()


@pytest.mark.parametrize(
    ("how", "phases"),
    [
        pytest.param("livelock", ["update"], id="one"),
        pytest.param("livelock", ["update", "data", "backward"], id="livelock", marks=pytest.mark.soak),
        pytest.param("SIGSTOP", ["backward", "reduce", "data"], id="SIGSTOP", marks=pytest.mark.soak),
    ],
)
def test_ranks_that_hang_are_named_and_nothing_is_lost(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes], how: str, phases: list[str]
) -> None:
    """Rows 3 and 4. The first is at step 7: before the fourth step there is no measure of one. They hang for good;
    patience is for a machine that stands still."""
    ranks, steps = [1, 3, 2][: len(phases)], [7, 10, 13][: len(phases)]
    faults = places(ranks, steps, phases, how)
    train(agent, launch(text, tmp_path / "run", "dp2x2.z2.mb2", hang_timeout=6.0), faults)
    found = events(tmp_path / "run")
    expected = list(zip(ranks, steps, strict=True))
    assert [(event.rank, event.step) for event in found if event.kind == "fault"] == expected
    assert not any(event.lost for event in found) and state(tmp_path / "run") == whole != {}


def test_every_row_of_the_table_names_tests_that_are_there() -> None:
    """FAULTS.md is the list: row, fault, tests; or why there is none."""
    here = Path(__file__).parent
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (here / "FAULTS.md").read_text().splitlines()
        if line[:3].strip("| ").isdigit()
    ]
    assert [int(number) for number, _, _ in rows] == list(range(1, 53))
    for number, _, tests in rows:
        named = tests.split("`")[1::2]
        assert named or tests.startswith("none: "), f"row {number} names no test"
        for file, name in (part.split("::") for part in named):
            assert f"def {name}(" in (here.parent / file).read_text(), f"row {number}: {file} has no {name}"


def test_only_the_event_log_asks_for_the_time_of_day() -> None:
    """Row 27: a clock that is wrong, or jumps, changes nothing but what the log says of when."""
    source = Path(meshwright.__file__).parent
    asking = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"\.\s*(time|now|utcnow|time_ns)\b", words := path.read_text())
        for node in ast.walk(ast.parse(words))
        if isinstance(node, ast.Attribute)
        and node.attr in ("time", "now", "utcnow", "time_ns")
        and ast.unparse(node.value) in ("time", "datetime")
    }
    # plan: the days that are left until a date; a stored answer says on which day it was computed
    assert asking == {"elastic/event_log.py", "cli/plan.py", "cli/answer_cache.py"}


@pytest.mark.soak
def test_a_corrupt_token_block_is_skipped_by_every_plan_and_recorded(agent: LocalAgent, tmp_path: Path) -> None:
    """Row 22: bits flip in a file that was read before; its size and its time say nothing of it."""
    file = tmp_path / "tokens.bin"
    tokens = np.random.default_rng(3).integers(0, 258, 6 * DIGEST_BLOCK_TOKENS).astype(np.uint16)
    tokens.tofile(file)
    seen = file.stat()
    runs = {}
    for name, plan in (("whole", "dp2.z1"), ("hurt", "dp2.z1"), ("other", "tp2.mb2")):
        work = launch(file, tmp_path / name, plan)
        runs[name] = work.but(data=work.data.but(tokenizer="auto"))
    train(agent, runs["whole"], [])
    tokens[3 * DIGEST_BLOCK_TOKENS : 4 * DIGEST_BLOCK_TOKENS : 999] ^= 1
    tokens.tofile(file)
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    train(agent, runs["hurt"], [])
    train(agent, runs["other"], [])
    found = events(tmp_path / "hurt")
    words = f"data {file}: tokens {3 * DIGEST_BLOCK_TOKENS} to {4 * DIGEST_BLOCK_TOKENS - 1} are damaged"
    assert found and all(event.kind == "bad_data" and event.cause.startswith(words) for event in found)
    assert losses(tmp_path / "hurt") != losses(tmp_path / "whole")
    other = losses(tmp_path / "other")
    assert all(abs(loss - other[step]) < 1e-5 * loss for step, loss in losses(tmp_path / "hurt").items())
    for name in runs:
        ledger = summarize_run(read_run(tmp_path / name)).ledger
        assert ledger is not None and ledger.problems == ()
