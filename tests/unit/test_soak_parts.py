"""The parts of `make soak` by name: each file with soak tests is in exactly one of them, and `make` runs one by its
name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import soak_parts
from soak_parts import PARTS, listing, part_of, soak_files

ROOT = Path(__file__).parents[2]


def test_every_file_with_soak_tests_is_in_exactly_one_part() -> None:
    listed = Counter(path for part in PARTS.values() for path in part.paths)
    assert [path for path, times in listed.items() if times > 1] == []
    assert sorted(listed) == soak_files()
    assert all(part_of(path) in PARTS for path in listed)


def test_a_part_is_one_line_with_its_duration() -> None:
    lines = listing().splitlines()
    assert len(lines) == len(PARTS) >= 9
    assert all(
        len(line) <= 120 and f"{part.minutes} min" in line for line, part in zip(lines, PARTS.values(), strict=True)
    )


def test_a_part_that_does_not_exist_is_one_line_with_all_names() -> None:
    asked = subprocess.run([sys.executable, soak_parts.__file__, "fault"], capture_output=True, text=True, check=False)
    assert asked.returncode == 1 and asked.stdout == ""
    assert asked.stderr == f"PART 'fault' is not one of {', '.join(PARTS)}\n"


def test_make_runs_a_part_and_lists_the_parts() -> None:
    there = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "PART")}

    def said(*words: str) -> str:
        made = subprocess.run(["make", "-n", *words], cwd=ROOT, env=there, capture_output=True, text=True, check=True)
        return made.stdout

    assert "soak_parts.py 'storage'" in said("soak", "PART=storage") and "-m soak $files" in said(
        "soak", "PART=storage"
    )
    assert said("soak-parts") == said("soak", "PART=") and "soak_parts.py" in said("soak-parts")
    assert "-m soak" in said("soak") and "soak_parts" not in said("soak")
