"""Formats the results of `simulate`, a simulated step or a simulated fleet, as text of at most 100 columns and as JSON
data. All numbers come from the simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.core.messages import Message, join_messages, term, translate
from meshwright.planner.simulate.fleet import FleetOutcome, FleetTableCell, WallTimeFractions, spares_needed
from meshwright.planner.simulate.run import RunWithFailures, SimulatedRankTime, SimulationResult
from meshwright.planner.simulate.step import WAIT_REASONS
from meshwright.report.plans import job_text
from meshwright.report.text import align_columns, wrap_text

MAX_RANK_ROWS, MIN_FRACTION_SHOWN = 12, 1e-5
SECONDS_PER_DAY = 86400.0


def simulation_text(simulation: SimulationResult, language: str = "en") -> str:
    """Returns the simulated step with its estimate, then the time and the waits of ranks."""
    plan, work = simulation.plan, simulation.job.workload
    count = plan.micro_batches(work.batch)
    micro_batches = Message("{count:,} micro-batch" if count == 1 else "{count:,} micro-batches", count=count)
    say = lambda message: translate(message, language)
    lines = [
        job_text(simulation.job, language),
        say(
            Message(
                "plan     {plan}: {ranks:count pipeline rank}, {micro_batches}, {schedule}",
                plan=plan.name,
                ranks=plan.pp,
                micro_batches=micro_batches,
                schedule=plan.schedule,
            )
        ),
        *(say(Message("fault    {fault}", fault=line)) for line in fault_lines(simulation)),
        "",
        wrap_text(
            say(
                Message(
                    "step     {seconds:seconds} simulated, {comparison}; {tokens:,.0f} tokens/s",
                    seconds=simulation.seconds,
                    comparison=estimate_comparison(simulation),
                    tokens=simulation.tokens_per_second,
                )
            )
        ),
        wrap_text(say(Message("waiting  {line}", line=waiting_line(simulation)))),
        *(wrap_text(say(line)) for line in failure_lines(simulation.stretch)),
        "",
        rank_table(simulation, language),
        *(say(Message("note: {text}", text=text)) for text in simulation_notes(simulation)),
    ]
    return "\n".join(lines)


def simulation_notes(simulation: SimulationResult) -> list[str]:
    """Returns the notes of the estimate, and a note if the plan does not fit."""
    estimate = simulation.estimate
    short = (
        Message("it needs {size:bytes} more host memory for offload", size=estimate.crowded)
        if estimate.is_crowded
        else Message(
            "{size:bytes} on the peak rank of {memory:bytes}",
            size=estimate.memory.reserved,
            memory=simulation.job.cluster.memory,
        )
    )
    return [*([] if estimate.fits else [Message("the plan does not fit: {short}", short=short)]), *estimate.notes]


def fault_lines(simulation: SimulationResult) -> Iterable[str]:
    """Yields a line for each fault."""
    for slow in simulation.faults.slow:
        yield Message("rank {rank} computes {factor:g} times as long", rank=slow.rank, factor=slow.factor)
    for link in simulation.faults.link:
        when = (
            ""
            if link.seconds is None
            else Message(" for {seconds:seconds} from {start:seconds}", seconds=link.seconds, start=link.start)
        )
        yield Message(
            "rank {rank} has {share} of its bandwidth left{when}" if link.share else "rank {rank} has no link{when}",
            rank=link.rank,
            share=f"{link.share:.0%}",
            when=when,
        )


def estimate_comparison(simulation: SimulationResult) -> str:
    """Returns the simulated time compared with the estimate, and the effect of faults."""
    estimate = simulation.estimate.time.step
    words = Message(
        "{estimate:seconds} by the estimate ({change})",
        estimate=estimate,
        change=f"{simulation.healthy / estimate - 1.0:+.1%}",
    )
    if simulation.faults.ranks:
        return Message(
            "{change} by the faults; without them {healthy:seconds}, {words}",
            change=f"{simulation.seconds / simulation.healthy - 1.0:+.1%}",
            healthy=simulation.healthy,
            words=words,
        )
    return words


def waiting_line(simulation: SimulationResult) -> str:
    """Returns a line with the fraction of device time in which ranks wait: in total, and by reason in descending
    order."""
    total = sum(time.replicas for time in simulation.ranks) * simulation.seconds
    shares = {
        reason: sum(time.replicas * time.waiting.get(reason, 0.0) for time in simulation.ranks) / total
        for reason in WAIT_REASONS
    }
    idle = sum(shares.values())
    if idle < 0.0005:
        return Message("negligible: ranks compute all the time")
    worst = sorted(((share, reason) for reason, share in shares.items() if share >= 0.0005), reverse=True)
    parts = [Message("{share} for {reason}", share=f"{share:.1%}", reason=term("wait", name)) for share, name in worst]
    return Message("{idle} of all device time: {parts}", idle=f"{idle:.1%}", parts=join_messages(", ", parts))


def failure_lines(run: RunWithFailures) -> Iterable[str]:
    """Yields a line about the simulated steps and their lost time, and a line for each step in which ranks fail. Yields
    nothing for a single step without failures."""
    if run.steps == 1 and not run.deaths:
        return
    lost = [
        Message("{seconds:seconds} {purpose}", seconds=seconds, purpose=term("spent", name))
        for name, seconds in run.spent._asdict().items()
        if seconds and name != "progress"
    ]
    yield Message(
        "run      {steps:count step} in {seconds:seconds}, {share} of it progress{lost}",
        steps=run.steps,
        seconds=run.seconds,
        share=f"{run.spent.progress / run.seconds:.1%}",
        lost=Message("; {lost}", lost=join_messages(", ", lost)) if lost else "",
    )
    for death in run.deaths:
        who = Message(
            "rank {ranks} dies" if len(death.ranks) == 1 else "ranks {ranks} die",
            ranks=", ".join(map(str, death.ranks)),
        )
        back = (
            Message("back to the end of step {step}", step=death.step - 1 - death.again)
            if death.step - 1 > death.again
            else Message("back to the start")
        )
        state = (
            Message("{ranks:count other rank} can restore the state", ranks=death.holders)
            if death.holders
            else Message("no other rank has the state: {back}", back=back)
        )
        yield Message("death    in step {step} {who}; {state}", step=death.step, who=who, state=state)


def rank_table(simulation: SimulationResult, language: str = "en") -> str:
    """Returns a table with one pipeline rank per line. Lanes (sets of identical replicas) with faults come first. All
    times are in the same unit, seconds or milliseconds."""
    say = lambda message: translate(message, language)
    unit, factor = (Message("seconds"), 1.0) if simulation.seconds >= 1.0 else (Message("milliseconds"), 1e3)
    shown = shown_ranks(simulation)
    least = MIN_FRACTION_SHOWN * simulation.seconds
    reasons = [
        reason for reason in WAIT_REASONS if any(time.waiting.get(reason, 0.0) > least for time in simulation.ranks)
    ]
    heads = ("rank", "of", "identical", "computes", *reasons, "idle")
    rows = [tuple(say(term("wait column", head)) for head in heads)]
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
    lines = [say(Message("{unit} that ranks compute and wait, by cause", unit=unit)), align_columns(rows)]
    if any(time.faulty for time in shown):
        lines.append(say(Message("* has a fault")))
    if omitted:
        lines.append(say(Message("({count} other kinds of ranks are omitted; --json lists all)", count=omitted)))
    return "\n".join(lines)


def shown_ranks(simulation: SimulationResult) -> list[SimulatedRankTime]:
    """Returns the ranks that the table shows. Each lane (a set of identical replicas) gets an equal number of the
    MAX_RANK_ROWS rows, but at least two. In each lane, ranks with faults have priority, then the last rank, then the
    first ranks."""
    width = simulation.plan.pp
    lanes = [simulation.ranks[at : at + width] for at in range(0, len(simulation.ranks), width)]
    room = max(MAX_RANK_ROWS // len(lanes), 2)
    shown: list[SimulatedRankTime] = []
    for lane in lanes:
        wanted = sorted(lane, key=lambda time: (not time.faulty, time is not lane[-1], time.pipeline_rank))[:room]
        shown += sorted(wanted, key=lambda time: time.pipeline_rank)
    return shown


def simulation_data(simulation: SimulationResult) -> dict[str, Any]:
    """Returns the data of `simulate --json`. Times are in seconds."""
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


def fleet_text(outcome: FleetOutcome, whose: str, language: str = "en") -> str:
    """Returns the result for a fleet over several days: each part of the wall time, simulated and by formula. `whose`
    names the source of the failure rate."""
    fleet, policy = outcome.fleet, outcome.policy
    nodes = -(-fleet.devices // fleet.devices_per_node)
    reserve = (
        Message("always a spare node")
        if fleet.spares is None
        else Message("{nodes:count spare node}", nodes=fleet.spares)
    )
    parts = [
        Message("{seconds:seconds} to {purpose}", seconds=seconds, purpose=term("recovery", name))
        for name, seconds in recovery_parts(outcome)
        if seconds
    ]
    lines = [
        Message(
            "fleet    {devices:count device} in {nodes:count node}, a failure every {mean:seconds}",
            devices=fleet.devices,
            nodes=nodes,
            mean=fleet.mean_between_failures,
        ),
        Message(
            "rate     {rate:.3g} failures a device hour, {source}", rate=fleet.failures_per_device_hour, source=whose
        ),
        Message(
            "saves    every {interval:seconds} of training ({chosen}), each stops it for {save:seconds} and can be "
            "restored {durable:seconds} later",
            interval=outcome.interval,
            chosen=Message("as given") if policy.interval is not None else Message("Daly's optimum"),
            save=policy.save,
            durable=policy.durable,
        ),
        Message("recovery {parts}", parts=join_messages(", ", parts) if parts else Message("at once")),
        Message(
            "reserve  {reserve}, {repair:seconds} to repair a node; {spares:count spare} suffice 99.9% of the time",
            reserve=reserve,
            repair=fleet.repair,
            spares=spares_needed(fleet),
        ),
        Message(
            "time     {days:g} days, {failures:,.0f} failures, mean of {runs:count simulation}",
            days=outcome.seconds / SECONDS_PER_DAY,
            failures=outcome.failures,
            runs=outcome.runs,
        ),
    ]
    wrapped = (wrap_text(translate(line, language)) for line in lines)
    return "\n".join((*wrapped, "", wall_time_table(outcome, language)))


def recovery_parts(outcome: FleetOutcome) -> list[tuple[str, float]]:
    """Returns the parts of a recovery by name, each with its seconds."""
    policy = outcome.policy
    return [("detect", policy.detect), ("restart", policy.rebuild), ("load", policy.restore)]


def wall_time_table(outcome: FleetOutcome, language: str = "en") -> str:
    """Returns the parts of the wall time, simulated and by formula."""
    say = lambda word: translate(term("wall time", word), language)
    rows = [tuple(say(word) for word in ("of the wall time", "simulated", "by formula", "days simulated"))]
    for field in WallTimeFractions._fields:
        played, formula = getattr(outcome.shares, field), getattr(outcome.expected, field)
        if played or formula:
            spread = f" +-{100 * outcome.deviation:.1f}" if field == "progress" else ""
            rows.append(
                (
                    say(field),
                    f"{played:.2%}{spread}",
                    f"{formula:.2%}",
                    f"{played * outcome.seconds / SECONDS_PER_DAY:.2f}",
                )
            )
    return align_columns(rows)


def fleet_data(outcome: FleetOutcome, whose: str) -> dict[str, Any]:
    """Returns the data of `simulate --days --json`: fractions of the wall time, and seconds."""
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


def fleet_table_text(cells: Sequence[FleetTableCell], language: str = "en") -> str:
    """Returns a table with a row for each policy and a column for each number of devices. A cell has the simulated
    progress in percent of the wall time, and in parentheses the progress by formula."""
    policies, sizes = (
        list(dict.fromkeys(cell.policy for cell in cells)),
        list(dict.fromkeys(cell.devices for cell in cells)),
    )
    found = {(cell.policy, cell.devices): cell.outcome for cell in cells}
    head = translate(Message("progress, % of the wall time (by formula)"), language)
    rows: list[Sequence[str]] = [(head, *(f"{size:,}" for size in sizes))]
    for policy in policies:
        outcomes = [found[policy, size] for size in sizes]
        rows.append(
            (
                translate(policy, language),
                *(f"{100 * one.shares.progress:.1f} ({100 * one.expected.progress:.1f})" for one in outcomes),
            )
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
