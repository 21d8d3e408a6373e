"""What a proof run is predicted to take: little at 70 B, and for the plan's side a step of the proof's own rows and
lengths."""

from __future__ import annotations

import pytest

from meshwright.planner.cost.step import PROOF_PLAN_PASSES, estimate, proof_price, proof_seconds, rounding_seconds
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.spec.constraints import check_batch_size, half_sequence_length
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import CHEAP_PROOF_FRACTION, CHEAP_PROOF_STEPS


def job_of(model: str, cluster: str, batch: int, sequence: int) -> Job:
    return resolve_job(
        read_job(
            None, [f"workload.batch={batch}", f"workload.sequence={sequence}"], {"model": model, "cluster": cluster}
        )
    )


LARGE = ("llama2-70b", "64x8:h100-80gb", 1024, 4096)
SMALL = ("gpt2", "1x8:a100-80gb", 64, 1024)


@pytest.mark.parametrize("name", ["dp64.tp8.z3.rc-full", "dp16.tp8.pp4.z1.rc-full"])
def test_a_proof_of_70b_parameters_takes_under_1_percent_of_1000_steps(name: str) -> None:
    job, plan = job_of(*LARGE), parse_plan(name)
    step = estimate(job, plan).time.step
    price = proof_price(job, plan, step)
    assert 0 < price.seconds < CHEAP_PROOF_FRACTION * CHEAP_PROOF_STEPS * step
    assert price.step == step and 8 <= price.length < 4096


def test_gathers_of_zero_3_do_not_shrink_with_the_tokens_of_a_proof() -> None:
    job, plan = job_of(*LARGE), parse_plan("dp64.tp8.z3.rc-full")
    rows = check_batch_size(plan)
    gathers = (
        2 * PROOF_PLAN_PASSES * estimate(job.but(workload=job.workload.but(batch=rows, sequence=8)), plan).time.step
    )
    whole = estimate(job, plan).time.step
    assert gathers > 20 * (
        2 * PROOF_PLAN_PASSES * whole * rows * 64 / job.workload.tokens
    )  # what a part of a step by tokens would say
    assert proof_seconds(job, plan, 64) > gathers


@pytest.mark.parametrize(
    "name",
    [
        "dp8",
        "dp8.z3",
        "dp4.tp2.z1",
        "pp4.dp2.mb1",
        "dp4.cp2.z3",
        "dp2.z1.mb2.ga3-1",
        "dp2x4.z3.mb2.rc-full",
        "pp8.mb1.zbh1",
    ],
)
@pytest.mark.parametrize("length", [1024, 64, 8])
def test_the_plans_side_is_four_thirds_of_a_step_of_its_rows_at_both_lengths(name: str, length: int) -> None:
    plan = parse_plan(name)
    job = job_of(SMALL[0], f"1x{plan.world}:a100-80gb", *SMALL[2:])
    steps = [
        estimate(job.but(workload=job.workload.but(batch=check_batch_size(plan), sequence=each)), plan).time.step
        for each in (length, half_sequence_length(plan, length) or length)
    ]
    assert proof_seconds(job, plan, length) > PROOF_PLAN_PASSES * sum(steps) > 0


def test_measured_rounding_has_a_price_in_float32_alone() -> None:
    plan, job = parse_plan("dp4.z3"), job_of("tinyllama-1.1b", "1x4:a100-80gb", 16, 1024)
    prices = {}
    for precision in ("fp32", "bf16"):
        chosen = job.but(workload=job.workload.but(precision=precision))
        prices[precision] = rounding_seconds(chosen, plan, 64), proof_price(chosen, plan, 1.0)
    assert prices["bf16"][0] == 0.0
    more, price = prices["fp32"]
    assert more > 0 and price.rounding == rounding_seconds(
        job.but(workload=job.workload.but(precision="fp32")), plan, price.length
    )


def test_one_device_computes_alone_on_a_processor_that_ranks_share() -> None:
    plan = parse_plan("dp4.z3.mb1")
    job = job_of("tinyllama-1.1b", "1x4:cpu", 4, 128)
    (group,) = job.cluster.groups
    shared = job.but(cluster=job.cluster.but(groups=(group.but(device=group.device.but(share=0.5)),)))
    assert estimate(shared, plan) == estimate(job, plan)
    assert proof_seconds(shared, plan, 32) < proof_seconds(job, plan, 32)
