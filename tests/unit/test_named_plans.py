"""A plan name without `mb` means the largest micro-batch that fits, in every command, and the screen says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import GIB, cluster, decoder, small_job
from test_cli import called

import meshwright as mw
from meshwright.cli.launch_plan import choose_plan
from meshwright.cli.options import JobOptions
from meshwright.core.messages import translate
from meshwright.planner.cost.named_plans import complete_plan
from meshwright.planner.cost.step import estimate
from meshwright.spec.plan import Plan, default_micro_batches, parse_plan
from meshwright.spec.plan_name import is_open

SMALL = ["--model", "llama-tiny", "--cluster", "1x2:cpu", "--batch", "8", "--seq", "64"]


@settings(deadline=None, max_examples=25)
@given(
    memory=st.floats(20.0, 36.0),
    name=st.sampled_from(
        ["dp1", "dp4", "dp2.z1", "dp4.z3", "tp2.sp", "pp2", "pp2.zbh1", "dp2.pp2", "pp2.interleaved2"]
    ),
    batch=st.sampled_from([8, 12, 16, 24]),
)
def test_no_larger_micro_batch_fits_than_that_of_an_open_name(memory: float, name: str, batch: int) -> None:
    plan = parse_plan(name)
    job = small_job(decoder(((8, 128),)), cluster(1, plan.world, 2.0**memory), batch)
    chosen = complete_plan(job, plan)
    sizes = default_micro_batches(plan, batch)
    assert not is_open(chosen) and chosen.micro_batch in sizes and sizes == sorted(sizes, reverse=True)
    for size in sizes:
        fits = estimate(job, chosen.but(micro_batch=size)).fits
        assert fits == (size <= chosen.micro_batch) or not estimate(job, chosen.but(micro_batch=sizes[-1])).fits


def test_memory_limits_the_micro_batch_of_an_open_name() -> None:
    model, plan = decoder(((8, 128),)), parse_plan("dp2")
    found = [complete_plan(small_job(model, cluster(1, 2, size * GIB), 32), plan).name for size in (16.0, 0.02, 0.001)]
    assert found[0] == "dp2.mb16" and found[2] == "dp2.mb1"
    assert 1 < parse_plan(found[1]).micro_batch < 16


@pytest.mark.parametrize("command", ["estimate", "simulate", "plan"])
def test_a_command_says_the_micro_batch_of_an_open_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, command, *SMALL, "--plan", "dp2")
    assert (code, err) == (0, "plan dp2 = dp2.mb4\n") and "dp2.mb4" in out
    code, out, err = called(capsys, command, *SMALL, "--plan", "dp2.mb1")
    assert (code, err) == (0, "") and "dp2.mb1" in out


def test_compared_plans_and_rejected_ones_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = called(capsys, "plan", *SMALL, "--compare", "dp2", "tp2")
    assert err == "plan dp2 = dp2.mb4\nplan tp2 = tp2.mb8\n" and "dp2.mb4: " in out and "tp2.mb8: " in out
    assert "plan tp2 = tp2.mb8\n" in called(capsys, "plan", *SMALL, "--why-not", "tp2")[2]
    code, out, _ = called(capsys, "export", *SMALL, "--plan", "dp2", "--to", "megatron", "--json")
    assert (code, json.loads(out)["plan"]) == (0, "dp2.mb4")


def test_a_launch_stores_the_full_name_and_old_runs_keep_their_micro_batch(tmp_path: Path) -> None:
    file = JobOptions(model="llama-tiny", cluster="1x2:cpu", batch=8, plan="dp2.z1").job_file(None)
    choice = choose_plan(file, None, tmp_path, {}, None)
    assert choice.plan.name == "dp2.z1.mb4"
    assert translate(choice.why[1]).startswith("plan dp2.z1 = dp2.z1.mb4, as requested: ")
    assert Plan.model_validate_json(choice.plan.to_json()).name == "dp2.z1.mb4"
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "plan.json").write_text(parse_plan("dp2.z1").to_json())  # as written before names had mb1
    assert choose_plan(file, None, tmp_path, {}, None).plan.name == "dp2.z1.mb1"


def test_the_python_functions_read_names_like_the_commands(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {name: llama-tiny}\ncluster: {name: '1x2:cpu'}\nworkload: {batch: 8, sequence: 64}\nplan: {name: dp2}\n"
    )
    job = mw.load(path)
    assert [entry.name for entry in mw.plan(job)] == ["dp2.mb4"]
    assert mw.estimate(job, "dp2") == mw.estimate(job, complete_plan(job, parse_plan("dp2")))
    assert mw.simulate(job, "dp2").plan.name == "dp2.mb4"


def test_what_cannot_run_with_any_micro_batch_is_refused_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("estimate", "plan", "simulate", "export", "verify"):
        code, _, err = called(
            capsys, command, *SMALL, "--plan", "dp3", *(["--to", "megatron"] if command == "export" else [])
        )
        assert (code, err.count("\n")) == (2, 1) and "plan dp3: dp(3)" in err and err.endswith("or the cluster\n")
    odd = ["--model", "llama-tiny", "--cluster", "1x2:cpu", "--batch", "7", "--seq", "64"]
    code, _, err = called(capsys, "estimate", *odd, "--plan", "dp2")
    assert code == 2 and "plan dp2: batch 7 is not a multiple of dp(2); use a batch of 2 sequences" in err


def test_a_pin_and_fewer_devices_leave_the_micro_batch_to_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "plan", *SMALL, "--plan", "dp2", "--pin", "mb=2")
    assert (code, err) == (0, "") and "dp2.mb2" in out
    file = JobOptions(model="llama-tiny", cluster="1x2:cpu", batch=8, plan="dp2").job_file(None)
    assert choose_plan(file, "mb=2", None, {}, None).plan.name == "dp2.mb2"
    code, out, err = called(capsys, "plan", *SMALL, "--plan", "dp1", "--objective", "fewest")
    assert (code, err) == (0, "") and "dp1.mb8" in out
