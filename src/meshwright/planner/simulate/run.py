"""Simulates one step of a job under a plan with faults, and several steps in which ranks die. `meshwright simulate` and
`mw.simulate` call `simulate`.

`simulate` returns the time of a step, the actions and waits of each pipeline rank, and the estimate. Without faults the
simulation agrees with the estimate. If no communication overlaps with compute, the simulated and the estimated step
time are equal up to rounding for gpipe, and for 1f1b and interleaved with equal stages. For reductions the simulation
is more detailed: it contains each bucket on each rank, while the estimate adds up the reductions of the slowest rank.

If a rank dies during a step, on average half of the step is lost. Then the failure is detected, processes restart and
the state is loaded (`RecoveryPolicy`). Ranks of other replicas have the same state: at ZeRO 0 all data ranks, from
ZeRO 1 on the corresponding ranks of the other shard groups. If one of these ranks is alive, the interrupted step is
repeated. Otherwise training resumes from the last checkpoint and repeats the steps after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.planner.cost import heterogeneous
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.named_plans import read_named_plan
from meshwright.planner.cost.plan_grid import PlanGrid, grid_of_plan
from meshwright.planner.cost.step import estimate
from meshwright.planner.simulate.fleet import RecoveryPolicy
from meshwright.planner.simulate.op_times import OpTimes, compute_op_times
from meshwright.planner.simulate.step import WAIT_REASONS, LinkSpeed, SimulatedRank, StepProgram, StepSimulator
from meshwright.planner.simulate.symmetry import (
    ReplicaClass,
    coords_of_rank,
    rank_at_coords,
    replica_classes,
)
from meshwright.spec.cluster import Link
from meshwright.spec.estimate import Estimate
from meshwright.spec.faults import Faults, KilledRank
from meshwright.spec.grid import Coords, rank_strides
from meshwright.spec.job import Job, RunConfig
from meshwright.spec.plan import Plan
from meshwright.spec.schedules.schedule import schedule_orders

LOST_STEP_FRACTION = 0.5
"""The fraction of the current step that is lost on average if a rank dies."""


class RankDeaths(NamedTuple):
    """Ranks that die together in `step`.

    For each dead rank, count the living ranks with the same state. `holders` is the smallest of these counts. If
    `holders` is 0, training resumes from a checkpoint and repeats `again` complete steps. Otherwise `again` is 0.
    """

    step: int
    ranks: tuple[int, ...]
    holders: int
    again: int


class RunSeconds(NamedTuple):
    """The wall time of several steps by use, in seconds. `interrupted` is the lost time of interrupted steps, `rework`
    the time of repeated complete steps."""

    progress: float
    save: float
    interrupted: float
    rework: float
    detect: float
    rebuild: float
    restore: float


@dataclass(frozen=True)
class RunWithFailures:
    """The simulation of `steps` steps with a checkpoint after every `every` steps (0: no checkpoints). `spent` is the
    wall time by use, in seconds."""

    steps: int
    every: int
    deaths: tuple[RankDeaths, ...]
    spent: RunSeconds

    @property
    def seconds(self) -> float:
        """Returns the wall time of all steps in seconds."""
        return sum(self.spent)


def simulate_failures(
    plan: Plan, step: float, kills: Sequence[KilledRank], steps: int, every: int, policy: RecoveryPolicy
) -> RunWithFailures:
    """Simulates `steps` steps of `step` seconds each, with a checkpoint after every `every` steps (0: none). If `steps`
    is 0, the simulation ends with the last step in which a rank dies.

    Raises: InputError if `kills` has a step after the last simulated step.
    """
    last = max((kill.step for kill in kills), default=1)
    steps = steps or last
    if last > steps:
        last_kill = next(kill for kill in kills if kill.step == last)
        raise InputError(
            Message(
                "kill: rank {rank} dies in step {step}, but only {steps} steps are simulated",
                rank=last_kill.rank,
                step=last_kill.step,
                steps=steps,
            )
        )
    together: dict[int, set[int]] = {}
    for kill in kills:
        together.setdefault(kill.step, set()).add(kill.rank)
    deaths = []
    for at, ranks in sorted(together.items()):
        left = min(count_surviving_replicas(plan, rank, ranks) for rank in ranks)
        deaths.append(RankDeaths(at, tuple(sorted(ranks)), left, 0 if left else (at - 1) % every if every else at - 1))
    saves = (steps - 1) // every if every else 0
    number = len(deaths)
    return RunWithFailures(
        steps,
        every,
        tuple(deaths),
        RunSeconds(
            progress=steps * step,
            save=saves * policy.save,
            interrupted=number * LOST_STEP_FRACTION * step,
            rework=sum(death.again for death in deaths) * step,
            detect=number * policy.detect,
            rebuild=number * policy.rebuild,
            restore=number * policy.restore,
        ),
    )


def count_surviving_replicas(plan: Plan, rank: int, dead: set[int]) -> int:
    """Returns the number of ranks outside `dead` that have the complete state of `rank`.

    >>> from meshwright.spec.plan import parse_plan
    >>> failures = (("dp4.tp2", {0, 2}), ("dp4.tp2.z1", {0}), ("dp2x2.tp2.z3", {0}))
    >>> tuple(count_surviving_replicas(parse_plan(plan), 0, lost) for plan, lost in failures)
    (2, 0, 1)
    """
    strides = rank_strides(plan)
    place = coords_of_rank(plan, rank)
    axes = ("dp_replicate",) if plan.zero else ("dp_replicate", "cp")
    peers = [rank]
    for axis in axes:
        peers = [
            one + (at - getattr(place, axis)) * strides[axis] for one in peers for at in range(getattr(plan, axis))
        ]
    return len(set(peers) - dead)


NO_FAULTS = Faults()
DEFAULT_SAVE_EVERY_STEPS = RunConfig().every
DEFAULT_RECOVERY_POLICY = RecoveryPolicy()


@dataclass(frozen=True)
class SimulatedRankTime:
    """The seconds of one pipeline rank in one step, by activity. `replicas` is the number of identical replicas that
    the rank represents. `waiting` is the idle seconds by reason (WAIT_REASONS). `faulty`: whether the rank has a
    fault."""

    rank: int
    pipeline_rank: int
    replicas: int
    compute: float
    update: float
    waiting: dict[str, float]
    faulty: bool

    @property
    def idle(self) -> float:
        """Returns the seconds in which the rank waits."""
        return sum(self.waiting.values())


@dataclass(frozen=True)
class SimulationResult:
    """One simulated step.

    `seconds` is the time of the step with faults, `healthy` the time without faults. `cells` contains every action and
    transfer, for traces. `stretch` is the simulation of several steps in which ranks die; if no fault kills a rank, its
    `deaths` are empty.
    """

    job: Job
    plan: Plan
    faults: Faults
    estimate: Estimate
    seconds: float
    healthy: float
    ranks: tuple[SimulatedRankTime, ...]
    cells: tuple[SimulatedRank, ...]
    stretch: RunWithFailures

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens per second of the simulated step."""
        return self.job.workload.tokens / self.seconds


def simulate(
    job: Job,
    plan: Plan | str,
    faults: Faults | None = None,
    steps: int = 0,
    every: int = DEFAULT_SAVE_EVERY_STEPS,
    policy: RecoveryPolicy = DEFAULT_RECOVERY_POLICY,
) -> SimulationResult:
    """Simulates one step of `plan`. Also simulates `steps` steps in which ranks die, with a checkpoint after every
    `every` steps (0: none). If `steps` is 0, the last simulated step is the last one in which a rank dies.

    Raises: InputError if the plan cannot run, or if a fault names a rank or a step that does not exist.
    """
    plan = read_named_plan(job, plan) if isinstance(plan, str) else plan
    wrong = (faults or NO_FAULTS).check(plan.world)
    check_equal_replicas(plan)
    priced = estimate(job, plan)
    cells = simulate_step(job, plan, wrong)
    seconds = max(cell.finish for cell in cells)
    healthy = max(cell.finish for cell in simulate_step(job, plan, NO_FAULTS)) if wrong.ranks else seconds
    run = simulate_failures(plan, seconds, wrong.kill, steps, every, policy)
    return SimulationResult(
        job, plan, wrong, priced, seconds, healthy, tuple(map(summarize_rank, cells)), tuple(cells), run
    )


def check_equal_replicas(plan: Plan) -> None:
    """Raises InputError if replicas differ in their work or states, because one simulated replica represents all
    healthy replicas."""
    for field, code in (("micro_batch_sizes", "mb"), ("shares", "ga"), ("shard_weights", "zw")):
        if numbers := getattr(plan, field):
            raise InputError(
                Message(
                    "plan {plan}: {code}{numbers} makes replicas different, and only identical replicas can be "
                    "simulated: leave it out, or use `meshwright estimate`, which accepts this plan",
                    plan=plan.name,
                    code=code,
                    numbers="-".join(map(str, numbers)),
                )
            )


def simulate_step(job: Job, plan: Plan, faults: Faults) -> list[SimulatedRank]:
    """Simulates one step. Returns the simulated ranks in their final state: all pipeline ranks of each class of
    replicas."""
    pricer = CostModel(job)
    box = grid_of_plan(plan, job.workload.batch, job.model.blocks)
    rows = replica_classes(plan, faults)
    fabric = pricer.setting.fabric
    last, across = Coords(0, plan.dp_replicate - 1, plan.dp_shard - 1, 0, 0), Coords(0, 0, 0, plan.cp - 1, plan.tp - 1)
    hops = [[fabric.tier((one, other)) for other in rows[0].ranks] for one in rows[0].ranks]
    return StepSimulator(
        StepProgram(
            orders=schedule_orders(
                plan.schedule, plan.pp, plan.virtual_stages, plan.micro_batches(job.workload.batch), plan.actions
            ),
            durations=heterogeneous_op_times(job, plan, box) if plan.placement else compute_op_times(pricer, plan, box),
            lanes=rows,
            lines=[link_speed(link) for link in fabric.links],
            hops=hops,
            data=fabric.tier((0, rank_at_coords(plan, last))),
            tensor=fabric.tier((0, rank_at_coords(plan, across))),
            faulty=1 if fabric.domain < job.cluster.devices else 0,
            zero=plan.zero,
            barrier=job.workload.optimizer.clip is not None,
        )
    ).run()


def heterogeneous_op_times(job: Job, plan: Plan, box: PlanGrid) -> OpTimes:
    """Returns the times of the operations of a plan over heterogeneous groups. Each pipeline rank has the times of its
    group."""
    each = {
        group: compute_op_times(pricer, plan, box)
        for group, pricer in heterogeneous.group_cost_models(job, plan.placement, plan.world).items()
    }
    said = [each[group] for group in plan.placement]
    return said[0]._replace(
        stages=tuple(said[plan.stage_to_rank(stage)].stages[stage] for stage in range(plan.stages)),
        endings=tuple(one.endings[rank] for rank, one in enumerate(said)),
        tie=max(one.tie for one in said),
    )


def link_speed(link: Link) -> LinkSpeed:
    """Returns the bandwidth (bytes/s) and the latency (seconds) of a link for one rank."""
    return LinkSpeed(link.bandwidth * link.efficiency, link.latency + link.meeting)


def summarize_rank(cell: SimulatedRank) -> SimulatedRankTime:
    """Returns the seconds of a simulated rank by activity. Reasons without waiting time are omitted."""
    waiting = {reason: seconds for reason in WAIT_REASONS if (seconds := cell.waits[reason]) > 0.0}
    lane: ReplicaClass = cell.lane
    faulty = any(mark.pp == cell.pp for mark in lane.marks)
    return SimulatedRankTime(lane.ranks[cell.pp], cell.pp, lane.replicas, cell.busy, cell.update, waiting, faulty)
