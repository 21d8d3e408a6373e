"""Writes real output into the pages: the ```text block behind a ```bash run block is what its commands printed, here
and now.

    python docs/refresh.py [PAGE ...]      without names: README.md, README.zh-CN.md and all of docs/

Blocks marked `soak` or `proof` train; they are left alone unless --all is given, and of their steps only those with a
held-out loss are kept. Those marked `example` run one after the other in one folder for each page. `exit=3` in the mark
is the exit code that the last command must have.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
JOB = "model: {name: llama-tiny}\nworkload: {sequence: 128, batch: 16, steps: 4}\n"


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
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    command = ["bash", "-euc", block.text] if block.language == "bash" else [sys.executable, "-c", block.text]
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )


def shown(output: str, folder: str) -> str:
    """What a page shows of an output: no place of this machine, no step lines but those with a held-out loss."""
    lines = output.replace(folder + "/", "").rstrip().splitlines()
    kept = [line for line in lines if not re.match(r"step \d+/\d+ ", line) or "val loss" in line]
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
    for each in [Path(name).resolve() for name in names] or pages():
        refresh(each, "--all" in sys.argv)
