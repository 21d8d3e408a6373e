"""Exports a job and a plan to another system: its files, what it cannot express with the cost, and where its numerics
differ.

If the system cannot run the plan, the nearest plan that it can run is exported. Fields with other values than the plan
are listed with both values. The cost is the difference of the two estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message, alternatives, translate
from meshwright.interop.for_system import best_plan_for, price_in
from meshwright.interop.registry import find_system
from meshwright.interop.settings import OPTIMIZER_FIELDS, Settings, settings_of
from meshwright.interop.system import ANY, PlanSpaceLimit, System, encode
from meshwright.planner.cost.named_plans import with_chosen_bucket
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.spec.constraints import validate_plan
from meshwright.spec.enums import Offload
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

RESULT_FIELDS = {"exact": 0, "compression": None, "local": None, "lora": None}
"""Fields of the workload that change the result and that no system expresses, with their defaults."""


class ExportedPlan(NamedTuple):
    """The result of an export. `files` are texts by file name. `plan` is the exported plan. `changes` are the fields
    that the system cannot express, `cost` is what the changes cost, and `numerics` where the results differ. `estimate`
    is that of the plan in the system (`price_in`)."""

    system: System
    files: dict[str, str]
    plan: Plan
    changes: tuple[str, ...]
    cost: Message | None
    numerics: tuple[Message, ...]
    estimate: Estimate


def export_plan(
    job: Job, plan: Plan, system: str, sizes: ArchitectureSizes | None = None, model: str = "", language: str = "en"
) -> ExportedPlan:
    """Exports `plan` for `job` to `system`. `sizes` are the sizes of the model, and `model` is its name. `language` is
    the language of the comments in the files.

    Raises: InputError if the plan cannot run the job, or if the system has no plan with these degrees.
    """
    target = find_system(system)
    validate_plan(job, plan)
    exported, changes = nearest_plan(job, plan, target, sizes)
    settings = settings_of(exported, job.workload, sizes, job.cluster.groups[0].nodes, model)
    changes += _unsupported_settings(job, settings, target)
    if model and not Path(model).exists() and {"model", "name"} & {key.setting for key in target.keys}:
        changes.append(
            Message("replace {model} by the name of your model in {system}", model=model, system=target.title)
        )
    if sizes is None and target.needs_sizes:
        changes.append(
            Message(
                "the sizes of the model are not known to the planner: add the model options of {system}",
                system=target.title,
            )
        )
    price = price_in(job, exported, target, sizes)
    cost = _cost(plan, price_in(job, plan, target, sizes), exported, price) if exported != plan else None
    numerics = tuple(
        Message(
            "{text} ({repository}, {source})",
            text=note.text,
            repository=note.repository or target.repository,
            source=note.source,
        )
        for note in target.numerics
    )
    files = target.write(encode(target, settings), settings)
    found = ExportedPlan(target, files, exported, tuple(changes), cost, numerics, price)
    return found._replace(files=_with_comments(found, job, plan, language))


def nearest_plan(job: Job, plan: Plan, system: System, sizes: ArchitectureSizes | None) -> tuple[Plan, list[str]]:
    """Returns the plan nearest to `plan` that `system` can run, and the fields that differ. Among the modes of the
    system, the one with the fewest changes is used; among those, the fastest. If every mode needs other parallel
    degrees, the result is the best plan that the system can run.

    Raises: NothingFits if no plan of the system fits.
    """
    candidates: list[tuple[int, float, Plan, PlanSpaceLimit]] = []
    for limit in system.limits:
        try:
            found = _fitted(plan, limit)
            if limit.violations(found) or limit.rule(found):
                continue
            price = estimate(job, with_chosen_bucket(job, found))
        except InputError:
            continue
        changed = [name for name in Plan.model_fields if getattr(found, name) != getattr(plan, name)]
        candidates.append((len(changed), price.time.step, found, limit))
    if not candidates:
        limit = system.limit_of(plan)
        reasons: list[str] = [describe_violation(plan, name, system) for name in limit.violations(plan)] or [
            limit.rule(plan)
        ]
        found = best_plan_for(job.but(pins=job.workload.fixed), system, sizes).plan
        return found, [
            *reasons,
            Message(
                "no plan with these degrees is possible; {plan}, the best plan that {system} can run, is exported",
                plan=found.name,
                system=system.title,
            ),
        ]
    _, _, found, limit = min(candidates, key=lambda each: each[:2])
    changes: list[str] = [
        Message(
            "{reason}; exported as {value}",
            reason=describe_violation(plan, name, system, limit),
            value=_shown(found, name),
        )
        for name in Plan.model_fields
        if getattr(found, name) != getattr(plan, name)
    ]
    return found, changes


def _fitted(plan: Plan, limit: PlanSpaceLimit) -> Plan:
    """Returns `plan` with the fields that `limit` does not allow set to their nearest allowed values. The parallel
    degrees stay, except that the data ranks are divided anew between replicas and shards."""
    changes: dict[str, Any] = {}
    for name in limit.violations(plan):
        allowed, value = limit.allowed(name), getattr(plan, name)
        if name == "zero":
            changes[name] = max((each for each in allowed if each <= value), default=min(allowed))
        elif name == "offload":
            changes[name] = max((each for each in allowed if set(each) <= set(value)), key=len, default=allowed[0])
        elif name in ("tp", "pp", "cp", "ep"):
            raise InputError(Message("{name} is not available", name=name))
        else:
            changes[name] = allowed[0]
    zero = changes.get("zero", plan.zero)
    if zero == 0:
        changes |= {"dp_replicate": plan.dp, "dp_shard": 1}
    elif plan.zero == 0 or changes.get("dp_replicate") == 1:
        changes |= {"dp_replicate": 1, "dp_shard": plan.dp}
    if "schedule" in changes or "actions" in changes:
        changes |= {"virtual_stages": 1, "layers_per_stage": ()}
    offload = changes.get("offload", plan.offload)
    if zero < 3:
        offload = tuple(each for each in offload if Offload(each) not in (Offload.parameters, Offload.parameters_disk))
    if zero < 2:
        offload = tuple(each for each in offload if each != Offload.gradients)
    changes["offload"] = offload
    return plan.but(**changes)


def describe_violation(plan: Plan, name: str, system: System, mode: PlanSpaceLimit | None = None) -> Message:
    """Returns why `system` cannot run `plan` because of the field `name`: its value, and the values that `mode` has, or
    the mode that is nearest to the plan."""
    value = _shown(plan, name)
    nearest = mode or system.limit_of(plan)
    modes = [limit for limit in system.limits if _allows(limit, plan, name)]
    if modes and name in nearest.violations(plan):
        return Message(
            "{system} has {name}={value} only with {modes}; {mode} has {allowed}",
            name=name,
            value=value,
            system=system.title,
            modes=alternatives(limit.why for limit in modes),
            mode=nearest.why,
            allowed=_allowed_text((nearest,), name),
        )
    if modes:
        return Message("{name}={value} does not go with the other changes", name=name, value=value)
    return Message(
        "{system} has no {name}={value}; it has {allowed}",
        system=system.title,
        name=name,
        value=value,
        allowed=_allowed_text(system.limits, name),
    )


def _allows(limit: PlanSpaceLimit, plan: Plan, name: str) -> bool:
    allowed = limit.allowed(name)
    return allowed is ANY or getattr(plan, name) in allowed


def _allowed_text(limits: Sequence[PlanSpaceLimit], name: str) -> str:
    """Returns the values that the modes `limits` have for a field, of which none has all values."""
    allowed = dict.fromkeys(value for limit in limits for value in limit.allowed(name))
    return alternatives(f"{name}={_text(value)}" for value in allowed)


def _shown(plan: Plan, name: str) -> str:
    return _text(getattr(plan, name))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(value)


def _unsupported_settings(job: Job, settings: Settings, system: System) -> list[Message]:
    """Returns the settings of the workload that the system does not have. They change the result."""
    found = [
        Message(
            "{system} has no {name}={value}; it has {allowed}: results differ",
            system=system.title,
            name=f"optimizer.{OPTIMIZER_FIELDS[name]}" if name in OPTIMIZER_FIELDS else name,
            value=settings[name],
            allowed=alternatives(map(str, allowed)),
        )
        for name, allowed in system.workload.items()
        if settings.get(name) is not None and settings[name] not in allowed
    ]
    found += [
        Message("{system} has no workload.{name}: results differ", system=system.title, name=name)
        for name, default in RESULT_FIELDS.items()
        if getattr(job.workload, name) != default
    ]
    return found


def _cost(plan: Plan, before: Estimate, exported: Plan, after: Estimate) -> Message:
    """Returns the cost of the exported plan relative to `plan`, both with the kernels of the system."""
    return Message(
        "{exported} instead of {plan}: {after:step} a step instead of {before:step} ({change:+.1%}), "
        "{memory:bytes} on the peak rank instead of {less:bytes}{fits}",
        exported=exported.name,
        plan=plan.name,
        after=after.time.step,
        before=before.time.step,
        change=after.time.step / before.time.step - 1,
        memory=after.memory.reserved,
        less=before.memory.reserved,
        fits=_fit_clause(after),
    )


def _fit_clause(price: Estimate) -> str:
    return "" if price.fits else Message("; it does not fit")


def export_lines(found: ExportedPlan, job: Job, plan: Plan) -> list[Message]:
    """Returns the output of an export: the plan and its estimate, what the system cannot express with the cost,
    and where its numerics differ."""
    price = found.estimate
    lines = [
        Message(
            "{system} {version}, plan {plan} of {model}: {seconds:step} a step and {memory:bytes} on the peak rank "
            "expected{fits}",
            system=found.system.title,
            version=found.system.version,
            plan=found.plan.name,
            model=job.model.name,
            seconds=price.time.step,
            memory=price.memory.reserved,
            fits=_fit_clause(price),
        )
    ]
    if found.changes:
        lines.append(Message("not expressible:"))
        lines += [Message("  {change}", change=change) for change in found.changes]
        lines += [Message("  cost: {cost}", cost=found.cost)] if found.cost else []
    else:
        lines.append(Message("everything is expressible"))
    lines.append(Message("numerics:"))
    return lines + [Message("  {note}", note=note) for note in found.numerics]


def _with_comments(found: ExportedPlan, job: Job, plan: Plan, language: str) -> dict[str, str]:
    """Returns the files with the lines of the export as comments in the first file that may have comments."""
    comment = "".join(f"# {translate(line, language)}\n" for line in export_lines(found, job, plan))
    first = next((name for name in found.files if not name.endswith(".json")), "")
    return {
        name: ("#!/bin/bash\n" if name.endswith(".sh") else "") + (comment if name == first else "") + text
        for name, text in found.files.items()
    }
