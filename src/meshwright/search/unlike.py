"""Plans over unlike groups of nodes, and plans that leave groups out.

The space is, for every choice of groups: of one group, all plans of its devices alone; of several, pipelines of 1f1b whose ranks each lie on one
group, groups in the order of their memory (early ranks hold most micro-batches), of their speed, or as the cluster names them; the devices of
a rank divide those of every group; tensor ranks, micro-batch, sequence parallelism, recompute and ZeRO as ever; blocks cut in every
way where these are few, else evenly, or so that each rank takes as many as its speed allows at some micro-batch (block by block to the rank that
then ends first); and data parallelism with unlike shares (`shares.py`). Groups that could not be as fast as what is found even at their peak are left out without pricing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import comb, gcd

import numpy as np

from meshwright.base.errors import InputError
from meshwright.cost import unlike
from meshwright.cost.box import Again, Box, Layout, MicroBatch, Order, Shards
from meshwright.cost.hiding import bucket
from meshwright.cost.memory import ample, reserved, usable
from meshwright.cost.price import Pricer
from meshwright.cost.setting import setting
from meshwright.cost.step import model_flops
from meshwright.search import shares
from meshwright.search.caution import TIGHT_GAIN
from meshwright.search.division import divisors
from meshwright.search.ranking import rounded
from meshwright.search.survey import survey
from meshwright.search.worth import offered
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, Recompute, Schedule
from meshwright.spec.rules import faults, tensor_faults
from meshwright.spec.runs import runs

FEW = 100
"""Ways to cut the blocks that are all tried."""

Scored = tuple[float, Plan]


def plans(job: Job, top: int, runnable: bool = False) -> list[Scored]:
    """The best plans that place ranks on groups or share micro-batches out unevenly, with their scores; `runnable`: of those that run."""
    groups, precision = job.cluster.groups, job.workload.recipe.rate
    if job.pins or all(group.device == job.cluster.groups[0].device for group in job.cluster.groups):
        return []
    found: list[Scored] = [pair for pair in shares.plans(job, top) if runs(pair[1]) or not runnable]
    fewest = len(groups) if runnable else 1  # ranks that are started all take part
    choices = [chosen for count in range(fewest, len(groups) + 1) for chosen in combinations(range(len(groups)), count)]
    rates = {chosen: sum(groups[at].nodes * groups[at].devices * groups[at].device.peak[precision] for at in chosen) for chosen in choices}
    for chosen in sorted(choices, key=lambda chosen: -rates[chosen]):
        best = min((score for score, _ in found), default=np.inf)
        if model_flops(job) / rates[chosen] <= best:
            found += alone(job, chosen[0], top, best) if len(chosen) == 1 else across(job, chosen)
    return sorted((pair for pair in found if not any(faults(job, pair[1]))), key=lambda pair: (rounded(pair[0]), pair[1].name))[:top]


def alone(job: Job, group: int, top: int, ceiling: float) -> Iterator[Scored]:
    """The best plans of one group by itself, in the order that is priced for placements."""
    only = job.but(cluster=job.cluster.but(groups=(job.cluster.groups[group],)), pins={"schedule": Schedule.one_f_one_b})
    try:
        best = survey(only, top, ceiling=ceiling).ranking.best
    except InputError:
        return
    for candidate in best:
        yield candidate.score, candidate.plan.but(placement=(group,) * candidate.plan.pp)


def across(job: Job, groups: tuple[int, ...]) -> list[Scored]:
    """The best plan of every layout of a pipeline over `groups`."""
    kinds = [job.cluster.groups[group] for group in groups]
    sizes = {group: kind.nodes * kind.devices for group, kind in zip(groups, kinds, strict=True)}
    precision, world = job.workload.recipe.rate, sum(sizes.values())
    orders = {
        groups,
        tuple(sorted(groups, key=lambda at: -job.cluster.groups[at].device.memory)),
        tuple(sorted(groups, key=lambda at: -job.cluster.groups[at].device.peak.get(precision, 0.0))),
    }
    on = unlike.pricers(job, groups, world)
    found: list[Scored] = []
    for devices in divisors(gcd(*sizes.values())):
        pp = world // devices
        if 1 < pp <= job.model.blocks:
            for tp in divisors(gcd(devices, *(kind.devices for kind in kinds))):
                for order in sorted(orders):
                    placement = tuple(group for group in order for _ in range(sizes[group] // devices))
                    found += best_of(job, on, placement, tp, devices // tp)
    return found


def best_of(job: Job, on: dict[int, Pricer], placement: tuple[int, ...], tp: int, dp: int) -> Iterator[Scored]:
    """The best plan of one placement."""
    batch, pp = job.workload.batch, len(placement)
    sizes = [size for size in divisors(batch) if batch % (dp * size) == 0]
    if not sizes or any(tensor_faults(Plan(tp=tp), job.model.divisible, job.model.tensor_parallel)):
        return
    shards = [Shards(0, dp, 1), *(Shards(zero, 1, dp) for zero in (1, 2, 3) if dp > 1)]
    again = tuple(Again(kind) for kind in offered(job))
    parallel = (False, True) if tp > 1 and job.workload.sequence % tp == 0 else (False,)
    counts = tuple(MicroBatch(size, batch // (dp * size)) for size in sizes)
    layout = Layout(tp, pp, expert_tensor=tp)
    splits = sorted(set(shared(job, on, placement, tp, sizes)))
    orders = tuple(Order(Schedule.one_f_one_b, 1, split, True) for split in splits)
    box = Box(layout, bucket(setting(job)), orders, counts, parallel, again, tuple(shards))
    said = unlike.prices(on, box)
    step = unlike.seconds(on, placement, box, said).step[0]
    score = np.broadcast_to(step, box.shape)
    for rank, group in enumerate(placement):
        own, total = on[group].setting, said[group].footprint.total[rank]
        usual, safe = reserved(own, total)
        score = np.where(usual > usable(own), np.inf, np.where(safe > ample(own), np.maximum(score, step * (1 + TIGHT_GAIN)), score))
    at = np.unravel_index(int(score.argmin()), score.shape)
    if np.isfinite(score[at]):
        yield float(score[at]), box.plan(tuple(map(int, at))).but(placement=placement)


def shared(job: Job, on: dict[int, Pricer], placement: tuple[int, ...], tp: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """Ways to share out the blocks: evenly, and for each micro-batch to the rank that ends first with one more."""
    blocks, pp = job.model.blocks, len(placement)
    if comb(blocks - 1, pp - 1) <= FEW:
        for cuts in combinations(range(1, blocks), pp - 1):
            yield tuple(after - before for before, after in zip((0, *cuts), (*cuts, blocks), strict=True))
        return
    yield tuple(blocks // pp + (rank < blocks % pp) for rank in range(pp))
    counts = tuple(MicroBatch(size, 1) for size in sizes)
    box = Box(Layout(tp, pp, expert_tensor=tp), 1, (), counts, (tp > 1,), (Again(Recompute.none),), (Shards(0, 1, 1),))
    works = {group: np.add.reduce(pricer.work(box)[:4])[:, :, 0] for group, pricer in on.items()}
    entries = next(iter(on.values())).setting.entries
    block = np.array([entry.is_block for entry in entries])
    first = np.array([not entry.is_block and not entry.copy and entry.first_block == 0 for entry in entries])
    last = ~block & ~first
    for at in range(len(sizes)):
        each = np.array([works[group][block, at].mean() for group in placement])
        load = np.zeros(pp)
        load[0] += works[placement[0]][first, at].sum()
        load[-1] += works[placement[-1]][last, at].sum()
        count = np.ones(pp, dtype=int)
        for _ in range(blocks - pp):
            count[int((load + (count + 1) * each).argmin())] += 1
        yield tuple(count.tolist())
