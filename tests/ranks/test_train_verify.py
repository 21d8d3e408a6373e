"""Verification finds equal what is equal, and finds what is not: each kind of fault is named with its place."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from meshwright.spec.launch import ModelSource
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import Optimizer
from meshwright.train.verify import Finding, Question, _under_plan, compare

SIZES = {"kind": "llama", "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 32000, "seq": 4096}


def question(plan: str) -> Question:
    source = ModelSource(name="m", sizes=SIZES)
    return Question(model=source, plan=parse_plan(plan), optimizer=Optimizer(lr=1e-3), precisions=("fp64", "fp32"))


def under_plan(given: Question, precision: str) -> dict[str, Any]:
    return _under_plan(given, precision)


@pytest.fixture(scope="module")
def asked() -> Question:
    return question("dp2.z1")


@pytest.fixture(scope="module")
def ours(ranks: Pool, asked: Question) -> dict[str, Any]:
    return ranks.run(2, under_plan, asked, "fp64")[0]


def test_a_right_plan_equals_one_device_with_unequal_labels_on_each_replica(asked: Question, ours: dict[str, Any]) -> None:
    found = compare(asked, "fp64", ours)
    assert found.equal and found.gradient < 1e-13 and found.loss < 1e-13
    assert found.parameters[0] == found.parameters[1] > 100_000
    assert len(set(found.labels_by_replica)) == 2 and sum(found.labels_by_replica) == found.labels[0] == found.labels[1]


def spoil(ours: dict[str, Any], how: str) -> dict[str, Any]:
    bad = copy.deepcopy(ours)
    name = "model.layers.1.mlp.down_proj.weight"
    if how == "one gradient":
        bad["gradients"][name][3, 3] *= 1 + 1e-6
    elif how == "loss":
        bad["losses"][2] *= 1 + 1e-9
    elif how == "weight":
        bad["weights"][name] += 1e-6
    elif how == "gradient lost":
        del bad["gradients"][name]
    elif how == "weight lost":
        del bad["weights"][name]
    elif how == "labels":
        bad["labels"] += 1
    elif how == "not finite":
        bad["gradients"][name][0, 0] = float("nan")
    return bad


@pytest.mark.parametrize("how", ["one gradient", "loss", "weight", "gradient lost", "weight lost", "labels", "not finite"])
def test_each_kind_of_fault_is_found(asked: Question, ours: dict[str, Any], how: str) -> None:
    found = compare(asked, "fp64", spoil(ours, how))
    assert not found.equal
    if how in ("one gradient", "not finite"):
        assert found.where == "model.layers.1.mlp.down_proj.weight"


def test_a_finding_survives_json(asked: Question, ours: dict[str, Any]) -> None:
    found = compare(asked, "fp64", ours)
    assert Finding.model_validate_json(found.model_dump_json()) == found


def test_the_command_reduces_a_plan_of_many_devices_and_prints_one_object(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright.cli.main", "verify", "--json", "--dtype", "float64", "--model", "llama2-7b"]
    command += ["--cluster", "2x8:a100-80gb", "--batch", "64", "--seq", "2048", "--plan", "dp4.tp2.sp.pp2.z3.rc-layer"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["plan"], answer["ran"], answer["ranks"]) == ("dp4.tp2.sp.pp2.z3.rc-layer", "dp2.tp2.sp.pp2.z3.rc-layer", 8)
    assert answer["equal"] and answer["found"][0]["gradient"] < 1e-12
