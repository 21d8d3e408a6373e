"""Which models of the catalog are built, and what `meshwright verify` says of them.

python -m bench.catalog_models                       # one model of each set of equal small sizes; ten minutes
python -m bench.catalog_models --plan tp2 qwen3-8b   # verifies only these, and adds them to the table

Writes bench/results/catalog_models.json and catalog_models.md. A model is verified with small sizes, in float64. Many
models differ only in their sizes, so with small sizes they are one model, which is verified once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from meshwright.catalog import read as catalog
from meshwright.cli.launch_plan import build_model_source
from meshwright.core.errors import InputError
from meshwright.planner.inputs.job import read_job
from meshwright.planner.inputs.model_parser import read_model
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import OptimizerConfig
from meshwright.train.verify import VerifyRequest, build_small_model, shrink_source

RESULTS = Path(__file__).parent / "results" / "catalog_models.json"
NAME_KEYS = ("family", "name", "source", "aliases")
"""Sizes of the catalog that only name a model."""


class Verified(NamedTuple):
    """The outcome of `meshwright verify`, the largest relative difference of a gradient, and the seconds."""

    outcome: str
    gradient: float
    seconds: float


def missing_part(name: str, plan: str) -> str:
    """Returns why the model of the catalog is not built, or '' if it is."""
    if fault := read_model(name).against_training:
        return fault
    try:
        source = build_model_source(read_job(None, (), {"model.name": name}))
        build_small_model(
            VerifyRequest(model=source, plan=parse_plan(plan), optimizer=OptimizerConfig(), precisions=())
        )
    except InputError as error:
        return str(error)
    return ""


def verified(name: str, plan: str) -> Verified:
    """Runs `meshwright verify` in a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "meshwright", "verify", "--model", name, "--plan", plan, "--json"]
    command += ["--cluster", f"local:{parse_plan(plan).world}", "--dtype", "float64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1):
        return Verified(done.stderr.strip().splitlines()[-1], 0.0, seconds)
    found = json.loads(done.stdout)["found"][0]
    return Verified("equal" if found["equal"] else "differs", found["gradient"], seconds)


def small_sizes(name: str, plan: str) -> str:
    """Returns the small sizes with which a model is verified, without its names."""
    sizes = shrink_source(build_model_source(read_job(None, (), {"model.name": name})), parse_plan(plan)).sizes
    return json.dumps({key: value for key, value in sizes.items() if key not in NAME_KEYS}, sort_keys=True)


def table(missing: dict[str, str], sets: list[list[str]], found: dict[str, Verified], plan: str) -> str:
    """Returns the page: the models verified, and why others are not built."""
    built = sum(map(len, sets))
    equal = sum(len(names) for names in sets if any(found[name].outcome == "equal" for name in names if name in found))
    lines = [
        "# Models of the catalog",
        "",
        f"{built} of {len(missing)} models of the catalog are built. With small sizes they are {len(sets)} different "
        f"models. By `python -m bench.catalog_models`: `verify` under `{plan}` in float64, against one device. "
        f"{equal} of {built} are equal. Seconds were measured beside other work.",
        "",
        "| verified | outcome | largest difference of a gradient | seconds | models that are equal with small sizes |",
        "|---|---|---|---|---|",
    ]
    for names in sets:
        for at, name in enumerate(name for name in names if name in found):
            outcome, gradient, seconds = found[name]
            others = ", ".join(other for other in names if other not in found) if not at else ""
            lines.append(f"| {name} | {outcome} | {gradient:.0e} | {seconds:.0f} | {others} |")
    lines += ["", "| not built | why |", "|---|---|", *(f"| {name} | {why} |" for name, why in missing.items() if why)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Verifies the models and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="models to verify; default: one of each set")
    parser.add_argument("--plan", default="tp2.pp2")
    asked = parser.parse_args(arguments)
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    found = {name: Verified(*row) for name, row in stored.get(asked.plan, {}).items()}
    missing = {name: missing_part(name, asked.plan) for name in catalog.models()}
    sets: dict[str, list[str]] = {}
    for name, why in missing.items():
        if not why:
            sets.setdefault(small_sizes(name, asked.plan), []).append(name)
    for name in asked.models or [names[0] for names in sets.values()]:
        found[name] = verified(name, asked.plan)
        print(name, *found[name], flush=True)
    RESULTS.write_text(json.dumps({**stored, asked.plan: found}, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(missing, list(sets.values()), found, asked.plan), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
