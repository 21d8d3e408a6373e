"""The limit of open files is raised where the system allows it, and else said in one line with the number that is
needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import resource, sys
from meshwright.core.cgroup_limits import raise_open_file_limit
soft, hard, ranks = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    raise_open_file_limit(ranks)
except ValueError as error:
    print(error)
else:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "found"), [(64, 1024, 4, "1024"), (64, 80, 4, "80"), (500, 500, 100, "500")]
)
def test_the_limit_is_raised_as_far_as_it_may_be(soft: int, hard: int, ranks: int, found: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(soft), str(hard), str(ranks)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{found}\n"


def test_a_limit_below_what_ranks_need_is_one_line_with_both_numbers() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK, "64", "200", "64"], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "may open 200 files here, and 64 ranks need 320: raise the limit (`ulimit -n 320`" in done.stdout


def test_training_under_a_limit_that_is_too_low_ends_before_any_rank_is_started(tmp_path: Path) -> None:
    command = (
        f"ulimit -n 60; exec {sys.executable} -m meshwright train --model llama-tiny --cluster local:2 --steps 1 "
        f"--folder {tmp_path}/run"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "meshwright: a process may open 60 files here, and 2 ranks need 72: raise the limit"
    )
