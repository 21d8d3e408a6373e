"""Which models of the catalog are built, and what `meshwright verify` says of them.

python -m bench.catalog_models                       # every model that is built; half an hour
python -m bench.catalog_models --plan tp2 qwen3-8b   # verifies only these

Writes bench/results/catalog_models.md. A model is verified with small sizes, in float64.
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
from meshwright.spec.plan import parse_plan
from meshwright.train.model import build_model
from meshwright.train.verify import shrink_source

RESULTS = Path(__file__).parent / "results" / "catalog_models.md"


class Verified(NamedTuple):
    """The outcome of `meshwright verify`, the largest relative difference of a gradient, and the seconds."""

    outcome: str
    gradient: float
    seconds: float


def missing_part(name: str, plan: str) -> str:
    """Returns why the model of the catalog is not built, or '' if it is."""
    try:
        source = build_model_source(read_job(None, (), {"model.name": name}))
        build_model(shrink_source(source, parse_plan(plan)), 1, weights=False)
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


def main(arguments: list[str]) -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="models to verify; default: all that are built")
    parser.add_argument("--plan", default="tp2.pp2")
    asked = parser.parse_args(arguments)
    missing = {name: missing_part(name, asked.plan) for name in catalog.models()}
    built = [name for name, why in missing.items() if not why]
    lines = [
        "# Models of the catalog",
        "",
        f"{len(built)} of {len(missing)} models of the catalog are built. By `python -m bench.catalog_models "
        f"{' '.join(arguments)}`: `verify` with small sizes under `{asked.plan}` in float64, against one device.",
        "",
        "| verified | outcome | largest difference of a gradient | seconds |",
        "|---|---|---|---|",
    ]
    for name in asked.models or built:
        found = verified(name, asked.plan)
        lines.append(f"| {name} | {found.outcome} | {found.gradient:.0e} | {found.seconds:.0f} |")
        print(lines[-1], flush=True)
    lines += ["", "| not built | why |", "|---|---|", *(f"| {name} | {why} |" for name, why in missing.items() if why)]
    lines += ["", f"Built: {', '.join(built)}."]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
