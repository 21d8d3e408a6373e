"""Of the optimizer's states no more than must be wait elsewhere."""

from __future__ import annotations

import pytest
from jobs import named_job

from meshwright.base.errors import InputError
from meshwright.cost.step import estimate
from meshwright.search.eased import SAFE, STEP
from meshwright.search.rank import search
from meshwright.spec.plan import parse_plan


def test_the_search_keeps_as_many_states_on_the_device_as_leave_the_same_margin() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    best = search(job, top=1).plans[0]
    whole = estimate(job, best.plan.but(offload_share=100))
    safe = [
        share
        for share in range(STEP, 101, STEP)
        if SAFE.index(estimate(job, best.plan.but(offload_share=share)).verdict) >= SAFE.index(whole.verdict)
    ]
    assert best.plan.offload_share == min(safe) < 100
    assert best.estimate.time.step < whole.time.step
    assert best.estimate == estimate(job, best.plan)


def test_what_waits_and_what_stays_of_a_share_are_all_of_the_states() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    here = estimate(job, parse_plan("dp1"))
    for share in (1, 25, 99):
        found = estimate(job, parse_plan(f"dp1.off-optimizer{share}"))
        assert found.offloaded == pytest.approx(here.memory.optimizer * share / 100)
        assert found.memory.optimizer == pytest.approx(here.memory.optimizer * (1 - share / 100))


def test_a_pinned_share_is_searched_where_it_means_something_and_refused_elsewhere() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    found = search(job.but(pins={"offload_share": 80}), top=1).plans[0]
    assert found.plan.offload_share == 80 and found.estimate == estimate(job, found.plan)
    with pytest.raises(InputError, match="a share is of the optimizer's states"):
        search(job.but(pins={"offload_share": 80, "offload": ("activations",)}), top=1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dp1.off-optimizer0", "greater than or equal to 1"),
        ("dp1.off-activations50", "is not understood"),
        ("dp1.z3.off-optimizer50.off-parameters", "take all of their states along"),
    ],
)
def test_a_share_that_means_nothing_is_one_line(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_plan(name)
