"""Networks with racks, pods and sites: two tiers cost what near and far links cost, and more tiers follow the same
rules."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from bench.emulation.emulated_cluster import scale_to_machine

from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.planner.cost.links import (
    LinkModel,
    all_to_all_seconds,
    collective_rates,
    dispatch_seconds,
    link_model,
    p2p_seconds,
    ranks_by_tier,
)
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.cluster_parser import cluster_from_data, read_cluster
from meshwright.planner.inputs.model_parser import read_model
from meshwright.planner.search.advice import improved_jobs
from meshwright.planner.search.infeasible import fastest_plan
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.simulate.run import simulate
from meshwright.report.plans import placement_messages
from meshwright.spec.cluster import Link
from meshwright.spec.estimate import Estimate
from meshwright.spec.grid import rank_strides
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import Workload

NEAR = Link(name="near", bandwidth=300e9, latency=3e-6, adding=1.4, meeting=1e-6)
FAR = Link(name="far", bandwidth=25e9, latency=8e-6, efficiency=0.9, meeting=5e-6)
WAN = Link(name="wan", bandwidth=1e8, latency=2e-2, efficiency=1.0)

TWO_LEVELS = {
    (8, 8, 1, False): (0.001816274480977, 0.002136631196792, 0.001392843122842, 0.001038411764706, 0.001180470588235),
    (8, 4, 8, False): (0.010688, 0.0208, 0.01113544511501, 0.0068529375, 0.01334633333333),
    (8, 64, 1, False): (0.005144625, 0.008775407407407, 0.01686781563061, 0.00967276171875, 0.01334633333333),
    (8, 16, 2, False): (0.004253, 0.00793, 0.01223013075057, 0.0068529375, 0.01334633333333),
    (7, 2, 1, False): (0.006950666666667, 0.01370933333333, 0.0007437566691394, 0.0005972352941176, 0.01334633333333),
    (6, 12, 1, False): (0.00269137688704, 0.00519075377408, 0.008099717625792, 0.003142, 0.01334633333333),
    (8, 4, 1, True): (0.001410531934485, 0.00282106386897, 0.001129442437831, 0.0008913529411765, 0.001180470588235),
    (2, 8, 1, True): (0.007738093420413, 0.01547618684083, 0.01157796688705, 0.0068529375, 0.01334633333333),
    (1, 4, 1, True): (0.01235089023002, 0.02470178046004, 0.01113544511501, 0.0068529375, 0.01334633333333),
    (4, 6, 2, True): (0.006772318591956, 0.01354463718391, 0.01014619838648, 0.005366794238683, 0.01334633333333),
}
"""Domain, ranks, stride and gloo: the seconds that the model with one near and one far link gave, before tiers."""


def seconds_of(links: LinkModel, ranks: int, stride: int) -> tuple[float, ...]:
    """Four gathers, four reductions, an all-to-all, a dispatch to four experts and a message, of 300 MB."""
    rates, size = collective_rates(links, ranks, stride), np.array(3e8)
    return (
        float(rates.gather(3e8, 4)),
        float(rates.reduce(3e8, 4)),
        float(all_to_all_seconds(links, ranks, stride, size)),
        float(dispatch_seconds(links, ranks, stride, size, 4.0)),
        float(p2p_seconds(links, size, ranks, stride)),
    )


@pytest.mark.parametrize("case", TWO_LEVELS, ids=str)
def test_two_tiers_cost_what_a_near_and_a_far_link_cost(case: tuple[int, int, int, bool]) -> None:
    domain, ranks, stride, handed = case
    found = seconds_of(LinkModel((domain,), (NEAR, FAR), handed), ranks, stride)
    assert found == pytest.approx(TWO_LEVELS[case], rel=1e-12)


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize(("ranks", "stride"), [(8, 1), (4, 8), (16, 8), (128, 1), (32, 2), (2, 64)])
def test_an_outer_tier_with_the_same_link_changes_nothing(ranks: int, stride: int, handed: bool) -> None:
    flat, tiered = (LinkModel(spans, (NEAR, *[FAR] * len(spans)), handed) for spans in ((8,), (8, 32)))
    assert seconds_of(tiered, ranks, stride) == pytest.approx(seconds_of(flat, ranks, stride), rel=1e-12)


def test_only_groups_that_leave_their_site_pay_for_the_network_between_sites() -> None:
    flat, sites = LinkModel((8,), (NEAR, FAR)), LinkModel((8, 64), (NEAR, FAR, WAN))
    for group in ((8, 1), (8, 8), (64, 1), (16, 4)):
        assert seconds_of(sites, *group) == seconds_of(flat, *group)
    # the halves of 64 ranks send 300 MB each way over 64 links of 100 MB/s, in four calls with two hops of 20 ms
    assert collective_rates(sites, 128, 1).bandwidth == 64e8
    assert float(collective_rates(sites, 2, 64).reduce(3e8)) == pytest.approx(3.0 + 0.04, rel=0.2)
    assert float(p2p_seconds(sites, np.array(3e8), 2, 64)) == pytest.approx(3.02)


def test_nested_blocks_have_a_network_for_each_tier() -> None:
    cluster = read_cluster("2x(4x(8x8:h100)@ib)@8x100Gb")
    links = link_model(cluster)
    assert (cluster.devices, cluster.blocks, links.spans) == (512, 2, (8, 64, 256))
    assert [link.name for link in links.links] == ["NVLink4", "400 Gbit/s a device", "ib-ndr", "8x100Gb"]
    assert cluster.tiers[-1].bandwidth == 8 * 12.5e9 / 256  # the ports of a site
    for group, tier in ((8, 1), 0), ((8, 8), 1), ((4, 64), 2), ((512, 1), 3), ((2, 256), 3):
        assert len(ranks_by_tier(links, *group)) == tier + 1
    flat, same = read_cluster("2x(2x(2x8:h100))"), read_cluster("8x8:h100")
    assert flat.but(name=same.name) == same
    unlike = read_cluster("2x(1x8:h100+1x8:a100-80gb)@wan")
    assert [group.device.name for group in unlike.groups] == ["h100", "a100-80gb"] * 2


def test_a_cluster_file_has_the_same_tiers() -> None:
    group = {"nodes": 32, "devices": 8, "device": "h100"}
    tiers = [{"name": "ib", "bandwidth": "50 GB/s", "span": 64}, {"name": "wan", "bandwidth": "1 GB/s"}]
    network = {"name": "rail", "bandwidth": "50 GB/s", "span": 16}
    data: dict[str, Any] = {"name": "mine", "groups": [group], "network": network, "tiers": tiers}
    assert link_model(cluster_from_data(data, "mine.yaml")).spans == (8, 16, 64)
    for span in (0, 12, 96):
        wrong = {**data, "network": {**network, "span": span}}
        with pytest.raises(InputError, match=rf"mine.yaml: rail has span {span}, but .* a multiple of 8 that divides"):
            cluster_from_data(wrong, "mine.yaml")


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("2x(4x(8x8:h100)@ib", 2, "this bracket is not closed"),
        ("2x(8x8:h100)@ib)", 15, "this bracket closes nothing"),
        ("2x(8x8:h100)@wan)", 16, "this bracket closes nothing"),
        ("(8x8:h100)@ib", 0, "a bracket must follow a number of blocks and x"),
        ("0x(8x8:h100)@ib", 0, "at least 1 block"),
        ("2x(8x8h100)@wan", 6, "'8x8h100' is not NODESxDEVICES:device"),
        ("2x(8x8:h10)@wan", 7, "device 'h10' is not in the catalog; did you mean"),
        ("2x(8x8:h100)@lan", 13, "link 'lan' is neither a rate"),
        ("2x(8x8:h100)+1x8:h100", 12, "only @LINK may follow a block"),
        ("2x(4x(8x8:h100)@ib)x", 19, "only @LINK may follow a block"),
        ("2x()@wan", 3, "is not NODESxDEVICES:device"),
    ],
)
def test_a_mistake_in_nested_blocks_has_a_caret_under_it(
    text: str, at: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--cluster", text]) == 2
    first, shown, caret = capsys.readouterr().err.rstrip("\n").split("\n")[:3]
    assert message in first
    assert shown.strip() == text and caret.index("^") - shown.index(text) == at and caret.strip() == "^"


SITES = "2x(2x(2x8:h100)@ib)@wan"


def on_sites(plan: str, cluster: str = SITES, **workload: Any) -> tuple[Job, Estimate]:
    work = Workload(**{"batch": 64, "sequence": 2048, **workload})
    job = Job(model=read_model("llama2-7b"), cluster=read_cluster(cluster), workload=work)
    return job, estimate(job, parse_plan(plan))


def test_replicas_on_sites_are_cheaper_than_shards_or_stages_across_them() -> None:
    replicas, shards, tensor = (on_sites(plan)[1].time.data for plan in ("dp2x32.z3", "dp64.z3", "dp32.tp2.z3"))
    flat = on_sites("dp2x32.z3", "8x8:h100")[1].time.data
    assert flat < replicas < shards and replicas < tensor


def test_local_steps_across_sites_pay_the_network_between_them_once_in_50_steps() -> None:
    every, local = (on_sites("dp2x32.z3", local=local)[1].time.data for local in (None, {"replicas": 2, "steps": 50}))
    inside = on_sites("dp32.z3", "2x(2x8:h100)@ib")[1].time.data
    wan = every - inside
    assert wan > 10 * inside
    assert local - inside == pytest.approx(wan / 50, rel=0.2)
    best = fastest_plan(dict(improved_jobs(on_sites("dp2x32.z3")[0]))["local"])
    assert best is not None and "dp2x" in best.plan.name


def test_the_search_places_replicas_across_sites_and_says_so() -> None:
    job = on_sites("dp2x32.z3", batch=1024)[0]
    plan = search_plans(job).chosen.plan
    (line,) = placement_messages(job, plan)
    strides = rank_strides(plan)
    assert plan.tp * strides["tp"] <= 8 and "wan" in line and "connects 64: dp_replicate" in line
    assert placement_messages(job.but(cluster=read_cluster("8x8:h100")), plan) == []


def test_a_simulated_message_to_another_site_takes_the_time_of_its_network() -> None:
    found = {}
    for cluster in ("2x(2x8:h100)@ib", "2x(2x8:h100)@wan"):
        job, priced = on_sites("dp16.pp2.z1", cluster)
        played = simulate(job, parse_plan("dp16.pp2.z1"))
        assert played.seconds == pytest.approx(priced.time.step, rel=0.1)
        found[cluster] = min(span.end - span.start for cell in played.cells for span in cell.messages)
    near, wan = found.values()
    assert (wan - 0.025) / (near - 5e-6) == pytest.approx(50 / 0.04, rel=1e-3)


def test_an_emulated_cluster_has_an_uplink_for_each_site() -> None:
    scaled = scale_to_machine(read_cluster("2x(2x1:cpu)@100Mb"), 4, 80e9)
    (sites,) = scaled.tiers
    assert (scaled.nodes, sites.blocks) == ((0, 1, 2, 3), (0, 0, 1, 1))
    assert sites.rate == pytest.approx(2 * 12.5e6 * 0.85 / scaled.motion)


def test_plan_as_json_keeps_the_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama2-7b", "--cluster", SITES, "--batch", "64", "--json"]) == 0
    cluster = json.loads(capsys.readouterr().out)["job"]["cluster"]
    assert [cluster["network"]["span"], *(tier["span"] for tier in cluster["tiers"])] == [16, 32, 0]
