"""Which of transformers' own parallel modes compute what one device computes: tiny models of many classes, two ranks.

`python -m bench.transformers_matrix --seconds 150` adds rows until the time is over, and continues where it stopped;
`--fresh` starts a new table, `--only llama,gpt2` tries some classes. Each loop is recorded and compared by
`meshwright.verify_recording`. Its first gradient is also compared with plain autograd on one device, which uses nothing
of the recording: this tests the recording itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.interop.recording.verify_recording import verify_recording

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ranks"))
from model_families import FAMILIES, build_family
from pool import Pool, RankFailure
from transformers_modes import MODES, differences, train_on_one_device, train_under

RESULTS = Path(__file__).parent / "results" / "transformers_matrix"
SECONDS = 60.0
"""Of one loop; a rank that waits longer for the other one hangs."""
MAX_AUTOGRAD = (1e-4, 1e-3)
"""Gradients in float32 of the first and the second step that differ by less from plain autograd in float64 are equal.
AdamW turns gradients that consist of rounding errors into full steps, so the second step differs by more."""
OUTCOMES = ("equal", "wrong", "no plan", "error", "not compared")
INTRODUCTION = (
    "{classes} classes in {families} tiny configurations (2 blocks, 64 features, random weights, a vocabulary of 99), "
    "2 ranks on CPUs, gloo, torch {torch}, accelerate "
    "{accelerate}. Every loop has two micro-batches on each rank, padded labels (7 to 27 "
    "valid ones in a micro-batch), AdamW and clipping to norm 1, for two steps. All modes but the last are runs of the "
    "Trainer; TP, FSDP2 and EP are `DistributedConfig` in `from_pretrained`. `plain loop` is DDP with "
    "`(model(**batch).loss / micro_batches).backward()`. On a CPU, accelerate refuses tensor parallelism in the "
    "Trainer; the loops leave out this one check. `no plan`: the class has no plan for the mode.\n"
)
AGREEMENT = (
    "\nPlain autograd in float64 agrees in {agree} of {checked} comparisons: a run that the recording calls equal "
    "differs from it by at most {first:.0e} in the gradients of the first step and {second:.0e} in those of the "
    "second, a wrong one by more. Of {wrong} wrong runs it confirms {confirmed}.\n"
)


def main(arguments: list[str]) -> None:
    """Adds rows to `results/transformers_matrix.json` and writes the table."""
    parser = argparse.ArgumentParser(prog="bench.transformers_matrix")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--fresh", action="store_true")
    given = parser.parse_args(arguments)
    file = RESULTS.with_suffix(".json")
    rows = [] if given.fresh or not file.exists() else json.loads(file.read_text(encoding="utf-8"))["rows"]
    wanted = given.only.split(",") if given.only else list(FAMILIES)
    rows = [row for row in rows if row["family"] not in (wanted if given.only else ())]
    known = {(row["family"], row["mode"]) for row in rows}
    pool, begun = Pool(), time.monotonic()
    for family in wanted:
        left = [mode for mode in MODES if (family, mode) not in known]
        if left and time.monotonic() - begun < given.seconds:
            rows += _rows_of(pool, family, left)
            write(rows)
    pool.close()
    write(rows)
    print(f"{len(rows)} of {len(FAMILIES) * len(MODES)} rows")


def _rows_of(pool: Pool, family: str, modes: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the row of each mode of a family."""
    with tempfile.TemporaryDirectory() as folder:
        build_family(family).save_pretrained(f"{folder}/saved")
        expected = train_on_one_device(family)
        for at, mode in enumerate(modes):
            begin = time.monotonic()
            row = {"family": family, "class": FAMILIES[family][0], "mode": mode}
            try:
                results = pool.run(2, train_under, f"{folder}/{at}", f"{folder}/saved", family, mode, timeout=SECONDS)
                row["autograd"] = [
                    max(each) for each in zip(*(differences(one, expected) for one in results), strict=True)
                ]
                row |= compared(Path(folder, str(at)), results[0].losses)
            except RankFailure as error:
                line = error_line(str(error))
                row |= {"outcome": "no plan" if "_plan`. Pass `" in line else "error", "why": line}
            row["seconds"] = round(time.monotonic() - begin, 2)
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
            yield row


def compared(folder: Path, losses: list[float]) -> dict[str, Any]:
    """Returns the entries of a row for a recording. `losses` are those that the loop reports."""
    try:
        report = verify_recording(folder)
    except MeshwrightError as error:
        return {"outcome": "not compared", "why": str(error)}
    reported = max(abs(mine / step.loss - 1) for mine, step in zip(losses, report.steps, strict=False))
    row: dict[str, Any] = {"outcome": "equal" if report.equal else "wrong", "reported_loss": reported}
    row["compared"] = sum(step.outputs + step.gradients + step.updates for step in report.steps)
    for found in report.findings[:1]:
        row |= {
            key: found.data()[key] for key in ("step", "kind", "module", "ranks", "amount", "limit", "cause", "why")
        }
    return row


def error_line(text: str) -> str:
    """Returns the last line of the traceback of the rank that failed first."""
    first = text.split("\nrank ")[0].strip().splitlines()
    return first[-1][:240]


def is_confirmed(row: dict[str, Any]) -> bool:
    """Returns whether plain autograd agrees with the comparison of a recording."""
    differs = any(off > limit for off, limit in zip(row["autograd"], MAX_AUTOGRAD, strict=True))
    return differs == (row["outcome"] == "wrong")


# --- the table ------------------------------------------------------------------------------------


def write(rows: list[dict[str, Any]]) -> None:
    """Writes the JSON file and the table."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    order = {key: at for at, key in enumerate((family, mode) for family in FAMILIES for mode in MODES)}
    rows = sorted(rows, key=lambda row: order[row["family"], row["mode"]])
    text = json.dumps({"versions": versions, "rows": rows}, indent=1)
    RESULTS.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text("\n".join(table(rows, versions)) + "\n", encoding="utf-8")


def table(rows: list[dict[str, Any]], versions: dict[str, str]) -> Iterator[str]:
    """Yields the lines of the report."""
    cells = {(row["family"], row["mode"]): row for row in rows}
    families = [family for family in FAMILIES if any(row["family"] == family for row in rows)]
    classes = {FAMILIES[family][0] for family in families}
    yield f"# The parallel modes of transformers {versions['transformers']} against one device\n"
    yield INTRODUCTION.format(classes=len(classes), families=len(families), **versions)
    yield "| mode | equal | wrong | no plan | ends in an error | not compared |"
    yield "|---|---|---|---|---|---|"
    for mode in MODES:
        counts = Counter(row["outcome"] for row in rows if row["mode"] == mode)
        yield f"| {mode} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |"
    checked = [row for row in rows if row["outcome"] in ("equal", "wrong")]
    wrong = [row for row in checked if row["outcome"] == "wrong"]
    yield AGREEMENT.format(
        agree=sum(map(is_confirmed, checked)),
        checked=len(checked),
        wrong=len(wrong),
        confirmed=sum(map(is_confirmed, wrong)),
        first=MAX_AUTOGRAD[0],
        second=MAX_AUTOGRAD[1],
    )
    yield "| class | " + " | ".join(MODES) + " |"
    yield "|---|" + "---|" * len(MODES)
    for family in families:
        shown = [_cell(cells.get((family, mode))) for mode in MODES]
        yield f"| {FAMILIES[family][0]} ({family}) | " + " | ".join(shown) + " |"
    yield from _details(wrong, rows)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"**{autograd_difference(row):.1e}**" if row["outcome"] == "wrong" else row["outcome"]


def autograd_difference(row: dict[str, Any]) -> float:
    """Returns the difference from plain autograd in the step in which the recording differs."""
    return row["autograd"][row["step"] - 1]


def _details(wrong: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Wrong runs\n"
    yield (
        "`recording`: the relative difference of the first value that differs. `autograd`, also in the cells above: "
        "the norm of the difference of all gradients of that step from plain autograd, relative to their norm. "
        "`reported loss`: the largest relative difference of the loss that the loop reports.\n"
    )
    yield "| class | mode | step | value | first module | recording | autograd | reported loss | cause | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in wrong:
        amounts = [row["amount"], autograd_difference(row), row["reported_loss"]]
        shown = " | ".join("-" if each is None else f"{each:.1e}" for each in amounts)
        yield (
            f"| {row['family']} | {row['mode']} | {row['step']} | {row['kind']} | {row['module'] or 'whole model'} | "
            f"{shown} | {row['cause']} | {row['why']} |"
        )
    yield "\n## Runs that end in an error\n"
    yield "| classes | mode | error |"
    yield "|---|---|---|"
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["outcome"] in OUTCOMES[3:]:
            text = row["why"].replace(row["class"], "CLASS").replace("|", "\\|")
            lines.setdefault((row["mode"], text), []).append(row["family"])
    for (mode, text), names in lines.items():
        yield f"| {', '.join(names)} | {mode} | {text} |"


if __name__ == "__main__":
    main(sys.argv[1:])
