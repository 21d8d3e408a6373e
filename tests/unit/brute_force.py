"""Random questions to the planner, and their answers by an exhaustive search that prices every plan by itself.

`python tests/unit/brute_force.py 0:500` compares both for these seeds, and writes one JSON line for each. The result of
500 is in bench/results/exact.md.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, pairwise, permutations, product
from math import gcd, inf
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from jobs import cluster, decoder, device, small_job

from meshwright.core.errors import InputError, NothingFits
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import memory_limit, reserved_bytes
from meshwright.planner.cost.named_plans import with_chosen_bucket
from meshwright.planner.cost.overlap import choose_bucket
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.step import compile_seconds, estimate
from meshwright.planner.cost.uncertainty import unmeasured_features
from meshwright.planner.search import group_bounds
from meshwright.planner.search.best_plans import (
    RISK_MARGIN,
    SearchObjective,
    risk_adjusted_seconds,
    simplicity_key,
    uses_unmeasured_link,
)
from meshwright.planner.search.branch_and_bound import PlanSearch
from meshwright.planner.search.choices import divisors, offered_recompute
from meshwright.planner.search.ranking import search_cluster_sizes, search_plans, smaller_clusters
from meshwright.planner.search.run_cost import with_power_as_price
from meshwright.planner.search.space import PlanSpace
from meshwright.spec.cluster import Cluster, Link
from meshwright.spec.constraints import is_supported, plan_violations
from meshwright.spec.enums import MESH_AXES
from meshwright.spec.job import Job
from meshwright.spec.model import LayerSpec, ModelSpec, ParameterSpec
from meshwright.spec.plan import Plan

Choose = Callable[[Sequence[Any]], Any]
"""Returns one of several values, such as random.Random(1).choice."""

ROUNDING = 1e-8
"""Two scores that differ by less may change places."""

# --- random questions


class Question(NamedTuple):
    """What is asked about a job. `slack`: the longest step, relative to the best score without this limit."""

    job: Job
    objective: SearchObjective = SearchObjective.fastest
    runnable: bool = False
    slack: float = inf

    @property
    def features(self) -> tuple[str, ...]:
        """Returns what the random choices have covered."""
        job = self.job
        found = {
            "unlike groups": len({group.device.name for group in job.cluster.groups}) > 1,
            "racks": len(job.cluster.tiers) == 1,
            "racks and sites": len(job.cluster.tiers) == 2,
            "experts": bool(job.model.experts),
            "pins": bool(job.pins),
            "pinned compile": "compile" in job.pins,
            "offload": any(group.host_bandwidth or group.storage_bandwidth for group in job.cluster.groups),
            "trust measured": job.trust == "measured",
            "runnable": self.runnable,
            "longest step": self.slack < inf,
            f"objective {self.objective.value}": True,
            f"precision {job.workload.precision}": True,
            f"optimizer {job.workload.optimizer.name}": True,
        }
        return tuple(name for name, there in found.items() if there)


def attending(hidden: int, experts: int, derived: float) -> Callable[[LayerSpec], LayerSpec]:
    """A block with what context ranks exchange, what selective recompute drops, a share that follows from the rest and,
    where there are `experts`, a stack of them."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if layer.name != "block":
            return layer
        stack = (
            (ParameterSpec(name="experts", shape=(experts, 2 * hidden, hidden), split=1, experts=experts),)
            if experts
            else ()
        )
        return layer.but(
            parameters=(*layer.parameters, *stack),
            core_fixed=layer.fixed_split,
            derived_split=derived * layer.saved_split,
            derived_moved=derived * layer.moved,
            fused_moved=0.5 * layer.moved,
            query_width=hidden,
            key_value_width=2 * hidden,
            routed=hidden if experts else 0,
            routed_saved=hidden if experts else 0,
        )

    return changed


def random_model(choose: Choose) -> ModelSpec:
    """Returns one or two runs of blocks, sometimes with experts."""
    heads = choose([2, 3, 4])
    runs = tuple((choose([1, 2, 3]), heads * choose(range(4, 41))) for _ in range(choose([1, 2])))
    model = decoder(
        runs, hidden=heads * 16, heads=heads, vocabulary=choose(range(50, 2001)), tied=choose([True, False])
    )
    changed = attending(heads * 16, choose([0, 0, 2, 4]), choose([0.0, 0.4]))
    return model.but(layers=tuple(map(changed, model.layers)))


def random_host(choose: Choose) -> dict[str, float]:
    """Returns what a node has for offload: nothing, a link to the host, or a disk."""
    slow, fast = {"host_bandwidth": 16e9, "host_memory": 1e7}, {"host_bandwidth": 1e12, "host_memory": 1e9}
    disk = {"storage_bandwidth": choose([1e9, 1e12])}
    updates = {"host_update": 1e9}
    found: dict[str, float] = choose([{}, {}, slow, fast, {**slow, **updates}, {**fast, **updates}, disk, fast | disk])
    return found


def random_tiers(choose: Choose, on: Cluster, spans: tuple[int, ...]) -> Cluster:
    """Returns the cluster with racks of spans[0] devices, and sites of spans[1]."""
    names, rates = ("racks", "sites"), ([1e8, 5e9, 50e9], [1e7, 1e9])
    tiers = tuple(
        Link(name=name, bandwidth=choose(rate), latency=1e-4, span=span)
        for name, rate, span in zip(names, rates, (*spans[1:], 0), strict=False)
    )
    return on.but(network=on.network.but(span=spans[0]), tiers=tiers)


SHAPES: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    *((1, 1, ()), (1, 2, ()), (1, 3, ()), (1, 4, ()), (2, 2, ()), (2, 3, ())),
    *((4, 1, (2,)), (6, 1, (3,)), (4, 2, (4,)), (8, 1, (2, 4)), (4, 1, (2,)), (8, 1, (2, 4))),
)
"""Nodes, devices of a node, and devices of a rack and of a site."""

UNLIKE_SHAPES = (((1, 1), (1, 1)), ((1, 2), (1, 2)), ((1, 2), (2, 2)), ((1, 2), (1, 1)), ((1, 1), (1, 1), (1, 1)))
"""Nodes and devices of a node, of each group."""


def random_cluster(choose: Choose) -> Cluster:
    """Returns equal nodes, in racks and sites or not, or groups of unlike nodes."""
    memory, host = choose([2e6, 4e6, 8e6, 16e6, 1e9]), random_host(choose)
    nodes, devices, spans = choose(SHAPES)
    on = cluster(nodes, devices, memory, power_watts=choose([300.0, 700.0]), price=choose([1.0, 2.5]))
    group = on.groups[0].but(**host)
    if choose([False, False, False, True]):
        groups = []
        for at, (nodes, devices) in enumerate(choose(UNLIKE_SHAPES)):
            slower, less = (choose([1.5, 2.0, 3.0, 20.0]), choose([0.5, 1.0, 2.0])) if at else (1.0, 1.0)
            peak = {name: rate / slower for name, rate in group.device.peak.items()}
            rates = {"bandwidth": 2e12 / slower, "peak": peak, "price": choose([0.5, 3.0]), "power_watts": 400.0}
            other = device(memory / less, name=f"kind{at}", **rates)
            groups.append(group.but(nodes=nodes, devices=devices, device=other))
        return on.but(groups=tuple(groups))
    on = on.but(groups=(group,))
    return random_tiers(choose, on, spans) if spans else on


def random_pins(choose: Choose, on: Cluster, experts: int) -> dict[str, Any]:
    """Returns pins, or none."""
    world = on.devices
    files = "" if on.groups[0].host_bandwidth else "-disk"
    ways = [("optimizer",), ("activations",), ("optimizer", "activations")]
    offloads = [{"offload": tuple(name + files for name in way)} for way in ways]
    there = bool(on.groups[0].host_bandwidth or on.groups[0].storage_bandwidth)
    pins: list[dict[str, Any]] = [
        *[{}] * 9,
        *(offloads if there else []),
        *({"recompute": kind} for kind in ("none", "full", "sac", "attn")),
        *({"micro_batch": size} for size in (1, 2)),
        *({"pp": 2 - world % 2}, {"tp": 2 - world % 2}, {"dp": world}, {"cp": 2 - world % 2}),
        *({"zero": zero} for zero in (0, 1, 3)),
        *({"compile": choice} for choice in (True, False)),
        *({"schedule": name} for name in ("1f1b", "zbh1")),
        *([{"ep": 2}] if experts else []),
        {"tp": 2 - world % 2, "zero": 1, "recompute": "full"},
    ]
    found: dict[str, Any] = choose(pins)
    return found


def random_job(choose: Choose) -> Job:
    """Returns a job of some hundred plans."""
    model, on = random_model(choose), random_cluster(choose)
    job = small_job(
        model,
        on,
        choose([1, 2, 3, 4, 6, 7, 8, 11, 12]),
        precision=choose(["fp32", "bf16", "bf16", "fp16"]),
        sequence=choose([32, 45]),
        steps=choose([1, 200, 10**9]),
        optimizer={"name": choose(["adamw", "adamw", "adamw", "sgd", "muon", "adafactor"])},
        pins=random_pins(choose, on, model.experts),
    )
    return job.but(trust=choose(["all", "all", "measured"]))


def random_question(choose: Choose) -> Question:
    """Returns a random job with an objective and limits."""
    objective = choose([*["fastest"] * 4, "fewest", "cheapest", "energy", "headroom"])
    slack = choose([inf, inf, inf, 1.2, 0.5]) if objective in ("fastest", "fewest", "cheapest", "energy") else inf
    return Question(random_job(choose), SearchObjective(objective), choose([False, False, True]), slack)


# --- the exhaustive search


def every_plan(job: Job, runnable: bool = False, offloading: bool = True) -> Iterator[Plan]:
    """All plans of the space, one by one: the boxes of every region taken apart."""
    for box in PlanSpace(job, runnable, offloading, choose_bucket(CostModel(job).setting)).boxes():
        for index in np.argwhere(np.broadcast_to(box.legal[0], box.shape)).tolist():
            yield box.plan(tuple(index))


def score_of(pricer: CostModel, plan: Plan, headroom: bool = False) -> float | None:
    """The score of a plan by itself, if it fits."""
    job, limit = pricer.setting.job, memory_limit(pricer.setting)
    box = grid_of_plan(plan, job.workload.batch, job.model.blocks)
    prices, compiling = pricer.price(box), compile_seconds(pricer.setting, box, pricer.ranks(box).layers)
    taken, safe = reserved_bytes(pricer.setting, prices.allocated, driver_bytes(pricer.setting, box))
    if float(taken.item()) > limit or float(prices.on_host.item()) > pricer.setting.host_memory:
        return None
    if headroom:
        return float(taken.item())
    risks = (float(safe.item()) > limit) + uses_unmeasured_link(job.cluster, plan.offload)
    seconds = float(prices.step.item()) + float(compiling.item()) / job.workload.steps
    return seconds * (1 + RISK_MARGIN) ** (risks + len(unmeasured_features(job.cluster, plan)))


def ranked(job: Job, runnable: bool = False, headroom: bool = False) -> dict[Plan, float]:
    """Legal plans that fit, with their scores, in the order of the search."""
    pricer = CostModel(job)
    legal = (plan for plan in every_plan(job, runnable, not headroom) if not any(plan_violations(job, plan)))
    plans = [plan for plan in legal if not runnable or is_supported(plan, job.workload.recipe)]
    plans = [plan for plan in plans if not headroom or not plan.recompute_layers]  # not searched (SearchObjective)
    fitting = [(score, plan) for plan in plans if (score := score_of(pricer, plan, headroom)) is not None]
    return {
        plan: score
        for score, plan in sorted(fitting, key=lambda pair: (float(f"{pair[0]:.9e}"), *simplicity_key(pair[1])))
    }


def sized_answers(question: Question) -> list[tuple[float, dict[Plan, float]]]:
    """Returns the plans of each cluster size that the objective allows, with their price: of all sizes in ascending
    order, or of the whole cluster."""
    job, objective = question.job, question.objective
    if objective not in (SearchObjective.fewest, SearchObjective.cheapest, SearchObjective.energy):
        return [(1.0, ranked(job, question.runnable, objective == SearchObjective.headroom))]
    found = []
    on = with_power_as_price(job.cluster) if objective == SearchObjective.energy else job.cluster
    for size in smaller_clusters(on):
        try:
            found.append((size.price or 1.0, ranked(job.but(cluster=size), question.runnable)))
        except InputError:  # pins that this size does not allow
            continue
    return found


def best_answer(question: Question, sizes: list[tuple[float, dict[Plan, float]]], longest: float) -> dict[Plan, float]:
    """Returns the plans of the size that is best for the objective, among scores of at most `longest`."""
    within = [
        (price, {plan: score for plan, score in every.items() if score <= longest * (1 + ROUNDING)})
        for price, every in sizes
    ]
    within = [(price, every) for price, every in within if every]
    if not within:
        return {}
    if question.objective in (SearchObjective.cheapest, SearchObjective.energy):
        return min(within, key=lambda pair: float(f"{pair[0] * next(iter(pair[1].values())):.9e}"))[1]
    return within[0][1]


# --- pipelines over unlike groups


def every_pipeline(job: Job, runnable: bool = False) -> Iterator[Plan]:
    """1f1b over one or several groups, with every cut of the blocks, as search/heterogeneous.py describes them."""
    groups, precision = job.cluster.groups, job.workload.recipe.rate
    sizes = [group.nodes * group.devices for group in groups]
    for count in range(len(groups) if runnable else 1, len(groups) + 1):
        for chosen in combinations(range(len(groups)), count):
            orders = {
                chosen,
                tuple(sorted(chosen, key=lambda at: -groups[at].device.memory)),
                tuple(sorted(chosen, key=lambda at: -groups[at].device.peak[precision])),
            }
            for devices in divisors(gcd(*(sizes[at] for at in chosen))) if count > 1 else ():
                for order in orders & set(permutations(chosen)):
                    placement = tuple(at for at in order for _ in range(sizes[at] // devices))
                    yield from pipelines_of(job, placement, devices)


def pipelines_of(job: Job, placement: tuple[int, ...], devices: int) -> Iterator[Plan]:
    """Every cut, degree, micro-batch and choice of memory on one placement."""
    pp, blocks, batch = len(placement), job.model.blocks, job.workload.batch
    cuts = [(0, *cut, blocks) for cut in combinations(range(1, blocks), pp - 1)]
    splits = [tuple(after - before for before, after in pairwise(cut)) for cut in cuts]
    for tp in divisors(gcd(devices, *(job.cluster.groups[at].devices for at in placement))) if splits else ():
        dp = devices // tp
        sizes = [size for size in divisors(batch) if batch % (dp * size) == 0]
        parallel, stages = (False, True) if tp > 1 else (False,), (0, 1, 2, 3) if dp > 1 else (0,)
        for split, size, sp, kind, zero in product(splits, sizes, parallel, offered_recompute(job), stages):
            yield Plan(
                dp_replicate=1 if zero else dp,
                dp_shard=dp if zero else 1,
                tp=tp,
                pp=pp,
                zero=zero,
                micro_batch=size,
                sequence_parallel=sp,
                recompute=kind,
                layers_per_stage=split,
                placement=placement,
            )


def unlike_scores(question: Question) -> dict[Plan, float]:
    """Returns the plans over unlike groups that fit, with their scores: on one group, and pipelines over several."""
    job, found = question.job, {}
    if job.pins or question.objective != SearchObjective.fastest or len(job.cluster.groups) < 2:
        return {}
    for plan in every_pipeline(job, question.runnable):
        chosen = with_chosen_bucket(job, plan)
        if not any(plan_violations(job, chosen)) and (priced := estimate(job, chosen)).fits:
            found[chosen] = risk_adjusted_seconds(job, chosen, priced)
    for group in range(len(job.cluster.groups)) if not question.runnable else ():
        only = job.but(
            cluster=job.cluster.but(groups=(job.cluster.groups[group],), tiers=()), pins={"schedule": "1f1b"}
        )
        try:
            found |= {plan.but(placement=(group,) * plan.pp): score for plan, score in ranked(only).items()}
        except InputError:  # these devices do not divide the batch or the model
            continue
    return found


# --- both


def usual(plan: Plan) -> bool:
    """Returns whether a plan is one that the search ranks after the best one too."""
    return not (plan.recompute_layers or plan.offload or plan.context != "ring" or plan.axes != MESH_AXES)


def differences(question: Question) -> list[str]:
    """Returns what the search answers otherwise than the exhaustive search."""
    job = question.job
    try:
        sizes = sized_answers(question)
    except InputError:
        sizes = []
    unlike = unlike_scores(question)
    whole = best_answer(question, sizes, inf)
    longest = question.slack * next(iter(whole.values())) if whole and question.slack < inf and not unlike else inf
    every = best_answer(question, sizes, longest)
    with mock.patch.object(group_bounds, "SMALL_GROUP_PLANS", 0):  # else these groups are too small for its bounds
        try:
            answer = search_plans(job, 5, question.objective, question.runnable, longest)
        except (InputError, NothingFits):
            answer = None
        if answer is None or not (every or unlike):
            there = "a plan" if answer else "none"
            even = answer is not None and not answer.chosen.plan.shares and not answer.chosen.plan.placement
            return [f"search: {there}, by hand {len(every)} and {len(unlike)}"] if (every or unlike) or even else []
        asked, objective = job, question.objective
        if objective == SearchObjective.energy:
            asked, objective = job.but(cluster=with_power_as_price(job.cluster)), SearchObjective.cheapest
        found = search_cluster_sizes(asked, 5, objective, question.runnable, longest) if every else None
    return [*_rank_differences(found, every), *_choice_differences(question, answer, every, unlike)]


def _rank_differences(found: PlanSearch | None, every: dict[Plan, float]) -> list[str]:
    """Returns the places at which the ranking over equal ranks differs."""
    ours = [candidate.plan for candidate in found.ranking.best] if found is not None else []
    said = [] if bool(ours) == bool(every) else [f"{len(ours)} plans, by hand {len(every)}"]
    for mine, wanted in ((ours[:1], every), (filter(usual, ours), filter(usual, every))):
        for one, other in zip(mine, wanted, strict=False):
            if one != other and not (one in every and abs(every[one] / every[other] - 1) <= ROUNDING):
                said.append(f"{one.name} {every.get(one)}, by hand {other.name} {every[other]}")
    return said


def _choice_differences(
    question: Question, answer: Any, every: dict[Plan, float], unlike: dict[Plan, float]
) -> list[str]:
    """Returns whether the chosen plan is worse than the best by hand, or not legal."""
    job, chosen = question.job, answer.chosen
    best = min([*every.values(), *unlike.values()])
    if answer.devices != job.cluster.devices:
        job = job.but(cluster=next(each for each in smaller_clusters(job.cluster) if each.devices == answer.devices))
    score = (
        chosen.estimate.memory.reserved
        if question.objective == SearchObjective.headroom
        else risk_adjusted_seconds(job, chosen.plan, chosen.estimate)
    )
    said = [] if score <= best * (1 + ROUNDING) else [f"{chosen.name} {score}, by hand {best}"]
    uneven = chosen.plan.shares or chosen.plan.micro_batch_sizes or chosen.plan.shard_weights
    partly = chosen.plan.offload and min(chosen.plan.offload_share, chosen.plan.weights_share) < 100
    if not uneven and not partly and score < best * (1 - ROUNDING):
        said.append(f"{chosen.name} {score} is no plan by hand: best {best}")
    said += [f"{chosen.name}: {fault.message}" for fault in plan_violations(job, chosen.plan)]
    return said


def considered(job: Job) -> int:
    """Returns the number of plans of the space, each legal or rejected for a reason."""
    space = PlanSpace(job)
    legal = sum(region.legal for region in space.groups())
    assert space.considered == legal + sum(it.count for it in space.rejected.values())
    return space.considered


def question_of(seed: int, most: int) -> Question:
    """Returns the first question from `seed` on whose whole space has at most `most` plans. Seeds of one question are
    1,000,000 apart."""
    while True:
        question = random_question(random.Random(seed).choice)
        try:
            plans = len(list(islice(every_plan(question.job), most + 1)))
        except InputError:
            return question
        if plans <= most:
            return question
        seed += 1_000_000


def main(seeds: str, most: str = "1200") -> None:
    """Prints one JSON line for each seed."""
    first, last = map(int, seeds.split(":"))
    for seed in range(first, last):
        began = time.process_time()
        question = question_of(seed, int(most))
        try:
            said = differences(question)
        except Exception as error:  # a crash of the search is a difference too
            said = [f"{type(error).__name__}: {error}"]
        seconds = round(time.process_time() - began, 2)
        print(json.dumps({"seed": seed, "seconds": seconds, "features": question.features, "said": said}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
