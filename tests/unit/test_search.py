"""The search is exact: it gives what pricing every plan one by one gives, and counts every plan that it leaves out."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import GIB, cluster, decoder, named_job, small_job

from meshwright.base.errors import InputError, NothingFits
from meshwright.cost.memory import reserved, usable
from meshwright.cost.price import Pricer
from meshwright.cost.step import estimate
from meshwright.search.explain import explain
from meshwright.search.rank import search
from meshwright.search.space import Space, divisors
from meshwright.search.survey import TIGHT_GAIN, simplicity, survey
from meshwright.spec.estimate import Estimate, Fits
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, Recompute, Schedule
from meshwright.spec.rules import faults
from meshwright.words.say import say


def every_plan(job: Job) -> list[Plan]:
    """All plans of the space, written as plain loops."""
    devices, batch, blocks = job.cluster.devices, job.workload.batch, max(job.model.blocks, 1)
    plans = []
    for tp, pp, shard, replicate in product(divisors(devices), repeat=4):
        if tp * pp * shard * replicate != devices:
            continue
        schedules = [(Schedule.one_f_one_b, 1)]
        if pp > 1:
            schedules += [(Schedule.gpipe, 1), *((Schedule.interleaved, turns) for turns in range(2, blocks // pp + 1))]
        for (schedule, turns), zero, size, recompute in product(schedules, range(4), divisors(batch), (Recompute.none, Recompute.layer)):
            if (zero > 0) != (shard > 1):
                continue
            for parallel in (False, True) if tp > 1 else (False,):
                plans.append(
                    Plan(
                        dp_replicate=replicate,
                        dp_shard=shard,
                        tp=tp,
                        sequence_parallel=parallel,
                        pp=pp,
                        zero=zero,
                        micro_batch=size,
                        schedule=schedule,
                        virtual_stages=turns,
                        recompute=recompute,
                    )
                )
    return plans


def ranked(job: Job) -> list[tuple[Plan, Estimate]]:
    """Legal plans that fit, in the order of the search."""
    priced = [(plan, estimate(job, plan)) for plan in every_plan(job) if not any(faults(job, plan))]
    fitting = [(plan, found) for plan, found in priced if found.fits]
    return sorted(fitting, key=lambda pair: (score(pair[1]), *simplicity(pair[0])))


def score(priced: Estimate) -> float:
    """What plans are ranked by, to nine digits."""
    return float(f"{priced.time.step * (1 + TIGHT_GAIN if priced.verdict == Fits.tight else 1):.9e}")


@st.composite
def small_jobs(draw) -> Job:
    heads = draw(st.sampled_from([2, 3, 4]))
    runs = tuple((draw(st.integers(1, 3)), heads * draw(st.integers(4, 40))) for _ in range(draw(st.integers(1, 2))))
    model = decoder(runs, hidden=heads * 16, heads=heads, vocabulary=draw(st.integers(50, 2000)), tied=draw(st.booleans()))
    nodes, devices = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3)]))
    memory = draw(st.sampled_from([2e6, 4e6, 8e6, 16e6, 1e9]))
    batch = draw(st.sampled_from([1, 2, 3, 4, 6, 7, 8, 11, 12]))
    return small_job(
        model,
        cluster(nodes, devices, memory),
        batch,
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        sequence=draw(st.sampled_from([32, 45])),
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(small_jobs())
def test_the_search_equals_pricing_every_plan_one_by_one(job: Job) -> None:
    expected = ranked(job)
    plans = every_plan(job)
    if not expected:
        with pytest.raises(NothingFits if any(not any(faults(job, plan)) for plan in plans) else InputError):
            search(job)
        return
    answer = search(job, top=5)
    assert [entry.plan for entry in answer.plans] == [plan for plan, _ in expected[:5]]
    assert answer.considered == len(plans)
    assert answer.considered - sum(rejection.count for rejection in answer.rejected) == len(expected)


@settings(max_examples=10, deadline=None)
@given(small_jobs())
def test_one_plan_costs_the_same_alone_and_among_all_others(job: Job) -> None:
    pricer = Pricer(job)
    for box in Space(job).boxes():
        prices = pricer.price(box)
        steps, taken = (np.broadcast_to(part, box.shape) for part in (prices.step, reserved(pricer.setting, prices.allocated)[0]))
        legal = np.broadcast_to(box.legal[0], box.shape)
        for index in list(np.argwhere(legal))[:: max(int(legal.sum()) // 3, 1)]:
            alone = estimate(job, box.plan(tuple(index)))
            assert alone.time.step == pytest.approx(steps[tuple(index)], rel=1e-12)
            assert alone.memory.reserved == pytest.approx(taken[tuple(index)], rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(small_jobs(), st.floats(1.01, 8.0))
def test_more_memory_never_makes_the_best_plan_worse(job: Job, factor: float) -> None:
    group = job.cluster.groups[0]
    larger = group.but(device=group.device.but(memory=group.device.memory * factor))
    before, after = (survey(each, 1).ranking.best for each in (job, job.but(cluster=job.cluster.but(groups=(larger,)))))
    assert not before or after[0].score <= before[0].score * (1 + 1e-9)


@pytest.mark.parametrize("batch", [1, 7, 13, 42, 97, 252, 256])
def test_every_plan_consumes_exactly_the_batch_on_six_nodes_of_seven(batch: int) -> None:
    job = small_job(decoder(((14, 84),), heads=14, hidden=84), cluster(6, 7), batch)
    plans = [entry.plan for entry in search(job, top=50).plans]
    assert plans
    for plan in plans:
        assert plan.dp * plan.micro_batch * plan.micro_batches(batch) == batch
        assert plan.world == 42


def test_a_prime_batch_leaves_the_replicas_that_divide_it() -> None:
    answer = search(small_job(on=cluster(1, 4), batch=13), top=100)
    assert {entry.plan.dp for entry in answer.plans} == {1}
    assert any(rejection.reason == "batch does not divide" and rejection.count > 0 for rejection in answer.rejected)


def test_pins_fix_what_they_name() -> None:
    job = small_job(on=cluster(1, 8), batch=16, pins={"tp": 2, "zero": 2, "recompute": "layer", "micro_batch": 2, "dp": 4})
    for entry in search(job, top=50).plans:
        plan = entry.plan
        assert (plan.tp, plan.zero, plan.recompute, plan.micro_batch, plan.dp, plan.pp) == (2, 2, "layer", 2, 4, 1)


def test_a_whole_plan_as_pins_is_the_only_plan() -> None:
    wanted = Plan(dp_shard=2, tp=2, pp=2, zero=1, schedule=Schedule.interleaved, virtual_stages=2, micro_batch=2)
    pins = {name: getattr(wanted, name) for name in Plan.model_fields if name not in ("version", "layers_per_stage")}
    answer = search(small_job(on=cluster(1, 8), batch=16, pins=pins))
    assert [entry.plan for entry in answer.plans] == [wanted]
    assert answer.considered == 1


def test_a_stage_split_given_as_a_pin_is_kept() -> None:
    answer = search(small_job(on=cluster(1, 2), batch=8, pins={"layers_per_stage": (1, 3)}), top=3)
    assert all(entry.plan.layers_per_stage == (1, 3) for entry in answer.plans)


def test_zero_pinned_on_one_device_is_a_plan() -> None:
    assert search(small_job(on=cluster(1, 1), pins={"zero": 3})).chosen.plan.zero == 3


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tpp": 2}, r"pin 'tpp' is no field of a plan; did you mean 'tp'"),
        ({"dp": 4, "tp": 3, "pp": 2}, r"pins dp\(4\) \* tp\(3\) \* pp\(2\) = 24 but the cluster has 16 devices"),
        ({"cp": 2}, r"pin cp=2 is not offered"),
        ({"tp": 8}, r"no plan is legal: .*tp\(8\) does not divide heads\(4\)"),
        ({"pp": 16}, r"no plan is legal: .*16 stages need as many blocks, the model has 4"),
        ({"dp": 4, "micro_batch": 3}, r"no plan is legal: .*batch 8 is not a multiple of dp\(4\) \* micro_batch\(3\) = 12"),
    ],
)
def test_pins_that_leave_nothing_are_explained_with_the_numbers(pins: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(small_job(on=cluster(2, 8), pins=pins))


def test_rejections_name_the_rule_the_number_and_an_example() -> None:
    answer = search(small_job(on=cluster(1, 8, 3e6), batch=8))
    found = {rejection.reason: rejection for rejection in answer.rejected}
    assert "tp(8) does not divide heads(4)" in found["tp does not divide heads"].example
    assert "8 stages need as many blocks, the model has 4" in found["more stages than blocks"].example
    assert "is not a multiple of dp(8) * micro_batch(2) = 16" in found["batch does not divide"].example
    assert "that a rank can take" in found["does not fit"].example
    assert all(rejection.count > 0 for rejection in answer.rejected)


def test_when_nothing_fits_the_nearest_plan_and_the_way_out_are_named() -> None:
    with pytest.raises(NothingFits) as caught:
        search(named_job("llama2-70b", "1x8:a100-80gb", 64, 4096))
    message = str(caught.value)
    assert message.startswith("no plan fits: the nearest (")
    assert "GiB on rank 0 of 80.0 GiB; optimizer states are" in message
    assert "nodes (16 devices) would fit (" in message or "nodes (24 devices) would fit (" in message


def test_when_a_pin_is_what_does_not_fit_dropping_it_is_the_way_out() -> None:
    pins = {"tp": 2, "pp": 4, "dp": 8, "zero": 0}
    with pytest.raises(NothingFits, match=r"without the pin zero=0 would fit \(dp"):
        search(named_job("llama2-70b", "8x8:a100-80gb", 512, 4096, pins=pins))


def test_at_equal_time_the_simpler_plan_stands_first() -> None:
    times = [(score(entry.estimate), *simplicity(entry.plan)) for entry in search(small_job(batch=16), top=40).plans]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_one_device_is_offered_no_parallelism() -> None:
    answer = search(small_job(on=cluster(1, 1), batch=4))
    assert answer.chosen.plan.world == 1
    assert {entry.plan.schedule for entry in answer.plans} == {Schedule.one_f_one_b}


def test_the_explanation_has_at_most_five_lines_and_names_what_lost() -> None:
    job = named_job("llama2-7b", "1x8:a100-80gb", 512, 4096)
    lines = [say(sentence) for sentence in explain(job, search(job))]
    assert len(lines) <= 5
    assert lines[0].startswith(search(job).chosen.name + ": ")
    assert any(line.startswith("slower: ") and "ZeRO-" in line for line in lines)
    assert any(line.startswith("do not fit in 78.4 GiB: data needs ") for line in lines)


def test_a_chosen_plan_never_needs_more_than_a_rank_can_take() -> None:
    job = named_job("llama2-13b", "4x8:a100-40gb", 512, 4096)
    answer = search(job)
    assert all(entry.estimate.memory.reserved <= usable(Pricer(job).setting) < 40 * GIB for entry in answer.plans)
