"""Trials against a machine that is not as described: what is played here is the estimate of another cluster."""

from __future__ import annotations

import pytest

from meshwright.catalog.read import devices
from meshwright.core.errors import InputError
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.search.trials import (
    MIN_TRIAL_GAIN,
    Trial,
    TrialCandidate,
    best_trial,
    is_pathological,
    largest_expected_gain,
    next_trial,
    refit_job,
    scale_cluster,
)
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, parse_plan


def job(cluster: str = "2x4:cpu@1Gb", batch: int = 32, precision: str = "fp32") -> Job:
    entries = {
        "model.name": "llama-tiny",
        "cluster.name": cluster,
        "workload.batch": batch,
        "workload.sequence": 128,
        "workload.precision": precision,
    }
    return resolve_job(read_job(None, (), entries))


def held(described: Job, true: Job, most: int) -> list[Trial]:
    """Trials on a machine that is `true`."""
    trials: list[Trial] = []
    while (chosen := next_trial(described, trials, most)) is not None:
        plan, predicted = chosen
        trials.append(Trial(plan=plan, predicted=predicted, measured=estimate(true, plan).time.step))
    return trials


@pytest.mark.parametrize(("compute", "links"), [pytest.param(1.0, 0.1, marks=pytest.mark.soak), (0.4, 8.0)])
def test_five_trials_find_the_best_plan_of_a_machine_that_was_described_wrongly(compute: float, links: float) -> None:
    described = job()
    true = described.but(cluster=scale_cluster(described.cluster, compute, links))
    trials = held(described, true, 5)
    best, found = search_plans(true, 1, runnable=True).chosen.estimate.time.step, best_trial(trials)
    assert found is not None and found.measured is not None
    assert found.measured <= (1.0 + 2 * MIN_TRIAL_GAIN) * best
    assert len({trial.plan for trial in trials}) == len(trials) <= 5
    for trial in trials:
        refit = estimate(refit_job(described, trials), trial.plan).time.step
        assert refit == pytest.approx(trial.measured, rel=0.15)


def test_trials_of_a_machine_that_is_as_described_stop_after_two() -> None:
    trials = held(job(), job(), 5)
    assert len(trials) == 2
    first, second = trials
    assert (first.plan.dp, first.plan.tp, first.plan.pp, first.plan.cp) != (
        second.plan.dp,
        second.plan.tp,
        second.plan.pp,
        second.plan.cp,
    )


def test_neighbours_of_a_plan_that_is_far_slower_than_expected_are_tried_last() -> None:
    """tp8 takes five times as long as expected; of plans with equal estimates, the one next to it is not chosen."""
    ran = [TrialCandidate(Plan(tp=8), 1.0, 1.0, 5.0), TrialCandidate(Plan(dp_replicate=8), 1.3, 1.3, 1.3)]
    close, far = (TrialCandidate(plan, 1.0, 1.0) for plan in (Plan(tp=8, micro_batch=2), Plan(pp=2, dp_replicate=4)))
    assert largest_expected_gain([close, far], ran, 8) == 1
    slow, plain = (Trial(plan=each.plan, predicted=each.predicted, measured=each.measured) for each in ran)
    assert is_pathological(slow, [slow, plain]) and not is_pathological(plain, [slow, plain])
    question = job()
    assert refit_job(question, [slow.but(plan=Plan(dp_replicate=8)), plain]) == refit_job(question, [plain])


def test_plans_that_share_the_feature_of_slow_plans_are_tried_last() -> None:
    """Two plans at ZeRO 0 take six times as long as expected, one at ZeRO 1 does not. The candidate at ZeRO 1 is
    chosen, though its estimate is longer."""
    slow = [Plan(dp_replicate=128, tp=4, micro_batch=2), Plan(dp_replicate=32, tp=16, micro_batch=8)]
    plain = Plan(dp_shard=256, tp=2, zero=1)
    ran = [*(TrialCandidate(plan, 1.0, 1.0, 6.0) for plan in slow), TrialCandidate(plain, 2.5, 2.5, 2.5)]
    same, other = (
        TrialCandidate(
            Plan(dp_replicate=64 ** (1 - zero), dp_shard=64**zero, zero=zero, tp=8, micro_batch=4), longer, longer
        )
        for zero, longer in ((0, 1.0), (1, 1.2))
    )
    assert largest_expected_gain([same, other], ran, 8) == 1
    assert largest_expected_gain([same, other], [ran[-1]], 8) == 0


def test_the_expected_time_is_the_middle_of_the_interval() -> None:
    question = job("2x8:h100")
    plan = search_plans(question, 1).chosen
    priced, interval = TrialCandidate.of(plan.plan, plan.estimate), plan.estimate.step_interval
    assert interval is not None and interval.low < priced.predicted < priced.expected < interval.high
    assert priced.expected / interval.low == pytest.approx(interval.high / priced.expected)


def test_a_plan_that_could_not_run_is_not_tried_again_and_moves_nothing() -> None:
    question = job()
    plan = search_plans(question, 1, runnable=True).chosen.plan
    refused = Trial(plan=plan, predicted=1.0, why="not here")
    assert refit_job(question, [refused]) == question
    chosen = next_trial(question, [refused], 5)
    assert chosen is not None and chosen[0] != plan
    assert best_trial([refused]) is None


def test_shares_of_a_plan_are_not_lost_between_processes() -> None:
    trial = Trial(plan=Plan(dp_replicate=2, shares=(3, 1)), predicted=1.0)
    assert Trial.model_validate_json(trial.to_json()) == trial
    with pytest.raises(InputError):
        trial.but(busy=-1.0)


@pytest.mark.parametrize("device", sorted(name for name, row in devices().items() if "bf16" in row["peak"]))
def test_trials_refit_a_cluster_of_every_device_of_the_catalog(device: str) -> None:
    asked, plan = job(f"1x1:{device}", 8, "bf16"), parse_plan("dp1.mb8")
    predicted = estimate(asked, plan).time.step
    again = refit_job(asked, [Trial(plan=plan, predicted=predicted, measured=3 * predicted)])
    assert 2 * predicted < estimate(again, plan).time.step < 4 * predicted
