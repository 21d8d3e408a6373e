"""A plan played for a job: what a step takes, what each pipeline rank does meanwhile and what it waits for, beside the estimate.

Agreement with the estimate on healthy steps: to rounding for gpipe, and for 1f1b and interleaved with equal stages, where nothing is
exchanged beside compute. Reductions are played bucket by bucket, each rank's where its own pipeline leaves room, while the estimate adds up the slowest rank's:
there the play is the finer one.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.errors import InputError
from meshwright.cost import unlike
from meshwright.cost.box import Box, box_of
from meshwright.cost.hiding import bucketed
from meshwright.cost.price import Pricer
from meshwright.cost.step import estimate
from meshwright.schedules.order import orders
from meshwright.simulate.durations import Durations, durations
from meshwright.simulate.fleet import Policy
from meshwright.simulate.lanes import Lane, lanes, rank_at, tier
from meshwright.simulate.network import Tier
from meshwright.simulate.step import REASONS, Cell, Line, Play, Player
from meshwright.simulate.stretch import Stretch, stretch
from meshwright.spec.cluster import Link
from meshwright.spec.estimate import Estimate
from meshwright.spec.faults import Faults
from meshwright.spec.grid import Place
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.run import Run

HEALTHY = Faults()
EVERY = Run().every
USUAL = Policy()


@dataclass(frozen=True)
class RankTime:
    """Seconds of one pipeline rank in one step; `replicas` replicas have one like it. `waiting` by what for."""

    rank: int
    pipeline_rank: int
    replicas: int
    compute: float
    update: float
    waiting: dict[str, float]
    faulty: bool

    @property
    def idle(self) -> float:
        """Seconds in which it computes nothing."""
        return sum(self.waiting.values())


@dataclass(frozen=True)
class Simulation:
    """One step as it was played. `healthy`: seconds of the same step without faults. `cells` hold every action and transfer, for traces.

    `stretch`: what several such steps take when ranks die in them.
    """

    job: Job
    plan: Plan
    faults: Faults
    estimate: Estimate
    seconds: float
    healthy: float
    ranks: tuple[RankTime, ...]
    cells: tuple[Cell, ...]
    stretch: Stretch

    @property
    def tokens_per_second(self) -> float:
        return self.job.workload.tokens / self.seconds


def simulate(
    job: Job, plan: Plan | str, faults: Faults | None = None, steps: int = 0, every: int = EVERY, policy: Policy = USUAL
) -> Simulation:
    """One step of `plan`, and `steps` of them (0: up to the last death) with a save behind `every` steps.

    Raises InputError when the plan cannot run, or a fault names a rank or a step that is not there.
    """
    plan = bucketed(job, parse_plan(plan)) if isinstance(plan, str) else plan
    wrong = (faults or HEALTHY).check(plan.world)
    refuse_unlike(plan)
    priced = estimate(job, plan)
    cells = played(job, plan, wrong)
    seconds = max(cell.finish for cell in cells)
    healthy = max(cell.finish for cell in played(job, plan, HEALTHY)) if wrong.ranks else seconds
    run = stretch(plan, seconds, wrong.kill, steps, every, policy)
    return Simulation(job, plan, wrong, priced, seconds, healthy, tuple(map(rank_time, cells)), tuple(cells), run)


def refuse_unlike(plan: Plan) -> None:
    """Every healthy replica is played by one: those that have unlike work or states cannot be."""
    for field, code in (("micro_batch_sizes", "mb"), ("shares", "ga"), ("shard_weights", "zw")):
        if numbers := getattr(plan, field):
            raise InputError(
                f"plan {plan.name}: {code}{'-'.join(map(str, numbers))} makes replicas unlike, and a step is played with equal ones: "
                "leave it out, or price the plan with `meshwright estimate`"
            )


def played(job: Job, plan: Plan, faults: Faults) -> list[Cell]:
    """The cells of every unlike lane after one step."""
    pricer = Pricer(job)
    box = box_of(plan, job.workload.batch, job.model.blocks)
    rows = lanes(plan, faults)
    fabric = pricer.setting.fabric
    last, across = Place(0, plan.dp_replicate - 1, plan.dp_shard - 1, 0, 0), Place(0, 0, 0, plan.cp - 1, plan.tp - 1)
    hops = [[tier([one, other], fabric.domain) for other in rows[0].ranks] for one in rows[0].ranks]
    return Player(
        Play(
            orders=orders(plan.schedule, plan.pp, plan.virtual_stages, plan.micro_batches(job.workload.batch), plan.actions),
            durations=on_groups(job, plan, box) if plan.placement else durations(pricer, plan, box),
            lanes=rows,
            lines={Tier.near: line(fabric.near), Tier.far: line(fabric.far)},
            hops=hops,
            data=tier([0, rank_at(plan, last)], fabric.domain),
            tensor=tier([0, rank_at(plan, across)], fabric.domain),
            faulty=Tier.far if fabric.domain < job.cluster.devices else Tier.near,
            zero=plan.zero,
            barrier=job.workload.optimizer.clip is not None,
        )
    ).run()


def on_groups(job: Job, plan: Plan, box: Box) -> Durations:
    """Each pipeline rank at the speed of its own group of nodes."""
    each = {group: durations(pricer, plan, box) for group, pricer in unlike.pricers(job, plan.placement, plan.world).items()}
    said = [each[group] for group in plan.placement]
    return said[0]._replace(
        stages=tuple(said[plan.rank_of(stage)].stages[stage] for stage in range(plan.stages)),
        endings=tuple(one.endings[rank] for rank, one in enumerate(said)),
        tie=max(one.tie for one in said),
    )


def line(link: Link) -> Line:
    return Line(link.bandwidth * link.efficiency, link.latency + link.meeting)


def rank_time(cell: Cell) -> RankTime:
    waiting = {reason: seconds for reason in REASONS if (seconds := cell.waits[reason]) > 0.0}
    lane: Lane = cell.lane
    faulty = any(mark.pp == cell.pp for mark in lane.marks)
    return RankTime(lane.ranks[cell.pp], cell.pp, lane.replicas, cell.busy, cell.update, waiting, faulty)
