"""All ranks of a mesh call the collectives of each communicator in the same order with the same sizes, and no ranks
wait for each other in a circle. The ranks are traced on the paths of NCCL (traced_mesh.py)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from traced_mesh import RankTrace, differences, stuck, trace

from meshwright.spec.plan import parse_plan

DENSE = """
dp64 dp64.mb2 dp64.z1 dp64.z2 dp64.z3 dp64.z3.rc-full dp8x8.z1 dp8x8.z2 dp8x8.z3 dp64x1.z1 dp64.z3.lc2
dp64.z1.off-optimizer dp64.z3.off-optimizer.off-parameters
dp8.tp8 dp8.tp8.sp dp8.tp8.sp.z1 dp8.tp8.sp.z3.rc-full dp16.tp4.sp.z2 dp2x8.tp4.sp.z3 dp8.tp8.sp.rc-sac.lc2
dp16.cp4 dp16.cp4.ulysses dp16.cp4.ulysses2 dp8.cp8.z3 dp2x4.cp8.z2 dp8.tp4.sp.cp2.z1 dp8.tp4.cp2.ulysses.z3
dp16.pp4 dp16.pp4.gpipe dp16.pp4.interleaved2 dp16.pp4.zbh1 dp16.pp4.zbv dp16.pp4.dualpipev
dp8.pp8.z1 dp8.pp8.zbv.z1 dp8.pp8.interleaved2.z2 dp16.pp4.z3 dp32.pp2.dualpipev
dp4.tp4.sp.pp4.z1 dp2x2.tp2.sp.pp4.cp2.z1 dp4.tp2.pp4.cp2.ulysses.z2.rc-full dp4.tp4.sp.pp4.interleaved2.z3
dp4.tp4.pp4.zbv.order-dp-pp-tp tp8.sp.pp8 dp2.tp2.cp4.pp4.dualpipev.z1
"""
TIED = "dp16.pp4 dp8.tp2.sp.pp4.z1 dp16.pp4.interleaved2 dp16.pp4.zbv dp64.z3"
MIXTURE = """
dp64.ep8 dp64.ep8.z1 dp64.ep8.z2 dp64.ep8.z3 dp8x8.ep8.z3 dp16.tp4.sp.ep4 dp16.pp4.ep4.z1 dp16.pp4.zbv.ep8
dp16.pp4.ep8.z2.dualpipev dp8.tp2.sp.pp4.ep4.interleaved2.z1 dp32.tp2.ep8.z2
"""
PLANS = [
    (kind, plan) for kind, plans in (("llama", DENSE), ("tied", TIED), ("mixture", MIXTURE)) for plan in plans.split()
]
SAMPLE = [("llama", "dp4.tp4.sp.pp4.z1"), ("mixture", "dp64.ep8.z3")]


@pytest.mark.parametrize(
    ("kind", "plan"), [pytest.param(*case, marks=[pytest.mark.soak] * (case not in SAMPLE)) for case in PLANS]
)
def test_all_64_ranks_call_each_collective_in_one_order_without_a_circle_of_waits(kind: str, plan: str) -> None:
    parsed = parse_plan(plan)
    assert parsed.world == 64
    traces = trace(parsed, kind, range(64))
    assert all(each.launches for each in traces)
    assert differences(traces) == [] and stuck(traces) == []


@pytest.fixture(scope="module")
def small() -> list[RankTrace]:
    return trace(parse_plan("dp2.tp2.sp.pp2.interleaved2.z3"), "llama", range(8))


def test_a_call_that_one_rank_leaves_out_is_found(small: list[RankTrace]) -> None:
    """Each launch of rank 5 is left out once."""
    assert differences(small) == [] and stuck(small) == []
    whole = small[5].launches
    for at in range(len(whole)):
        small[5].launches = whole[:at] + whole[at + 1 :]
        found = differences(small)
        small[5].launches = whole
        assert found, f"nobody misses {whole[at]}"


def test_two_calls_in_the_wrong_order_on_one_rank_are_found(small: list[RankTrace]) -> None:
    """Each pair of consecutive launches of rank 5 changes places once. If the pair has one communicator and differs,
    ranks disagree; if another rank makes both launches too, they wait for each other."""
    whole, other, checked = small[5].launches, small[4].launches, 0
    for at, (one, two) in enumerate(pairwise(whole)):
        same_group = one[0].group == two[0].group and one[0].pair == two[0].pair
        shared = not same_group and any(
            one[0].group == a[0].group and two[0].group == b[0].group for a, b in pairwise(other)
        )
        if (same_group and one == two) or not (same_group or shared):
            continue
        small[5].launches = [*whole[:at], two, one, *whole[at + 2 :]]
        found = differences(small) or stuck(small)
        small[5].launches = whole
        checked += 1
        assert found, f"nobody notices {two} before {one}"
    assert checked > 20
