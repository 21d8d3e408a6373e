"""The Python API: three functions and four classes, each imported when it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.core.errors import InputError


def job_file(folder: Path) -> Path:
    path = folder / "job.yaml"
    path.write_text("model: {name: llama-tiny}\ncluster: {name: '1x4:cpu'}\nworkload: {batch: 16, sequence: 64}\n")
    return path


def test_a_job_is_loaded_planned_and_priced(tmp_path: Path) -> None:
    job = mw.load(job_file(tmp_path))
    best, *others = mw.plan(job, top=3)
    assert best.plan.world == 4 and len(others) == 2
    assert mw.estimate(job, best.plan) == best.estimate
    assert best.estimate.time.step <= others[0].estimate.time.step


def test_a_plan_is_named_in_a_word(tmp_path: Path) -> None:
    job = mw.load(job_file(tmp_path))
    assert (
        mw.estimate(job, "dp4") == mw.estimate(job, mw.Plan(dp_replicate=4)) == mw.estimate(job, mw.parse_plan("dp4"))
    )


def test_a_plan_of_another_size_is_refused_with_the_equation(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dp\(2\) \* tp\(1\) \* pp\(1\) = 2 but the cluster has 4 devices"):
        mw.estimate(mw.load(job_file(tmp_path)), "dp2")


def test_every_promised_name_is_there_and_no_other() -> None:
    assert dir(mw) == sorted(mw.__all__)
    assert all(getattr(mw, name) is not None for name in mw.__all__ if name != "parallelize")
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = mw.paralelize


@pytest.mark.soak
def test_planning_from_python_imports_no_torch(tmp_path: Path) -> None:
    script = (
        f"import sys, meshwright as mw; mw.plan(mw.load({str(job_file(tmp_path))!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=900).returncode == 0
