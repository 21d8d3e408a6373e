"""Explains the result of a search for the commands `plan` and `train`.

`explain` describes the chosen plan in a few sentences: step time, memory, and how much slower the best plans of other
families are.

`why_not` states why a given plan was not chosen: it breaks rules, needs too much memory, or takes longer than the
chosen plan. If it takes longer, the additional time is shown by kind: the differences of the fields of `TimeBreakdown`
between the two plans. The sum of the differences is the difference of the step times.

`pin_conflict` names pins that contradict each other, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from typing import Any

from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText, without_place
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, term
from meshwright.planner.cost.cost_context import MESHWRIGHT_RUNTIME
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.step import estimate, estimate_grid
from meshwright.planner.cost.uncertainty import unmeasured_features
from meshwright.planner.search.best_plans import (
    PlanFamily,
    RankedPlan,
    SearchResult,
    required_gain,
    round_score,
    uses_unmeasured_link,
)
from meshwright.planner.search.branch_and_bound import PlanSearch, search_top_plans
from meshwright.planner.search.space import PlanSpace
from meshwright.spec.constraints import plan_violations
from meshwright.spec.estimate import Estimate, FitStatus, TimeBreakdown, fit_message, largest_memory_kind
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MAX_FAMILIES_NAMED = 3
"""The maximum number of families in one sentence."""

MIN_TIME_FRACTION_NAMED = 0.005
"""Kinds of time and differences below this fraction of the step are not mentioned."""


def explain(job: Job, answer: SearchResult) -> list[Message]:
    """Returns the sentences that `meshwright plan` prints after the ranked plans. `answer` is the result of the
    search."""
    said = [_chosen_message(answer), *_passed_over_messages(job, answer), _breakdown_message(answer)]
    said += _chunk_messages(job, answer.chosen)
    others = [family for family in answer.families if family.plan != answer.chosen.plan]
    slower = [family for family in others if family.fits and family.seconds >= answer.chosen.estimate.time.step]
    unfit = [family for family in others if not family.fits]
    if slower:
        parts = tuple(_slower_family_message(job, answer, family) for family in slower[:MAX_FAMILIES_NAMED])
        said.append(Message("slower: {families}", families=parts + _remaining_families(slower)))
    if unfit:
        parts = tuple(
            Message("{family} needs {reserved:bytes}", family=family_name(family.name), reserved=family.reserved)
            for family in unfit[:MAX_FAMILIES_NAMED]
        )
        said.append(
            Message(
                "do not fit in {limit:bytes}: {families}",
                limit=answer.chosen.estimate.limit,
                families=parts + _remaining_families(unfit),
            )
        )
    return said


def family_name(words: str) -> Message:
    """Returns the name of a plan family, such as 'tensor + ZeRO-1', in the user's language. Each part is translated
    separately."""
    first, _, rest = words.partition(" + ")
    return (
        Message("{first} + {rest}", first=term("family", first), rest=family_name(rest))
        if rest
        else term("family", first)
    )


def _chosen_message(answer: SearchResult) -> Message:
    chosen = answer.chosen
    return Message(
        "{plan}: {step:step} a step, {rate:count} tokens/s, the best of {considered:count plan}",
        plan=chosen.name,
        step=chosen.estimate.time.step,
        rate=chosen.estimate.tokens_per_second,
        considered=answer.considered,
    )


def _passed_over_messages(job: Job, answer: SearchResult) -> list[Message]:
    """Returns a sentence about the fastest plan that fits, if this plan ranks after the chosen plan because of the risk
    margin. Otherwise returns an empty list."""
    chosen = (answer.chosen.plan, answer.chosen.estimate)
    known = [(entry.estimate.time.step, entry.plan) for entry in answer.plans]
    known += [(family.seconds, family.plan) for family in answer.families if family.fits]
    _, plan = min(known, key=lambda it: it[0])
    priced = estimate(job, plan)
    gain = required_gain(job, chosen, (plan, priced))
    if not gain:
        return []
    return [
        Message(
            "{plan} is {share:percent} faster, but {reasons}: such a plan comes first only when it is more than "
            "{gain:percent} faster",
            plan=plan.name,
            share=chosen[1].time.step / priced.time.step - 1.0,
            reasons=_risk_reasons(job, chosen, (plan, priced)),
            gain=gain,
        )
    ]


def _risk_reasons(job: Job, chosen: tuple[Plan, Estimate], other: tuple[Plan, Estimate]) -> tuple[Message, ...]:
    """Returns the reasons why `other` is uncertain that do not apply to `chosen`."""
    (mine, priced_mine), (plan, priced), cluster = chosen, other, job.cluster
    found = []
    if priced.verdict == FitStatus.tight and priced_mine.verdict != FitStatus.tight:
        found.append(Message("it is {verdict}", verdict=fit_message(priced)))
    if uses_unmeasured_link(cluster, plan.offload) and not uses_unmeasured_link(cluster, mine.offload):
        found.append(Message("its host link is not profiled (`meshwright probe --save` measures the link)"))
    known = unmeasured_features(cluster, mine)
    if features := tuple(each for each in unmeasured_features(cluster, plan) if each not in known):
        found.append(Message("no published run has {features}", features=features))
    return tuple(found)


def _breakdown_message(answer: SearchResult) -> Message:
    """Returns a text with the fractions of the step time by kind, and the memory of the peak rank with its largest
    kind."""
    priced = answer.chosen.estimate
    items = {
        item: seconds
        for item, seconds in priced.time
        if item != "step" and seconds > MIN_TIME_FRACTION_NAMED * priced.time.step
    }
    shares = tuple(
        Message("{item} {share:percent}", item=term("time", item), share=seconds / priced.time.step)
        for item, seconds in sorted(items.items(), key=lambda it: -it[1])
    )
    kind, size = largest_memory_kind(priced.memory)
    return Message(
        "time: {shares}. memory: {reserved:bytes} of {limit:bytes} usable memory, {verdict}; most of it {kind} "
        "({size:bytes})",
        shares=shares,
        reserved=priced.memory.reserved,
        limit=priced.limit,
        verdict=fit_message(priced),
        kind=kind,
        size=size,
    )


def _chunk_messages(job: Job, chosen: RankedPlan) -> list[Message]:
    """Returns a text with the fraction of the tensor-parallel communication that products hide, unless it
    is a small part of the step."""
    plan, time = chosen.plan, chosen.estimate.time
    if plan.tp == 1 or plan.placement or plan.shares or plan.micro_batch_sizes or plan.shard_weights:
        return []
    pricer = CostModel(job, MESHWRIGHT_RUNTIME._replace(tensor_chunks=1))
    exposed = estimate_grid(pricer, grid_of_plan(plan, job.workload.batch, job.model.blocks)).time.tensor
    if exposed - time.tensor < MIN_TIME_FRACTION_NAMED * time.step:
        return []
    return [
        Message(
            "matrix products hide {share:percent} of the communication over tensor ranks",
            share=1.0 - time.tensor / exposed,
        )
    ]


def _slower_family_message(job: Job, answer: SearchResult, family: PlanFamily) -> Message:
    best = answer.chosen.estimate
    lost = [
        term
        for term in time_deltas(best, estimate(job, family.plan))
        if term.seconds > MIN_TIME_FRACTION_NAMED * best.time.step
    ][:2]
    share = family.seconds / best.time.step - 1.0
    return Message(
        "{family} by {share:percent} ({plan}: {terms})" if lost else "{family} by {share:percent} ({plan})",
        family=family_name(family.name),
        share=share,
        plan=family.plan.name,
        terms=describe_time_deltas(lost),
    )


def describe_time_deltas(lost: Sequence[TimeDelta]) -> tuple[Message, ...]:
    """Returns a text such as 'data +1.2 ms' for each difference in `lost`."""
    return tuple(
        Message("{item} +{seconds:seconds}", item=term("time", delta.name), seconds=delta.seconds) for delta in lost
    )


def _remaining_families(found: Sequence[object]) -> tuple[Message, ...]:
    return (
        (Message("and {count:count} more", count=len(found) - MAX_FAMILIES_NAMED),)
        if len(found) > MAX_FAMILIES_NAMED
        else ()
    )


MAX_CONFLICTING_PINS = 3
"""Maximum number of pins in a reported conflict."""


def pin_conflict(job: Job) -> str:
    """Returns one line about the smallest set of pins that together allow no plan. Returns '' if no set of at most
    MAX_CONFLICTING_PINS pins has this property."""
    for count in range(1, min(len(job.pins), MAX_CONFLICTING_PINS) + 1):
        for names in combinations(job.pins, count):
            pins = {name: job.pins[name] for name in names}
            if leaves_no_plans(job.but(pins=pins)):
                written = " and ".join(f"{name}={format_pin(value)}" for name, value in pins.items())
                reason = pin_violation(pins) or Message(
                    "no plan for {devices} devices has it"
                    if count == 1
                    else "no plan for {devices} devices has them all",
                    devices=job.cluster.devices,
                )
                return Message(
                    "pin {pins}: {reason}" if count == 1 else "pins {pins} contradict each other: {reason}",
                    pins=written,
                    reason=reason,
                )
    return ""


def leaves_no_plans(job: Job) -> bool:
    """Returns whether the plan space of `job` is empty. Returns False if the pins are rejected, because some pins are
    valid only together with a second pin (a number of recomputed blocks needs a recompute kind)."""
    try:
        space = PlanSpace(job)
    except InputError:
        return False
    return not any(True for _ in space.boxes()) and not space.considered


def pin_violation(pins: dict[str, Any]) -> str:
    """Returns the rule that a plan breaks if it has `pins` and default values in all other fields, or ''."""
    given = {("dp_replicate" if name == "dp" else name): value for name, value in pins.items()}
    try:
        Plan().but(**given)
    except InputError as error:
        return without_place(error)
    return ""


def format_pin(value: Any) -> str:
    """Formats the value of a pin as a user writes it.

    >>> format_pin((1, 2)), format_pin(True), format_pin("full")
    ('[1,2]', 'true', 'full')
    """
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


TIME_ITEMS = tuple(name for name in TimeBreakdown.model_fields if name != "step")


class ComparisonOutcome(StrEnum):
    """The outcome of the comparison of a plan with the chosen plan.

    `tight` and `unmeasured` mark a faster plan that ranks lower because its memory is tight, or because its host link
    or a feature has not been measured. `faster` occurs if the search did not include the plan, or if its objective was
    not the shortest step. `unfit`: the plan needs too much memory. `illegal`: the plan breaks a rule.
    """

    chosen = "chosen"
    slower = "slower"
    tight = "tight"
    unmeasured = "unmeasured"
    faster = "faster"
    unfit = "unfit"
    illegal = "illegal"


class TimeDelta(StrictModel):
    """The seconds of one kind of time under a plan minus the seconds under the chosen plan."""

    name: str
    seconds: float


class PlanComparison(StrictModel):
    """The comparison of a plan with the chosen plan. If pins were given instead of a plan, the best plan with these
    pins is compared. `faults` are the rules that the plan, or all plans with the pins, break. If there are faults,
    `estimate` is None."""

    name: str
    outcome: ComparisonOutcome
    plan: Plan | None = None
    estimate: Estimate | None = None
    terms: tuple[TimeDelta, ...] = Field(default=(), description="time differences by kind, largest first")
    faults: tuple[TranslatableText, ...] = ()
    reasons: tuple[TranslatableText, ...] = Field(
        default=(), description="with the outcome unmeasured: why the estimate of the plan is uncertain"
    )

    @property
    def gap(self) -> float:
        """Returns the seconds of a step under the plan minus the seconds under the chosen plan."""
        return math.fsum(term.seconds for term in self.terms)


def time_deltas(chosen: Estimate, other: Estimate) -> tuple[TimeDelta, ...]:
    """Returns the differences in time between `other` and `chosen` by kind. The largest absolute difference is first;
    kinds without a difference are omitted."""
    found = [
        TimeDelta(name=name, seconds=getattr(other.time, name) - getattr(chosen.time, name)) for name in TIME_ITEMS
    ]
    return tuple(sorted((term for term in found if term.seconds), key=lambda term: -abs(term.seconds)))


def compare_with_chosen(job: Job, name: str, chosen: RankedPlan, plan: Plan, priced: Estimate) -> PlanComparison:
    """Compares a plan, whose estimate is `priced`, with the chosen plan. `name` is the label of the plan in the
    returned comparison."""
    outcome = (
        ComparisonOutcome.chosen
        if plan == chosen.plan
        else ComparisonOutcome.unfit
        if not priced.fits
        else ComparisonOutcome.slower
        if round_score(priced.time.step) >= round_score(chosen.estimate.time.step)
        else ComparisonOutcome.faster
        if not required_gain(job, (chosen.plan, chosen.estimate), (plan, priced))
        else ComparisonOutcome.tight
        if priced.verdict == FitStatus.tight and chosen.estimate.verdict != FitStatus.tight
        else ComparisonOutcome.unmeasured
    )
    reasons = (
        _risk_reasons(job, (chosen.plan, chosen.estimate), (plan, priced))
        if outcome == ComparisonOutcome.unmeasured
        else ()
    )
    return PlanComparison(
        name=name,
        outcome=outcome,
        plan=plan,
        estimate=priced,
        terms=time_deltas(chosen.estimate, priced),
        reasons=reasons,
    )


def compare_families(job: Job, answer: SearchResult) -> tuple[PlanComparison, ...]:
    """Compares one plan of every other family with the chosen plan: the best plan that fits, or else the plan nearest
    to fitting."""
    return tuple(
        compare_with_chosen(job, family.name, answer.chosen, family.plan, estimate(job, family.plan))
        for family in answer.families
        if family.plan != answer.chosen.plan
    )


def priced_plan(job: Job, plan: Plan) -> RankedPlan:
    """Returns `plan` with its estimate.

    Raises:
        InputError: the job cannot run the plan. The message names all violated rules.
    """
    if broken := [fault.message for fault in plan_violations(job, plan)]:
        raise InputError(Message("{asked} cannot run: {faults}", asked=plan.name, faults=broken))
    return RankedPlan(plan=plan, estimate=estimate(job, plan))


def why_not(
    job: Job, chosen: RankedPlan, name: str, wanted: Plan | Mapping[str, Any], runnable: bool = False
) -> PlanComparison:
    """Compares `wanted` with the chosen plan of `job`. If `wanted` is pins, the best plan with these pins is compared,
    or the plan nearest to fitting if none fits."""
    if isinstance(wanted, Plan):
        broken = tuple(fault.message for fault in plan_violations(job, wanted))
        if broken:
            return PlanComparison(name=name, outcome=ComparisonOutcome.illegal, plan=wanted, faults=broken)
        return compare_with_chosen(job, name, chosen, wanted, estimate(job, wanted))
    narrowed = job.but(pins={**job.pins, **wanted})
    try:
        found = search_top_plans(narrowed, 1, runnable=runnable)
    except InputError as error:
        return PlanComparison(name=name, outcome=ComparisonOutcome.illegal, faults=(str(error),))
    best = (
        found.ranking.best[0]
        if found.ranking.best
        else min(found.ranking.nearest.values(), key=lambda it: it.reserved, default=None)
    )
    if best is None:
        return PlanComparison(name=name, outcome=ComparisonOutcome.illegal, faults=illegal_reasons(found))
    return compare_with_chosen(job, name, chosen, best.plan, estimate_grid(found.pricer, best.grid))


def illegal_reasons(found: PlanSearch) -> tuple[str, ...]:
    """Returns the reasons why the searched space has no legal plan: the pins that contradict each other, or each rule
    with the number of plans that break it."""
    said = pin_conflict(found.space.job)
    return (
        (said,)
        if said
        else tuple(
            Message("{example} ({count:count plan})", example=it.example, count=it.count)
            for it in found.space.rejected.values()
        )
    )
