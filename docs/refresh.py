"""Writes real output into the pages: the ```text block behind a ```bash run block is what its commands printed, here
and now.

    python docs/refresh.py [PAGE ...]      without names: README.md, README.zh-CN.md and all of docs/

Blocks marked `soak` or `proof` train; they are left alone unless --all is given, and of their steps only those with a
held-out loss are kept. Those marked `example` run one after the other in one folder for each page. `exit=3` in the mark
is the exit code that the last command must have. The code of the notebooks (`*.ipynb`) runs too, cell by cell in one
process, and each cell gets what it printed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
JOB = """\
model: {name: llama-tiny}
cluster: {name: "local:4"}
workload: {sequence: 128, batch: 16, steps: 4}
"""


class Block(NamedTuple):
    """A fenced block: its language, the words behind it, its text, where it lies in the page."""

    language: str
    marks: tuple[str, ...]
    text: str
    start: int
    stop: int

    @property
    def exit_code(self) -> int:
        return next((int(mark.removeprefix("exit=")) for mark in self.marks if mark.startswith("exit=")), 0)


NOTEBOOK_RUNNER = """
import contextlib, io, json, sys
names, printed = {"__name__": "__main__"}, []
for source in json.load(open(sys.argv[1], encoding="utf-8")):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, "<cell>", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""
"""A program that runs the code of cells in order and prints what each of them printed."""


def notebooks() -> list[Path]:
    return sorted((ROOT / "docs").glob("*/*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_notebook(notebook: dict[str, Any]) -> list[str]:
    """What each cell of code prints, run in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        cells = Path(folder) / "cells.json"
        cells.write_text(json.dumps(["".join(cell["source"]) for cell in code_cells(notebook)]), encoding="utf-8")
        command = [sys.executable, "-c", NOTEBOOK_RUNNER, str(cells)]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    return list(json.loads(done.stdout))


def refresh_notebook(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, printed) in enumerate(zip(code_cells(notebook), run_notebook(notebook), strict=True), start=1):
        output = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = number, [output] if printed else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*/**/*.md"))]


def blocks(text: str) -> list[Block]:
    return [
        Block(found[1] or "", tuple(found[2].split()), found[3], found.start(3), found.end(3))
        for found in BLOCK.finditer(text)
    ]


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """The block's commands in `folder`, where a job.yaml lies; both streams together, as a person sees them."""
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    environment = {
        **os.environ,
        "MESHWRIGHT_ANSWERS": "0",  # pages show a search, not a stored answer
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    command = ["bash", "-euc", block.text] if block.language == "bash" else [sys.executable, "-c", block.text]
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )


def shown(output: str, folder: str) -> str:
    """What a page shows of an output: no place of this machine, no progress of a slow search, no step lines but those
    with a held-out loss."""
    lines = output.replace(folder + "/", "").rstrip().splitlines()
    kept = [
        line for line in lines if not re.match(r"step \d+/\d+ |searching for the best plan", line) or "val loss" in line
    ]
    return "\n".join(line.rstrip() for line in kept) + "\n"


def refresh(page: Path, everything: bool) -> None:
    text = page.read_text(encoding="utf-8")
    found = blocks(text)
    printed: list[tuple[Block, str]] = []
    with tempfile.TemporaryDirectory() as shared:
        for block, output in pairwise([*found, Block("", (), "", 0, 0)]):
            example = "example" in block.marks
            wanted = example or "run" in block.marks or (everything and {"soak", "proof"} & {*block.marks})
            followed = output.language == "text" and not text[block.stop + 3 : output.start - 8].strip()
            if not wanted or not (followed or example):
                continue
            with tempfile.TemporaryDirectory() as alone:
                folder = shared if example else alone
                done = run(block, Path(folder))
            if done.returncode != block.exit_code:
                sys.exit(
                    f"{page.relative_to(ROOT)}: exit code {done.returncode}, not "
                    f"{block.exit_code}:\n{block.text}{done.stdout}"
                )
            printed += [(output, shown(done.stdout, folder))] if followed else []
    for output, lines in reversed(printed):
        text = text[: output.start] + lines + text[output.stop :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--all"]
    for each in [Path(name).resolve() for name in names] or [*pages(), *notebooks()]:
        refresh_notebook(each) if each.suffix == ".ipynb" else refresh(each, "--all" in sys.argv)
