"""Compares three plans for a job: a given configuration of a system, the best plan that the system can run, and the
best plan here. The change of the configuration is shown as a diff of the system's own keys.

The first two plans are estimated under the planner's profile of the system, the third under this project's runtime.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message, term
from meshwright.interop.exporting import describe_violation
from meshwright.interop.for_system import SystemPlan, plans_for, price_in, profile_of
from meshwright.interop.formats import argument_words
from meshwright.interop.settings import settings_of
from meshwright.interop.system import System, encode
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.validation.frameworks import EAGER_TORCH
from meshwright.spec.constraints import validate_plan
from meshwright.spec.estimate import Estimate, TimeBreakdown, fit_message
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MIN_CHANGE = 0.01
"""Changes of a kind of time below this fraction of the step are not mentioned."""
MAX_REASONS = 4
ESTIMATE_ERROR = 0.05
"""Gains below this fraction of the step are within the error of the estimates (page accuracy), so no change of a
configuration is suggested for them."""


class SystemComparison(NamedTuple):
    """Three plans for a job. `yours` is None without a configuration. `removed` and `added` are the keys of the system
    that change from `yours` to `best`; without `yours`, `added` has all keys of `best`."""

    system: System
    yours: SystemPlan | None
    best: SystemPlan
    here: SystemPlan
    removed: dict[str, Any]
    added: dict[str, Any]

    @property
    def is_within_error(self) -> bool:
        """Returns whether the given configuration fits and is as fast as the best one within the estimates' error."""
        if self.yours is None or not self.yours.estimate.fits:
            return False
        return self.best.estimate.time.step > (1 - ESTIMATE_ERROR) * self.yours.estimate.time.step


def compare_for(
    job: Job,
    system: System,
    sizes: ArchitectureSizes | None,
    model: str = "",
    yours: Plan | None = None,
    given: Mapping[str, Any] | None = None,
) -> SystemComparison:
    """Returns the comparison of `yours` with the best plan in `system` and the best plan here. `sizes` are the sizes of
    the model, and `model` is its name. `given` are the keys of the configuration of `yours`.

    Raises: InputError if `yours` cannot run on the cluster; NothingFits if no plan fits.
    """
    if yours is not None:
        if yours.world != job.cluster.devices:
            raise InputError(
                Message(
                    "the configuration uses {world:count device}, but the cluster has {devices:count device}: name the "
                    "cluster with --cluster",
                    world=yours.world,
                    devices=job.cluster.devices,
                )
            )
        validate_plan(job, yours)
    best = plans_for(job, system, sizes, 1)[0]
    chosen = search_plans(job, 1).chosen

    def keys(plan: Plan) -> dict[str, Any]:
        return encode(system, settings_of(plan, job.workload, sizes, job.cluster.groups[0].nodes, model))

    before, after = keys(yours) if yours is not None else {}, keys(best.plan)
    if given is not None:
        repeated = _repeated_keys(system, given)
        before = {name: value for name, value in before.items() if name in given or name not in system.optional_keys}
        before, after = ({name: each[name] for name in each if name not in repeated} for each in (before, after))
    return SystemComparison(
        system=system,
        yours=SystemPlan(yours, price_in(job, yours, system, sizes)) if yours is not None else None,
        best=best,
        here=SystemPlan(chosen.plan, chosen.estimate),
        removed={name: value for name, value in before.items() if after.get(name) != value},
        added={name: value for name, value in after.items() if before.get(name) != value},
    )


def _repeated_keys(system: System, given: Mapping[str, Any]) -> set[str]:
    """Returns the keys that do not change with a configuration: those that are "auto", and those that it does not have
    because it has another key with the same value."""
    plain = [key for key in system.keys if key.values is None and key.write is None]
    stated = {key.setting for key in plain if {key.name, *key.also} & given.keys()}
    repeated = {key.name for key in plain if key.setting in stated and not {key.name, *key.also} & given.keys()}
    return repeated | {name for name, value in given.items() if value == "auto"}


def comparison_lines(found: SystemComparison) -> list[Message]:
    """Returns the comparison as lines: the three plans, the diff of keys, and the reasons."""
    rows = [(Message("yours"), found.yours)] if found.yours is not None else []
    rows += [(Message("best in {system}", system=found.system.title), found.best), (Message("best here"), found.here)]
    lines = [
        Message(
            "{name}: {plan}, {seconds:step} a step, {memory:bytes} on the peak rank, {fits}",
            name=name,
            plan=row.plan.name,
            seconds=row.estimate.time.step,
            memory=row.estimate.memory.reserved,
            fits=fit_message(row.estimate),
        )
        for name, row in rows
        if row is not None
    ]
    if found.yours is not None and not found.removed and not found.added:
        lines.append(Message("your configuration is the best that {system} can run", system=found.system.title))
    elif found.is_within_error:
        lines.append(
            Message(
                "no change: your configuration is within the error of the estimates ({error:.0%}) of the best that "
                "{system} can run",
                error=ESTIMATE_ERROR,
                system=found.system.title,
            )
        )
    elif found.yours is not None:
        lines.append(Message("change of your configuration:"))
    else:
        lines.append(Message("configuration of the best plan in {system}:", system=found.system.title))
    for name in () if found.is_within_error else dict.fromkeys((*found.removed, *found.added)):
        if name in found.removed:
            lines.append(Message("  - {setting}", setting=show_key(name, found.removed[name])))
        if name in found.added:
            lines.append(Message("  + {setting}", setting=show_key(name, found.added[name])))
    return lines + [Message("reasons:")] + [Message("  {reason}", reason=reason) for reason in _reasons(found)]


def show_key(name: str, value: Any) -> str:
    """Returns a key with its value as the system writes it: an option, a constant of a script, or an entry of a
    file."""
    if name.startswith("--"):
        return argument_words({name: value})[0]
    if name.isupper():
        return f"{name} = {value!r}"
    return f"{name}: {json.dumps(value)}"


def _reasons(found: SystemComparison) -> list[Message]:
    """Returns why the best plan of the system differs from the given one, and why the best plan here differs."""
    profile = profile_of(found.system)
    reasons = []
    if found.yours is not None and found.yours.plan != found.best.plan:
        reasons.append(_difference(found.yours, found.best))
    reasons.append(_difference(found.best, found.here))
    limit = found.system.limit_of(found.here.plan)
    names = limit.violations(found.here.plan)
    reasons += [describe_violation(found.here.plan, name, found.system, limit) for name in names]
    if not names and (refusal := limit.rule(found.here.plan)):
        reasons.append(Message("{reason}", reason=refusal))
    reasons.append(
        Message(
            "{system} is estimated with its own kernels and overlap: {source}",
            system=found.system.title,
            source=Message("eager PyTorch modules, reduction overlapped with backward")
            if profile is EAGER_TORCH
            else profile.source,
        )
    )
    return reasons


def _difference(before: SystemPlan, after: SystemPlan) -> Message:
    """Returns the change of the step time between two plans, by the kinds of time that change most, and the change of
    memory."""
    first, second = before.estimate, after.estimate
    if before.plan == after.plan:
        return Message("{plan} is the best plan of both", plan=after.plan.name)
    return Message(
        "{after} instead of {before}: {change:+.1%} step time ({kinds}), {memory:bytes} instead of {less:bytes}",
        after=after.plan.name,
        before=before.plan.name,
        change=second.time.step / first.time.step - 1,
        kinds=_changed_kinds(first, second),
        memory=second.memory.reserved,
        less=first.memory.reserved,
    )


def _changed_kinds(first: Estimate, second: Estimate) -> tuple[Message, ...] | Message:
    changes: Mapping[str, float] = {
        name: getattr(second.time, name) - getattr(first.time, name)
        for name in TimeBreakdown.model_fields
        if name != "step"
    }
    largest = sorted(changes, key=lambda name: -abs(changes[name]))[:MAX_REASONS]
    return tuple(
        Message(
            "{kind} {sign}{seconds:seconds}",
            kind=term("time", name),
            sign="+" if changes[name] > 0 else "-",
            seconds=abs(changes[name]),
        )
        for name in largest
        if abs(changes[name]) > MIN_CHANGE * first.time.step
    ) or Message("no kind of time changes by more than 1 %")
