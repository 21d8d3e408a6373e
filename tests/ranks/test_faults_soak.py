"""Twenty faults of each kind under each kind of plan, where chance says: nothing is lost and no bit differs. What is
measured stands in bench/results/faults.md."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from fault_runs import USUAL, events, launch, losses, random_faults, state, train

from meshwright.core.errors import Interrupted
from meshwright.elastic.local_agent import LocalAgent
from meshwright.report.run import read_run, summarize_run
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import RunEvent

pytestmark = pytest.mark.soak

PLANS = ["dp4.mb2", "dp2.tp2.z1", "dp2x2.z2.mb2", "dp4.z3", "tp4.mb4", "pp2.mb4", "dp2.pp2.z2.mb2", "dp2.tp2.z3"]
KINDS = {
    "1 killed": ["SIGKILL"],
    "29 several killed at once": ["SIGKILL"],
    "2 crashed": ["SIGSEGV", "SIGABRT", "exit", "raise"],
    "4 hung": ["livelock", "lock"],
    "3 frozen": ["SIGSTOP"],
}
"""The most valuable rows first."""
FAULTS, LONG = 20, 80
QUIET = 6.0
"""Load of the machine, four ranks included, under which the times of a row are its own."""
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "faults.json"
HEAD = """# Faults in real runs

Each row is one run of 80 steps (450 of row 33) with 20 faults (200) where chance says (rank, step, phase, up to 10 ms \
later), on ranks of this machine, compared with the same run undisturbed. Passed: the culprit is
named, no step is run again, and losses, weights, optimizer and random states at the end are equal to the bit; of two \
that fall into one recovery one is named (19 of 20). In time: of what is frozen or hung, noticed within max(1 s, 5 \
steps) or max(2 s, 10 steps) of silence; of
the others, the next new step within 1 s. Seconds: silence before a hang was noticed, and from the decision to the end \
of the next new step; the machine has two cores, its load while the row was measured and the
median step are given in the table. Of rows that depend on no kind of plan, passed means what the tests of \
test_faults_soak_rows.py, _links.py, _slow.py and _silent.py say of each; of row 9 silence is how long the link was \
down and recovery the wait once it is back, in time within half a second and
a step; of rows 11 and 12 in time is told of within 20 steps. What has no meaning for a row is empty. A row measured \
at a load under 6 gives way only to another such. Written by `make soak` (tests/ranks/test_faults_soak.py and
those beside it).

| fault (row of the table) | plan | injected | passed | in time | steps lost | final state | silence, median | \
recovery, median | largest | step | load |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""

TIMES = {"silence": 2, "recovery": 2, "largest": 2, "step": 3}
"""Columns in seconds, with their digits."""


def several(world: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Two ranks, all but one, or all, in the same step."""
    chance = random.Random(seed)
    found = []
    for step in sorted(chance.sample(range(2, LONG), count)):
        ranks = chance.sample(range(world), chance.choice([2, world - 1, world]))
        found += [
            {"rank": rank, "step": step, "phase": chance.choice(["backward", "update"]), "how": "SIGKILL"}
            for rank in ranks
        ]
    return found


def is_named(fault: dict[str, Any], broken: Sequence[RunEvent]) -> bool:
    """Up to three steps on: a fault may come 10 ms late, and steps can take 4."""
    return any(fault["step"] <= event.step <= fault["step"] + 3 and event.rank == fault["rank"] for event in broken)


LIMITS = {3: (1.0, 5), 4: (2.0, 10)}
"""Seconds, or steps if those are more, in which what hangs is to be noticed."""


def measured(row: int, folder: Path) -> dict[str, Any]:
    """Of the recoveries in `folder`, whose row of the table says what is in time; a step is the median one of the same
    run, on the machine as it was."""
    found = events(folder)
    step = median(record.seconds for record in read_run(folder).steps if record.seconds)
    silence = [event.detection for event in found if event.kind == "fault"]
    seconds = [event.seconds for event in found if event.kind == "recovery"]
    least, steps = LIMITS.get(row, (1.0, 0))
    judged = silence if row in LIMITS else seconds
    in_time = sum(each <= max(least, steps * step) for each in judged)
    times = {"silence": median(silence), "recovery": median(seconds), "largest": max(seconds), "step": step}
    return {"in_time": f"{in_time} of {len(judged)}", "load": os.getloadavg()[0], **times}


def table() -> dict[tuple[str, str], dict[str, Any]]:
    """What was measured before."""
    return {
        (each["fault"], each["plan"]): each for each in (json.loads(RESULTS.read_text()) if RESULTS.exists() else [])
    }


def is_quiet(row: dict[str, Any] | None) -> bool:
    """Rows without a step are of an earlier version."""
    return row is not None and row["load"] < QUIET and row["step"] > 0


def lacking() -> list[tuple[str, str]]:
    """Every kind under every plan, those without a quiet row first: a run that is cut keeps the rows that it has, and
    the next one begins with others."""
    known = table()
    return sorted(((kind, plan) for kind in KINDS for plan in PLANS), key=lambda each: is_quiet(known.get(each)))


def write(row: dict[str, Any], right: bool = True) -> None:
    """Into the table, in place of what was measured before; a row that was measured on a quiet machine gives way to
    another one only, or to one that was not `right`."""
    rows = table()
    if right and is_quiet(rows.get((row["fault"], row["plan"]))) and not is_quiet(row):
        return
    rows[row["fault"], row["plan"]] = row
    ordered = sorted(rows.values(), key=lambda each: (int(each["fault"].split()[0]), each["plan"]))
    fresh = RESULTS.with_suffix(".new")
    fresh.write_text(json.dumps(ordered, indent=1) + "\n")
    fresh.replace(RESULTS)
    tabulate(ordered)


def tabulate(rows: Sequence[dict[str, Any]]) -> None:
    """What is 0 has no meaning for a row."""
    lines = []
    for each in rows:
        seconds = [f"{each[name]:.{digits}f}" if each[name] else "" for name, digits in TIMES.items()]
        cells = [
            *(each[name] for name in ("fault", "plan", "injected", "passed", "in_time", "lost", "state")),
            *seconds,
            f"{each['load']:.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    RESULTS.with_suffix(".md").write_text(HEAD + "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def undisturbed(agent: LocalAgent, tmp_path_factory: pytest.TempPathFactory, text: Path) -> Callable[[str], Path]:
    """The folder of a run under a plan that nothing happens to; each is run once."""

    @cache
    def run(plan: str) -> Path:
        folder = tmp_path_factory.mktemp(plan)
        train(agent, launch(text, folder, plan, LONG), [])
        return folder

    return run


@pytest.mark.parametrize(("kind", "plan"), lacking())
def test_twenty_faults_of_a_kind_under_a_kind_of_plan_lose_nothing(
    agent: LocalAgent, tmp_path: Path, text: Path, undisturbed: Callable[[str], Path], plan: str, kind: str
) -> None:
    world, row = parse_plan(plan).world, int(kind.split()[0])
    whole, hurt = undisturbed(plan), launch(text, tmp_path / "hurt", plan, LONG, hang_timeout=USUAL)
    seed = 100 * PLANS.index(plan) + row
    faults = several(world, FAULTS, seed) if row == 29 else random_faults(FAULTS, world, KINDS[kind], seed, LONG)
    train(agent, hurt, faults)
    found = events(tmp_path / "hurt")
    broken, healed = ([event for event in found if event.kind == kind] for kind in ("fault", "recovery"))
    steps = {fault["step"] for fault in faults}
    named = sum(any(is_named(fault, broken) for fault in faults if fault["step"] == step) for step in steps)
    lost = sum(event.lost for event in healed)
    same = state(tmp_path / "hurt", LONG) == state(whole, LONG) != {} and losses(tmp_path / "hurt") == losses(whole)
    passed = {
        "injected": len(steps),
        "passed": named if same and not lost else 0,
        "lost": lost,
        "state": "equal" if same else "DIFFERENT",
    }
    right = same and bool(healed) and not lost and named >= FAULTS - 1
    write({"fault": kind, "plan": plan, **passed, **measured(row, tmp_path / "hurt")}, right)
    assert right, f"{named} of {FAULTS} named, {lost} steps lost, final state {'equal' if same else 'DIFFERENT'}"


BUSY, MINUTES = 40, 10
LOOP = "import os\nwhile os.getppid() == {0}: pass"


def test_nobody_is_blamed_in_ten_minutes_at_twenty_times_overload(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Row 28: so many processes that compute for each core, with the same claim to it as the ranks."""
    plan = "dp2x2.z2.mb2"
    work = launch(text, tmp_path / "run", plan, steps=10**6, hang_timeout=USUAL)
    busy = [subprocess.Popen([sys.executable, "-c", LOOP.format(os.getpid())]) for _ in range(BUSY)]
    end = time.monotonic() + 60 * MINUTES
    loads: list[float] = []

    def hear(rank: int, message: dict[str, Any]) -> None:
        if rank == 0 and message["kind"] == "record":
            loads.append(os.getloadavg()[0])
            if time.monotonic() > end:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(Interrupted):
            train(agent, work, [], hear=hear)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    seen = (
        [event for event in events(tmp_path / "run") if event.kind in ("fault", "verdict")]
        if (tmp_path / "run/events.jsonl").exists()
        else []
    )
    steps = [record.seconds for record in read_run(tmp_path / "run").steps if record.seconds]
    row = {
        "fault": f"28 none in {MINUTES} minutes, {BUSY} busy processes",
        "plan": plan,
        "injected": 0,
        "passed": f"{len(seen)} blamed",
        "lost": 0,
    }
    nothing = {"state": "", "in_time": "", "silence": 0.0, "recovery": 0.0, "largest": max(steps)}
    write({**row, **nothing, "step": median(steps), "load": max(loads)})
    assert seen == [] and len(steps) > 10


MIXED, LONGEST = 200, 450


def held_open() -> tuple[int, int]:
    """Files that this process has open, and its resident MiB."""
    return len(os.listdir("/proc/self/fd")), psutil.Process().memory_info().rss >> 20


def test_two_hundred_mixed_faults_in_one_run_lose_nothing_and_leak_nothing(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Row 33: all kinds, in one run."""
    plan = "dp2x2.z2.mb2"
    whole, hurt = (
        launch(text, tmp_path / name, plan, LONGEST, retries=9, checkpoint_every=50, hang_timeout=USUAL)
        for name in ("whole", "hurt")
    )
    train(agent, whole, [])
    how = ["SIGKILL"] * 6 + ["SIGSEGV", "exit", "raise", "SIGSTOP", "livelock"]
    before = held_open()
    train(agent, hurt, random_faults(MIXED, 4, how, 33, LONGEST))
    files, memory = held_open()
    found = events(tmp_path / "hurt")
    healed = [event for event in found if event.kind == "recovery"]
    assert not any(event.lost for event in healed)
    assert state(tmp_path / "hurt", LONGEST) == state(tmp_path / "whole", LONGEST) != {}
    assert losses(tmp_path / "hurt") == losses(tmp_path / "whole")
    ledger = summarize_run(read_run(tmp_path / "hurt")).ledger
    assert ledger is not None and ledger.problems == ()
    assert files <= before[0] + 2 and memory <= before[1] + 64, (
        f"{before} files and MiB before, {(files, memory)} after"
    )
    passed = {"injected": MIXED, "passed": MIXED, "lost": 0, "state": "equal"}
    write({"fault": "33 mixed, in one run", "plan": plan, **passed, **measured(33, tmp_path / "hurt")})
