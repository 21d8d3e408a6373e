"""Twenty faults of the rows that depend on no kind of plan, where chance says, each row under one plan: what it
promises holds for each of them. What is measured stands in bench/results/faults.md."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from fault_runs import events, launch, losses, random_faults, state, train
from test_faults_soak import FAULTS, LONG, is_named, measured, write
from test_train_run import JOB, furnished, start, wait_for_step, weights
from test_train_run import losses as losses_of
from test_train_run import train as launched
from test_train_supervisor import gone

from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.core.errors import InputError, Interrupted, MeshwrightError
from meshwright.data.token_arrays import DIGEST_BLOCK_TOKENS
from meshwright.elastic.failure import RankFailed
from meshwright.elastic.local_agent import LocalAgent
from meshwright.report.run import read_run, summarize_run
from meshwright.train.run_lock import is_locked

pytestmark = pytest.mark.soak

PLAN, COPIES = "dp2x2.z2.mb2", "dp4.mb2"


@pytest.fixture(scope="module")
def whole(agent: LocalAgent, tmp_path_factory: pytest.TempPathFactory, text: Path) -> Callable[..., Path]:
    """Runs that nothing happens to, by their plan and steps."""

    @cache
    def run(plan: str, steps: int = LONG) -> Path:
        folder = tmp_path_factory.mktemp(plan)
        train(agent, launch(text, folder, plan, steps), [])
        return folder

    return run


def same(folder: Path, whole: Path, steps: int = LONG) -> bool:
    return state(folder, steps) == state(whole, steps) != {} and losses(folder) == losses(whole)


def settle(
    kind: str, plan: str, passed: int, folder: Path, equal: bool | None = None, costs: int = 0, **more: Any
) -> None:
    """Writes the row down. `equal`: whether the end is that of a run without faults; None: there is no such end.
    `costs`: steps that were run again where a row may lose some. One of the twenty may fall into the recovery of
    another."""
    step = median([record.seconds for record in read_run(folder).steps if record.seconds] or [0.0])
    nothing = {"in_time": "", "silence": 0.0, "recovery": 0.0, "largest": 0.0, "step": step, "load": os.getloadavg()[0]}
    found = {
        "injected": FAULTS,
        "passed": passed,
        "lost": 0,
        "state": "" if equal is None else "equal" if equal else "DIFFERENT",
    }
    row = {"fault": kind, "plan": plan, **nothing, **found, "lost": costs, **more}
    right = equal is not False and passed >= FAULTS - 1 and row["lost"] <= costs
    write(row, right)
    assert right, f"{passed} of {FAULTS} passed, final state {row['state']}, {row['lost']} steps lost"


def groups(seed: int) -> list[dict[str, Any]]:
    """Both ranks of one shard group of PLAN at once."""
    chance = random.Random(seed)
    pairs = [(step, chance.choice([(0, 1), (2, 3)])) for step in sorted(chance.sample(range(2, LONG), FAULTS))]
    return [
        {"rank": rank, "step": step, "phase": "backward", "how": "SIGKILL"} for step, pair in pairs for rank in pair
    ]


@pytest.mark.parametrize("kind", ["6 a group of ranks killed", "23 no memory left", "26 the store killed"])
def test_twenty_from_which_the_run_recovers(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: Callable[..., Path], kind: str
) -> None:
    """A store is killed where the one before is long replaced; it is nobody's."""
    row, folder = int(kind.split()[0]), tmp_path / "hurt"
    how, apart = {6: ("", 1), 23: ("memory", 1), 26: ("store", 4)}[row]
    faults = groups(row) if row == 6 else random_faults(FAULTS, 4, [how], row, LONG, apart)
    train(agent, launch(text, folder, PLAN, LONG), faults)
    broken, healed = ([event for event in events(folder) if event.kind == which] for which in ("fault", "recovery"))
    named = sum(
        any(is_named(fault, broken) for fault in faults if fault["step"] == step)
        for step in {fault["step"] for fault in faults}
    )
    assert row != 23 or all(event.cause.startswith("OutOfMemory") for event in broken)
    lost = sum(event.lost for event in healed)
    settle(
        kind,
        PLAN,
        len(broken) if row == 26 else named,
        folder,
        same(folder, whole(PLAN)),
        **{**measured(row, folder), "lost": lost},
    )


def test_twenty_ranks_in_unlike_collectives_are_named(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    """Row 5: each ends a run of its own, in the step that it happens in."""
    chance, passed = random.Random(5), 0
    words = r"rank (\d) and rank (?!\1)\d are not in the same collective: .* 3 elements of float32"
    for number in range(FAULTS):
        fault = {"rank": chance.randrange(4), "step": chance.randrange(2, 8), "phase": "agree", "how": "mismatch"}
        with pytest.raises(MeshwrightError, match=words):
            train(agent, launch(text, tmp_path / str(number), PLAN, 8), [fault])
        passed += max(losses(tmp_path / str(number))) == fault["step"] - 1
    settle("5 unlike collectives", PLAN, passed, tmp_path / "0")


EVERY = 9
"""Steps from a loss to the next: three in which a rank fails, some with the others, some until it is back."""


def test_twenty_ranks_lost_for_good_and_come_back_cost_no_step(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    """Rows 7 and 8: a rank that fails three times running is left out; some steps later there are to be four again."""
    chance, folder, steps = random.Random(7), tmp_path / "hurt", EVERY * FAULTS + EVERY
    plans, more = {4: "dp4.z2.mb3", 3: "dp3.z2.mb4"}, {"batch": 12, "precision": "fp64"}
    whole, hurt = (
        launch(text, tmp_path / "whole", plans[4], steps, more),
        launch(text, folder, plans[4], steps, more, min_ranks=2),
    )
    faults, back = [], set()
    for first in range(3, 3 + EVERY * FAULTS, EVERY):
        rank, phase = chance.randrange(4), chance.choice(["backward", "reduce", "update"])
        faults += [{"rank": rank, "step": first + at, "phase": phase, "how": "SIGKILL"} for at in range(3)]
        back.add(first + 4)

    def hear(rank: int, message: dict[str, Any]) -> None:
        if rank == 0 and message["kind"] == "record" and message["record"]["step"] in back:
            (folder / "ranks").write_text("4")

    train(agent, whole, [])
    train(agent, hurt, faults, plans=plans, hear=hear)
    found, expected, ours = events(folder), losses(tmp_path / "whole"), losses(folder)
    ledger = summarize_run(read_run(folder)).ledger
    assert ledger is not None and ledger.problems == ()
    assert sorted(ours) == list(range(steps + 1)) and all(
        abs(loss - expected[step]) <= 1e-9 * abs(loss) for step, loss in ours.items()
    )
    changes, lost = [event.cause for event in found if event.kind == "resize"], sum(event.lost for event in found)
    for kind, change in (("7 lost for good", "4 to 3 ranks"), ("8 come back", "3 to 4 ranks")):
        settle(kind, plans[4], changes.count(change), folder, **{**measured(7, folder), "lost": lost})


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("13 a full disk", "full"),
        ("14 a failing disk", "broken"),
        ("14 a slow disk", "slow"),
        ("15 the writer killed", "killed"),
    ],
)
def test_twenty_saves_that_fail_cost_checkpoints_and_nothing_else(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: Callable[..., Path], kind: str, how: str
) -> None:
    """What stands under a checkpoint's name is whole, and who asked for one that is not there is told."""
    folder, notes, every = tmp_path / "hurt", list[str](), 3
    hows = {str(step): how for step in range(every, every * FAULTS + 1, every)}
    hear = lambda rank, message: notes.append(message["line"]) if message["kind"] == "note" else None
    train(agent, launch(text, folder, PLAN, LONG, checkpoint_every=every, keep=99), [], notes, hear=hear, disk=hows)
    there = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert all(verify_checkpoint(folder / "checkpoints" / name) == [] for name in there)
    unsaved = [event.kind for event in events(folder)]
    assert unsaved == ["unsaved"] * (0 if how == "slow" else FAULTS)
    said = sum(note.startswith("no checkpoint") for note in notes)
    passed = sum((f"step-{int(step):08d}" in there) == (how == "slow") for step in hows)
    settle(kind, PLAN, min(passed, said) if how != "slow" else passed, folder, same(folder, whole(PLAN)))


def test_twenty_bits_that_flip_in_states_are_voted_out(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: Callable[..., Path]
) -> None:
    """Row 18: in a weight of one of four copies, before each comparison."""
    chance, folder, every = random.Random(18), tmp_path / "hurt", LONG // FAULTS
    faults = [
        {"rank": chance.randrange(4), "step": step, "phase": "compare", "how": "flip"}
        for step in range(every, LONG + 1, every)
    ]
    train(agent, launch(text, folder, COPIES, LONG, replica_check_every=every), faults)
    found = [(event.rank, event.step) for event in events(folder) if event.kind == "divergence"]
    passed = sum((fault["rank"], fault["step"]) in found for fault in faults)
    settle("18 a bit flips in the states", COPIES, passed, folder, same(folder, whole(COPIES)))


def gradients(seed: int, **more: Any) -> list[dict[str, Any]]:
    chance, found = random.Random(seed), random_faults(FAULTS, 4, [""], seed, LONG, 3)
    return [{**fault, "phase": "gradient", "bit": chance.randrange(16, 32), "how": "flip", **more} for fault in found]


def test_twenty_bits_that_flip_in_gradients_are_found_where_they_are_computed_twice(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: Callable[..., Path]
) -> None:
    """Row 19: the upper sixteen; of the lower ones the sum over ranks rounds some away."""
    folder, faults = tmp_path / "hurt", gradients(19)
    train(agent, launch(text, folder, PLAN, LONG, sdc_check_every=1), faults)
    found = {event.step for event in events(folder) if event.kind == "divergence"}
    passed = sum(fault["step"] in found for fault in faults)
    settle("19 a bit flips in a gradient", PLAN, passed, folder, same(folder, whole(PLAN)))


def test_twenty_gradients_that_stay_not_finite_are_skipped_by_all_alike(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Row 20: the end is the same whichever rank had them."""
    faults = gradients(20, how="nan", always=True)
    for name, shift in (("hurt", 0), ("other", 1)):
        train(
            agent,
            launch(text, tmp_path / name, PLAN, LONG),
            [{**fault, "rank": (fault["rank"] + shift) % 4} for fault in faults],
        )
    skipped = {record.step for record in read_run(tmp_path / "hurt").steps if record.skipped}
    passed = sum(fault["step"] in skipped for fault in faults) if len(skipped) == FAULTS else 0
    settle("20 a gradient is not finite", PLAN, passed, tmp_path / "hurt", same(tmp_path / "hurt", tmp_path / "other"))


def test_twenty_rises_of_the_loss_are_gone_back_from(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    """Row 21: three batches of noise each; the end is that of a run that never saw them."""
    chance, poison, at = random.Random(21), list[int](), 40
    for _ in range(FAULTS):
        poison += range(at, at + 3)
        at += chance.randrange(12, 20)
    steps, left_out = at - 4 * FAULTS, [[first - 1, first + 3] for first in poison[::3]]
    hurt, clean = (
        launch(text, tmp_path / name, "dp2.z1", steps, checkpoint_every=8, keep=99) for name in ("hurt", "clean")
    )
    train(agent, hurt, [], poison=poison)
    train(agent, clean, [], left_out=left_out)
    found = [list(event.batches) for event in events(tmp_path / "hurt") if event.kind == "spike"]
    passed = sum(each in found for each in left_out)
    settle(
        "21 the loss rises and stays",
        "dp2.z1",
        passed,
        tmp_path / "hurt",
        same(tmp_path / "hurt", tmp_path / "clean", steps),
    )


def test_twenty_damaged_blocks_of_data_are_left_out_alike(agent: LocalAgent, tmp_path: Path) -> None:
    """Row 22: bits flip in a file that was read before; under another plan the same rows stand in for them."""
    file, blocks = tmp_path / "tokens.bin", 2 * FAULTS
    tokens = np.random.default_rng(22).integers(0, 258, blocks * DIGEST_BLOCK_TOKENS).astype(np.uint16)
    tokens.tofile(file)
    seen, hurt = file.stat(), random.Random(22).sample(range(int(0.8 * blocks)), FAULTS)  # the last ones are held out
    runs = {}
    for name, plan in (("whole", PLAN), ("hurt", PLAN), ("other", "tp2.mb2")):
        work = launch(file, tmp_path / name, plan, LONG, {"precision": "fp64"})
        runs[name] = work.but(data=work.data.but(tokenizer="auto"))
    train(agent, runs["whole"], [])
    for block in hurt:
        tokens[block * DIGEST_BLOCK_TOKENS + 7] ^= 1
    tokens.tofile(file)
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    train(agent, runs["hurt"], [])
    train(agent, runs["other"], [])
    other = losses(tmp_path / "other")
    assert all(abs(loss - other[step]) < 1e-9 * loss for step, loss in losses(tmp_path / "hurt").items())
    assert losses(tmp_path / "hurt") != losses(tmp_path / "whole")
    ledger = summarize_run(read_run(tmp_path / "hurt")).ledger
    assert ledger is not None and ledger.problems == ()
    causes = "\n".join(event.cause for event in events(tmp_path / "hurt") if event.kind == "bad_data")
    settle(
        "22 damaged data",
        PLAN,
        sum(f"tokens {block * DIGEST_BLOCK_TOKENS} to " in causes for block in hurt),
        tmp_path / "hurt",
    )


def test_twenty_requests_to_stop_end_in_the_same_bits(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: Callable[..., Path]
) -> None:
    """Row 24: each time the step ends, everything is saved, and the same command goes on."""
    chance, folder, passed = random.Random(24), tmp_path / "hurt", 0
    work = launch(text, folder, PLAN, 3 * LONG)
    for _ in range(FAULTS):
        left = [chance.randrange(1, 5)]

        def hear(rank: int, message: dict[str, Any], left: list[int] = left) -> None:
            left[0] -= rank == 0 and message["kind"] == "record"
            if not left[0]:
                left[0] = -1
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Interrupted, match="stopped by SIGTERM: everything is saved"):
            train(agent, work, [], hear=hear)
        passed += 1
    train(agent, work, [])
    settle("24 asked to stop", PLAN, passed, folder, same(folder, whole(PLAN, 3 * LONG), 3 * LONG))


def test_twenty_killed_supervisors_leave_nothing_behind_and_a_resumable_run(tmp_path: Path, text: Path) -> None:
    """Rows 25 and 31: while a run lasts a second launch of it is refused; when all of it is killed no process is left,
    and the next launch goes on."""
    steps, refused, killed, last = 60 * (FAULTS + 1), 0, 0, 0
    job = JOB.replace("steps: 40", f"steps: {steps}").replace("checkpoint_every: 4", "checkpoint_every: 20")
    place, chance = furnished(tmp_path, text, job), random.Random(25)
    code, _, err = launched(place, "whole")
    assert code == 0, err
    for _ in range(FAULTS):
        process = start(place, "hurt")
        while process.poll() is None and not is_locked(place / "runs" / "hurt"):
            time.sleep(0.01)
        code, _, err = launched(place, "hurt")
        refused += code == 2 and f"is being trained by process {process.pid} on" in err
        wait_for_step(place, "hurt", last + chance.randrange(25, 45), process)
        lived = process.poll() is None
        process.kill()
        process.communicate()
        killed += lived and gone(place)
        last = max(losses_of(place, "hurt"))
    code, _, err = launched(place, "hurt")
    assert code == 0, err
    folder = place / "runs" / "hurt"
    equal = (
        losses_of(place, "hurt") == losses_of(place, "whole")
        and weights(place, "hurt", steps) == weights(place, "whole", steps) != {}
    )
    settle("25 the supervisor killed", "dp2.z1", killed, folder, equal)
    settle("31 started twice", "dp2.z1", refused, folder, equal)


def test_twenty_ranks_that_fail_again_and_again_end_the_run_with_a_verdict(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Row 28: after as many tries as were allowed."""
    chance, passed = random.Random(28), 0
    for number in range(FAULTS):
        place = {
            "rank": chance.randrange(2),
            "step": chance.randrange(2, 8),
            "phase": chance.choice(["data", "backward", "update"]),
        }
        work = launch(text, tmp_path / str(number), "dp2", 8, retries=2)
        with pytest.raises(RankFailed, match="gave up after 3 failures without a step between them"):
            train(agent, work, [{**place, "how": "SIGKILL", "always": True}])
        passed += [event.kind for event in events(tmp_path / str(number))] == ["fault", "fault", "verdict"]
    settle("28 failures without end", "dp2", passed, tmp_path / "0")


def test_twenty_runs_that_lost_their_checkpoints_do_not_begin_anew_in_silence(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Row 30."""
    chance, passed = random.Random(30), 0
    whole = launch(text, tmp_path / "whole", "dp1", steps=6, checkpoint_every=2)
    train(agent, whole, [])
    for number in range(FAULTS):
        folder, last = tmp_path / str(number), chance.randrange(2, 7)
        shutil.copytree(tmp_path / "whole", folder)
        lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
        (folder / "records.jsonl").write_text("".join(lines[: last + 1]))
        if chance.random() < 0.5:
            shutil.rmtree(folder / "checkpoints")
        else:
            for path in (folder / "checkpoints").iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(InputError, match=rf"has reported {last} steps but no longer has a checkpoint"):
            train(agent, whole.but(run=whole.run.but(folder=str(folder))), [])
        passed += 1
    settle("30 a fresh start in silence", "dp1", passed, tmp_path / "whole")
