"""A played step and a played fleet as text that fits 100 columns, and as JSON. Numbers are the simulation's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.core.units import show_bytes, show_seconds
from meshwright.planner.simulate.fleet import FleetOutcome, FleetTableCell, WallTimeFractions, spares_needed
from meshwright.planner.simulate.run import RunWithFailures, SimulatedRankTime, SimulationResult
from meshwright.planner.simulate.step import WAIT_REASONS
from meshwright.report.plans import job_text
from meshwright.report.text import align_columns, wrap_text

MAX_RANK_ROWS, MIN_FRACTION_SHOWN = 12, 1e-5
WAIT_COLUMNS = dict(zip(WAIT_REASONS, ("before", "behind", "weights", "sums", "others", "host", "end"), strict=True))
"""Heads of columns."""
RUN_SECONDS_WORDS = {
    "save": "to save",
    "interrupted": "of steps that were cut short",
    "rework": "of steps done again",
    "detect": "to notice",
    "rebuild": "to build up",
    "restore": "to load",
}
SECONDS_PER_DAY = 86400.0


def simulation_text(simulation: SimulationResult) -> str:
    """Returns the step with its estimate, then what the ranks do and wait for."""
    plan, work = simulation.plan, simulation.job.workload
    micro_batches = plan.micro_batches(work.batch)
    lines = [
        job_text(simulation.job),
        f"plan     {plan.name}: {count_phrase(plan.pp, 'pipeline rank')}, "
        f"{count_phrase(micro_batches, 'micro-batch', 'micro-batches')}, {plan.schedule}",
        *(f"fault    {words}" for words in fault_lines(simulation)),
        "",
        wrap_text(
            f"step     {show_seconds(simulation.seconds)} simulated, {estimate_comparison(simulation)}; "
            f"{simulation.tokens_per_second:,.0f} tokens/s"
        ),
        wrap_text(f"waiting  {waiting_line(simulation)}"),
        *(wrap_text(line) for line in failure_lines(simulation.stretch)),
        "",
        rank_table(simulation),
        *(f"note: {text}" for text in simulation_notes(simulation)),
    ]
    return "\n".join(lines)


def simulation_notes(simulation: SimulationResult) -> list[str]:
    """What the estimate says of itself, and that the plan cannot run where it does not fit."""
    estimate = simulation.estimate
    short = (
        f"it needs {show_bytes(estimate.crowded)} more host memory for offload"
        if estimate.is_crowded
        else f"{show_bytes(estimate.memory.reserved)} on the peak rank of {show_bytes(simulation.job.cluster.memory)}"
    )
    return [*([] if estimate.fits else [f"the plan does not fit: {short}"]), *estimate.notes]


def count_phrase(number: int, one: str, several: str = "") -> str:
    """Returns a number with its word in the singular or plural."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def fault_lines(simulation: SimulationResult) -> Iterable[str]:
    """Yields a line for each fault."""
    for slow in simulation.faults.slow:
        yield f"rank {slow.rank} computes {slow.factor:g} times as long"
    for link in simulation.faults.link:
        when = "" if link.seconds is None else f" for {show_seconds(link.seconds)} from {show_seconds(link.start)}"
        yield (
            f"rank {link.rank} has {link.share:.0%} of its bandwidth left{when}"
            if link.share
            else f"rank {link.rank} has no link{when}"
        )


def estimate_comparison(simulation: SimulationResult) -> str:
    """Returns the simulated time compared with the estimate, and the effect of faults."""
    estimate = simulation.estimate.time.step
    words = f"{show_seconds(estimate)} by the estimate ({simulation.healthy / estimate - 1.0:+.1%})"
    if simulation.faults.ranks:
        healthy = show_seconds(simulation.healthy)
        return f"{simulation.seconds / simulation.healthy - 1.0:+.1%} by the faults; without them {healthy}, {words}"
    return words


def waiting_line(simulation: SimulationResult) -> str:
    """Shares of all device time, the largest first."""
    total = sum(time.replicas for time in simulation.ranks) * simulation.seconds
    shares = {
        reason: sum(time.replicas * time.waiting.get(reason, 0.0) for time in simulation.ranks) / total
        for reason in WAIT_REASONS
    }
    idle = sum(shares.values())
    if idle < 0.0005:
        return "negligible: ranks compute all the time"
    worst = sorted(((share, reason) for reason, share in shares.items() if share >= 0.0005), reverse=True)
    return f"{idle:.1%} of all device time: " + ", ".join(f"{share:.1%} for {reason}" for share, reason in worst)


def failure_lines(run: RunWithFailures) -> Iterable[str]:
    """Several steps, and what each death in them costs; nothing for a single one."""
    if run.steps == 1 and not run.deaths:
        return
    lost = [
        f"{show_seconds(seconds)} {RUN_SECONDS_WORDS[name]}"
        for name, seconds in run.spent._asdict().items()
        if seconds and name != "progress"
    ]
    words = f"; {', '.join(lost)}" if lost else ""
    yield (
        f"run      {count_phrase(run.steps, 'step')} in {show_seconds(run.seconds)}, "
        f"{run.spent.progress / run.seconds:.1%} of it progress{words}"
    )
    for death in run.deaths:
        who = (
            f"rank {death.ranks[0]} dies" if len(death.ranks) == 1 else f"ranks {', '.join(map(str, death.ranks))} die"
        )
        back = (
            f"back to the end of step {death.step - 1 - death.again}"
            if death.step - 1 > death.again
            else "back to the start"
        )
        state = (
            f"{count_phrase(death.holders, 'other rank')} can restore the state"
            if death.holders
            else f"no other rank has the state: {back}"
        )
        yield f"death    in step {death.step} {who}; {state}"


def rank_table(simulation: SimulationResult) -> str:
    """One pipeline rank of one lane a line, lanes with faults first; times in one unit, so that they compare."""
    unit, factor = ("seconds", 1.0) if simulation.seconds >= 1.0 else ("milliseconds", 1e3)
    shown = shown_ranks(simulation)
    least = MIN_FRACTION_SHOWN * simulation.seconds
    reasons = [
        reason for reason in WAIT_REASONS if any(time.waiting.get(reason, 0.0) > least for time in simulation.ranks)
    ]
    rows = [("rank", "of", "identical", "computes", *(WAIT_COLUMNS[reason] for reason in reasons), "idle")]
    for time in shown:
        rows.append(
            (
                f"{time.rank}{' *' if time.faulty else ''}",
                f"pp {time.pipeline_rank}",
                f"{time.replicas:,}",
                f"{factor * (time.compute + time.update):.3f}",
                *(
                    f"{factor * seconds:.3f}" if (seconds := time.waiting.get(reason, 0.0)) > least else "-"
                    for reason in reasons
                ),
                f"{time.idle / simulation.seconds:.1%}",
            )
        )
    omitted = len(simulation.ranks) - len(shown)
    lines = [f"{unit} that ranks compute and wait, by what for", align_columns(rows)]
    if any(time.faulty for time in shown):
        lines.append("* has a fault")
    if omitted:
        lines.append(f"({omitted} other kinds of ranks are omitted; --json lists all)")
    return "\n".join(lines)


def shown_ranks(simulation: SimulationResult) -> list[SimulatedRankTime]:
    """At most ROWS, or two of each lane: of every lane those with faults, its first ranks and its last."""
    width = simulation.plan.pp
    lanes = [simulation.ranks[at : at + width] for at in range(0, len(simulation.ranks), width)]
    room = max(MAX_RANK_ROWS // len(lanes), 2)
    shown: list[SimulatedRankTime] = []
    for lane in lanes:
        wanted = sorted(lane, key=lambda time: (not time.faulty, time is not lane[-1], time.pipeline_rank))[:room]
        shown += sorted(wanted, key=lambda time: time.pipeline_rank)
    return shown


def simulation_data(simulation: SimulationResult) -> dict[str, Any]:
    """`simulate --json`. Seconds."""
    return {
        "job": simulation.job.model_dump(mode="json"),
        "name": simulation.plan.name,
        "plan": simulation.plan.model_dump(mode="json"),
        "faults": simulation.faults.model_dump(mode="json"),
        "step": simulation.seconds,
        "healthy": simulation.healthy,
        "tokens_per_second": simulation.tokens_per_second,
        "estimate": simulation.estimate.model_dump(mode="json"),
        "run": {
            "steps": simulation.stretch.steps,
            "seconds": simulation.stretch.seconds,
            "spent": simulation.stretch.spent._asdict(),
            "deaths": [death._asdict() for death in simulation.stretch.deaths],
        },
        "ranks": [
            {
                "rank": time.rank,
                "pipeline_rank": time.pipeline_rank,
                "replicas": time.replicas,
                "faulty": time.faulty,
                "compute": time.compute,
                "update": time.update,
                "waiting": time.waiting,
                "idle": time.idle / simulation.seconds,
            }
            for time in simulation.ranks
        ],
    }


# --- fleets

WALL_TIME_WORDS = {
    "progress": "progress",
    "save": "saving",
    "rework": "repeated steps",
    "detect": "detecting failures",
    "rebuild": "restarting ranks",
    "restore": "loading the state",
    "waiting": "waiting for nodes",
}


def fleet_text(outcome: FleetOutcome, whose: str) -> str:
    """A fleet over its days: every part of the wall time, played and by formula."""
    fleet, policy = outcome.fleet, outcome.policy
    nodes = -(-fleet.devices // fleet.devices_per_node)
    mean = fleet.mean_between_failures
    chosen = "as given" if policy.interval is not None else "Daly's optimum"
    reserve = "always a spare node" if fleet.spares is None else count_phrase(fleet.spares, "spare node")
    parts = [f"{show_seconds(seconds)} to {what}" for what, seconds in recovery_parts(outcome) if seconds]
    lines = [
        f"fleet    {count_phrase(fleet.devices, 'device')} in {count_phrase(nodes, 'node')}, "
        f"a failure every {show_seconds(mean)}",
        wrap_text(f"rate     {fleet.failures_per_device_hour:.3g} failures a device hour, {whose}"),
        wrap_text(
            f"saves    every {show_seconds(outcome.interval)} of training ({chosen}), each stops it for {show_seconds(policy.save)} "
            f"and can be restored {show_seconds(policy.durable)} later"
        ),
        f"recovery {', '.join(parts) or 'at once'}",
        f"reserve  {reserve}, {show_seconds(fleet.repair)} to repair a node; "
        f"{count_phrase(spares_needed(fleet), 'spare')} suffice 99.9% of the time",
        f"time     {outcome.seconds / SECONDS_PER_DAY:g} days, {outcome.failures:,.0f} failures, "
        f"mean of {count_phrase(outcome.runs, 'simulation')}",
        "",
        wall_time_table(outcome),
    ]
    return "\n".join(lines)


def recovery_parts(outcome: FleetOutcome) -> list[tuple[str, float]]:
    """Returns the parts of a recovery in seconds."""
    policy = outcome.policy
    return [("detect", policy.detect), ("restart", policy.rebuild), ("load", policy.restore)]


def wall_time_table(outcome: FleetOutcome) -> str:
    """Returns the parts of the wall time, simulated and by formula."""
    rows = [("of the wall time", "simulated", "by formula", "days simulated")]
    for field in WallTimeFractions._fields:
        played, formula = getattr(outcome.shares, field), getattr(outcome.expected, field)
        if played or formula:
            spread = f" +-{100 * outcome.deviation:.1f}" if field == "progress" else ""
            rows.append(
                (
                    WALL_TIME_WORDS[field],
                    f"{played:.2%}{spread}",
                    f"{formula:.2%}",
                    f"{played * outcome.seconds / SECONDS_PER_DAY:.2f}",
                )
            )
    return align_columns(rows)


def fleet_data(outcome: FleetOutcome, whose: str) -> dict[str, Any]:
    """`simulate --days --json`. Shares of the wall time; seconds."""
    return {
        "fleet": outcome.fleet.model_dump(mode="json"),
        "policy": outcome.policy.model_dump(mode="json"),
        "failures_are": whose,
        "seconds": outcome.seconds,
        "interval": outcome.interval,
        "mean_between_failures": outcome.fleet.mean_between_failures,
        "spares_for_999": spares_needed(outcome.fleet),
        "runs": outcome.runs,
        "failures": outcome.failures,
        "goodput": outcome.shares.progress,
        "deviation": outcome.deviation,
        "shares": outcome.shares._asdict(),
        "formula": outcome.expected._asdict(),
    }


def fleet_table_text(cells: Sequence[FleetTableCell]) -> str:
    """Progress in percent of the wall time, played and (by formula), by policy and devices."""
    policies, sizes = (
        list(dict.fromkeys(cell.policy for cell in cells)),
        list(dict.fromkeys(cell.devices for cell in cells)),
    )
    found = {(cell.policy, cell.devices): cell.outcome for cell in cells}
    rows: list[Sequence[str]] = [("progress, % of the wall time (by formula)", *(f"{size:,}" for size in sizes))]
    for policy in policies:
        outcomes = [found[policy, size] for size in sizes]
        rows.append(
            (policy, *(f"{100 * one.shares.progress:.1f} ({100 * one.expected.progress:.1f})" for one in outcomes))
        )
    return align_columns(rows)


def fleet_table_data(cells: Sequence[FleetTableCell]) -> dict[str, Any]:
    """Returns the fleet table as JSON data."""
    return {
        "cells": [
            {
                "policy": cell.policy,
                "devices": cell.devices,
                "interval": cell.outcome.interval,
                "goodput": cell.outcome.shares.progress,
                "formula": cell.outcome.expected.progress,
            }
            for cell in cells
        ]
    }
