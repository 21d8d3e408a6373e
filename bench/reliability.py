"""Repeats faults unattended for hours, and tables how many of them heal and what a flood of connections costs.

    python -m bench.reliability defects --times 20     # each test of rows 35 to 52 of tests/ranks/FAULTS.md
    python -m bench.reliability leader --times 200     # kills and restarts the leader at random steps
    python -m bench.reliability flood --rounds 5 --seconds 60

Each result is added to its table in bench/results/ at once (defects.md, leader_restarts.md, flood.md). An interrupted
command continues where it stopped; --fresh starts a new table. The commands run the tests themselves, on real processes
of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import psutil

from bench.peers import machine

ROOT = Path(__file__).parents[1]
RANKS = ROOT / "tests" / "ranks"
RESULTS = ROOT / "bench" / "results"
DEFECTS = range(35, 53)
"""Rows of tests/ranks/FAULTS.md that are defects."""
SEED, LEAST_SECONDS, MOST_SECONDS = 2026, 0.5, 12.0
"""Of the moments at which a leader is started again."""
BEGUN = 8
"""The step after which a run is measured."""

Row = dict[str, Any]


class ResultTable:
    """The rows of bench/results/NAME.json by key, and the table NAME.md that `show` makes of them. Both files are
    written after each row."""

    def __init__(self, name: str, show: Callable[[dict[str, Row]], str], fresh: bool) -> None:
        self.file, self.show = RESULTS / f"{name}.json", show
        kept = {} if fresh or not self.file.exists() else json.loads(self.file.read_text())
        self.rows: dict[str, Row] = kept

    def add(self, key: str, row: Row) -> None:
        self.rows[key] = row
        for path, text in ((self.file, json.dumps(self.rows, indent=1) + "\n"), (self.file.with_suffix(".md"), "")):
            new = path.with_suffix(".new")
            new.write_text(text or self.show(self.rows))
            new.replace(path)
        print(key, row, flush=True)


def here() -> str:
    """Returns a description of the machine."""
    found = machine()
    return f"{found['cores']} cores of {found['processor']}, torch {found['torch']}"


# --- defects


def tests_of_defects() -> dict[str, list[int]]:
    """Returns each test that FAULTS.md names for a defect, with its rows."""
    found: dict[str, list[int]] = {}
    for row, _, tests in re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", (RANKS / "FAULTS.md").read_text(), re.MULTILINE):
        for test in re.findall(r"`([^`]+)`", tests) if int(row) in DEFECTS else ():
            found.setdefault(test, []).append(int(row))
    return found


def defects(times: int, fresh: bool) -> None:
    """Runs every test once per round, so that an early end leaves results of each test."""
    table = ResultTable("defects", show_defects, fresh)
    tests = tests_of_defects()
    for number in range(1, times + 1):
        due = [test for test in tests if table.rows.get(test, {"runs": 0})["runs"] < number]
        for test, (failure, seconds) in outcomes(due).items():
            row = table.rows.get(test, {"runs": 0, "passed": 0, "seconds": [], "failures": []})
            row = {**row, "rows": tests[test], "runs": row["runs"] + 1, "passed": row["passed"] + (failure is None)}
            row["seconds"] = [*row["seconds"], round(seconds, 1)]
            row["failures"] = [*row["failures"], *([] if failure is None else [failure])]
            table.add(test, row)


def outcomes(tests: list[str]) -> dict[str, tuple[str | None, float]]:
    """Runs the tests, two files at a time. Returns for each test the message of its first failure (None: all its cases
    have passed) and its seconds. A test without a result has failed."""
    if not tests:
        return {}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        report = Path(folder) / "report.xml"
        names = [f"tests/{test}" for test in tests]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", f"--junitxml={report}"]
        command += ["-m", "soak or not soak", *names]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):  # no result of the round counts
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    found: dict[str, tuple[str | None, float]] = {}
    for case in cases:
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
        test = f"{file}.py::{case.attrib['name'].partition('[')[0]}"
        before, seconds = found.get(test, (None, 0.0))
        wrong = [each for each in case if each.tag in ("failure", "error", "skipped")]
        failure = f"{case.attrib['name']}: {wrong[0].get('message', '')}"[:300] if wrong else None
        found[test] = (before or failure, seconds + float(case.attrib["time"]))
    return {test: found.get(test, ("has not run", 0.0)) for test in tests}


def show_defects(rows: dict[str, Row]) -> str:
    lines = [
        "# The tests of the eighteen defects, many times over",
        "",
        "Each test that tests/ranks/FAULTS.md names for rows 35 to 52, with all its cases. By "
        f"`python -m bench.reliability defects`, on {here()}.",
        "",
        f"{sum(row['passed'] for row in rows.values()):,} of {sum(row['runs'] for row in rows.values()):,} passed.",
        "",
        "| rows | test | passed | seconds, median |",
        "|---|---|---|---|",
    ]
    for test, row in sorted(rows.items(), key=lambda item: (item[1]["rows"], item[0])):
        where = ", ".join(map(str, row["rows"]))
        lines.append(f"| {where} | `{test}` | {row['passed']} of {row['runs']} | {median(row['seconds']):.0f} |")
    failures = [(test, words) for test, row in rows.items() for words in row["failures"]]
    lines += ["", *(f"- `{test}`: {words}" for test, words in failures)] if failures else []
    return "\n".join(lines) + "\n"


# --- runs of two nodes


@contextlib.contextmanager
def place_of(every: int) -> Iterator[Path]:
    """Creates a folder with the job of the two-node tests. The job saves every `every` steps."""
    from test_nodes import JOB
    from test_train_run import furnished

    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        text = Path(name) / "text" / "text.txt"
        text.parent.mkdir()
        text.write_text("".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n\n" for n in range(400)))
        yield furnished(Path(name), text, JOB.replace("checkpoint_every: 20", f"checkpoint_every: {every}"))


def leader(times: int, fresh: bool) -> None:
    from test_leader_restarts import restart

    table, chance = ResultTable("leader_restarts", show_leader, fresh), random.Random(SEED)
    moments = [chance.uniform(LEAST_SECONDS, MOST_SECONDS) for _ in range(times)]
    with place_of(5) as place:
        for number, moment in enumerate(moments, 1):
            if f"{number}" in table.rows:
                continue
            began, why = time.monotonic(), ""
            try:
                restart(place, f"random-{number}", moment)
            except Exception as error:
                why = (str(error).splitlines() or [type(error).__name__])[0][:200]
                traceback.print_exc()
            row = {"after": round(moment, 3), "healed": not why, "seconds": round(time.monotonic() - began, 1)}
            table.add(f"{number}", {**row, "why": why})
            shutil.rmtree(place / "runs" / f"random-{number}", ignore_errors=True)


def show_leader(rows: dict[str, Row]) -> str:
    healed = sum(row["healed"] for row in rows.values())
    lines = [
        "# The leader killed and started again",
        "",
        "Two nodes of two ranks train; the one that leads is killed with its ranks and started again after a random "
        f"time of {LEAST_SECONDS} to {MOST_SECONDS:.0f} s. Healed: ranks of both nodes train again, and no step is "
        f"missing. By `python -m bench.reliability leader`, on {here()}.",
        "",
        f"{healed} of {len(rows)} healed; seconds of one, start and end of the run included: median "
        f"{median(row['seconds'] for row in rows.values()):.0f}, largest "
        f"{max(row['seconds'] for row in rows.values()):.0f}.",
        "",
        "| started again after | healed | of these times |",
        "|---|---|---|",
    ]
    for low in range(int(MOST_SECONDS)):
        some = [row for row in rows.values() if low <= row["after"] < low + 1]
        if some:
            lines.append(f"| {low} to {low + 1} s | {sum(row['healed'] for row in some)} | {len(some)} |")
    lost = [row for row in rows.values() if not row["healed"]]
    lines += ["", *(f"- after {row['after']} s: {row['why']}" for row in lost)] if lost else []
    return "\n".join(lines) + "\n"


# --- a flood against speed


def flooded(rounds: int, seconds: float, fresh: bool) -> None:
    """Alternates quiet and flooded runs. The order changes with each round."""
    table = ResultTable("flood", show_flood, fresh)
    with place_of(10**6) as place:
        for number in range(1, rounds + 1):
            if f"{number}" in table.rows:
                continue
            kinds = ["quiet", "flooded"][:: 1 if number % 2 else -1]
            found = {kind: speed(place, f"{kind}-{number}", seconds, kind == "flooded") for kind in kinds}
            shared = found["quiet"]["losses"].keys() & found["flooded"]["losses"].keys()
            equal = all(found["quiet"]["losses"][step] == found["flooded"]["losses"][step] for step in shared)
            row = {kind: found[kind]["step"] for kind in kinds}
            counts = {f"{kind} steps": found[kind]["steps"] for kind in kinds}
            counts |= {f"{kind} cpu": found[kind]["cpu"] for kind in kinds}
            more = {"ports": found["flooded"]["ports"], "shared": len(shared), "equal": equal, "seconds": seconds}
            table.add(f"{number}", {**row, **counts, **more})


def speed(place: Path, run: str, seconds: float, is_flooded: bool) -> Row:
    """Trains on two nodes for `seconds`. Returns the median step time, the number of steps, and the losses. The flood
    has the last core and the run the others, because a flood comes from another machine."""
    from test_untrusted_connections import Limited, flood, scan

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)
    nodes = Limited(place, run, endless=True)
    try:
        nodes.wait_for(BEGUN)
        os.sched_setaffinity(0, cores[-1:])
        ports = list(nodes.ports()) if is_flooded else []
        for port in ports:
            scan(port)
        first, before = nodes.step() + 1, cpu_seconds(nodes.processes)
        with flood(ports) if ports else contextlib.nullcontext():
            time.sleep(seconds)
            last, after = nodes.step(), cpu_seconds(nodes.processes)
        for process in nodes.processes:
            process.send_signal(signal.SIGTERM)
        codes = {process.wait(900) for process in nodes.processes}
        assert codes <= {0, 75}, nodes.words(0).read_text()
    finally:
        for process in nodes.processes:
            process.kill()
            process.wait()
        nodes.held.close()
        os.sched_setaffinity(0, cores)
    records = list(map(json.loads, (nodes.folder / "records.jsonl").read_text().splitlines()))
    steps = [record["seconds"] for record in records if first < record["step"] <= last]
    losses = {record["step"]: record["loss"] for record in records}
    shutil.rmtree(nodes.folder)
    cpu = (after - before) / max(last - first + 1, 1)
    return {"step": median(steps), "steps": len(steps), "losses": losses, "ports": len(ports), "cpu": cpu}


def cpu_seconds(processes: list[subprocess.Popen[str]]) -> float:
    """Returns the CPU seconds that `processes` and their children have taken, without the process that floods."""
    roots = [psutil.Process(process.pid) for process in processes]
    times = [each.cpu_times() for root in roots for each in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def show_flood(rows: dict[str, Row]) -> str:
    lines = [
        "# A flood of connections against speed",
        "",
        "Two nodes of two ranks train with 256 files per process. In flooded runs every port of supervisors, leader "
        "and stores is scanned, and 300 silent connections to each are opened again and again, 200 a second, by one "
        "process on a core of its own: a flood comes from another machine. The run has the other cores, in quiet runs "
        "too. Own CPU: of all processes of the run. Quiet and flooded runs take turns. Equal: the losses of all steps "
        f"that both made are equal to the bit. By `python -m bench.reliability flood`, on {here()}.",
        "",
        "| round | seconds | ports | quiet step | flooded step | ratio | own CPU of a step, quiet | flooded | ratio | "
        "steps, quiet and flooded | losses |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for number, row in rows.items():
        ratio, losses = row["flooded"] / row["quiet"], "equal" if row["equal"] else "DIFFERENT"
        steps = f"{row['quiet steps']} and {row['flooded steps']} | {losses} in {row['shared']} steps"
        lines.append(
            f"| {number} | {row['seconds']:.0f} | {row['ports']} | {1e3 * row['quiet']:.1f} ms | "
            f"{1e3 * row['flooded']:.1f} ms | {ratio:.3f} | {1e3 * row['quiet cpu']:.1f} ms | "
            f"{1e3 * row['flooded cpu']:.1f} ms | {row['flooded cpu'] / row['quiet cpu']:.3f} | {steps} |"
        )
    ratios = [row["flooded"] / row["quiet"] for row in rows.values()]
    own = [row["flooded cpu"] / row["quiet cpu"] for row in rows.values()]
    lines += [
        "",
        f"Median ratio of the step {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}; of the own CPU "
        f"time {median(own):.3f}, from {min(own):.3f} to {max(own):.3f}.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["defects", "leader", "flood"])
    parser.add_argument("--times", type=int, help="of each test (20), or of the leader (200)")
    parser.add_argument("--rounds", type=int, default=5, help="a quiet and a flooded run each")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a flood")
    parser.add_argument("--fresh", action="store_true", help="begin the table anew")
    asked = parser.parse_args(arguments)
    sys.path[:0] = [str(RANKS), str(ROOT / "tests")]
    if asked.what == "defects":
        defects(asked.times or 20, asked.fresh)
    elif asked.what == "leader":
        leader(asked.times or 200, asked.fresh)
    else:
        flooded(asked.rounds, asked.seconds, asked.fresh)


if __name__ == "__main__":
    main(sys.argv[1:])
