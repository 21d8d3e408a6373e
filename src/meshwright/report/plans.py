"""Formats plans and estimates for `plan` and `estimate`: as text of at most 100 columns, and as the data of the JSON
output. All numbers come from the estimate.

The module also formats the layers of a model: parameters, FLOPs, saved activations, and the tensors that tensor
parallelism shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.core.messages import Message, term, translate
from meshwright.core.units import show_bytes, show_count, show_seconds, show_step
from meshwright.planner.inputs.plan_only import plan_only_parts, plan_only_reasons, untrainable_part
from meshwright.report.text import align_columns, display_width, terminal_width, wrap_text
from meshwright.spec.constraints import is_supported, unsupported_parts
from meshwright.spec.estimate import Estimate, MemoryBreakdown, TimeBreakdown, fit_message
from meshwright.spec.job import Job
from meshwright.spec.model import LayerSpec, ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.precision import RECIPES

if TYPE_CHECKING:
    from meshwright.planner.search.best_plans import SearchResult

MIN_NAME_COLUMNS = 20
"""The minimum number of columns for a plan's name, even on a narrow terminal."""


def job_text(job: Job, language: str = "en") -> str:
    """Returns three lines with the model, the cluster and the workload."""
    work, cluster, model = job.workload, job.cluster, job.model
    groups = " + ".join(
        f"{group.nodes} x {group.devices} {group.device.name} ({show_bytes(group.device.memory)})"
        for group in cluster.groups
    )
    values = {"model": model.name, "parameters": model.parameters, "blocks": model.blocks, "hidden": model.hidden}
    lines = [
        Message("model    {model}: {parameters:parameters} parameters, {blocks} blocks, hidden {hidden}", **values),
        Message("cluster  {cluster}: {groups}", cluster=cluster.name, groups=groups),
        Message(
            "work     batch {batch} x {sequence} tokens, {precision}, {optimizer}",
            batch=work.batch,
            sequence=work.sequence,
            precision=work.precision,
            optimizer=work.optimizer.name,
        ),
    ]
    return "\n".join(wrap_text(translate(line, language)) for line in lines)


def search_result_text(
    job: Job, answer: SearchResult, why: Sequence[Message], trust: Sequence[Message] = (), language: str = "en"
) -> str:
    """Returns the ranked plans, the reasons for the first plan, what is known about the error of its estimate
    (`trust`), and the rejected plans by reason."""
    ranked = plan_table(job, [(entry.plan, entry.estimate) for entry in answer.plans], language)
    fault = untrainable_part(job.model, job.cluster)
    remarks = plan_only_messages(job, answer) if fault is None else [Message("plan-only: {fault}", fault=fault)]
    ranked += "".join(f"\n{wrap_text(translate(remark, language))}" for remark in remarks)
    tally = Message(
        "{count:count plan} considered in {seconds:seconds}", count=answer.considered, seconds=answer.seconds
    )
    lines = [translate(Message("{tally}, rejected:", tally=tally) if answer.rejected else tally, language)]
    if answer.rejected:
        width = max(len(f"{entry.count:,}") for entry in answer.rejected)
        for entry in answer.rejected:
            example = f"{translate(term('reason', entry.reason), language)} ({translate(entry.example, language)})"
            lines.append(wrap_text(f"  {entry.count:>{width},}  {example}", indent=" " * (width + 6)))
    notes = [Message("note: {note}", note=note) for note in answer.chosen.estimate.notes]
    said = messages_text([*why, *placement_messages(job, answer.chosen.plan), *notes], language)
    known = [messages_text(trust, language)] if trust else []
    return "\n\n".join([job_text(job, language), ranked, said, *known, "\n".join(lines)])


def plan_only_messages(job: Job, answer: SearchResult) -> list[Message]:
    """Returns a note if this version cannot run some of the ranked plans. If the chosen plan is one of them, the note
    also names the fastest known plan that can run."""
    if all(entry.runs for entry in answer.plans):
        return []
    recipe = job.workload.recipe
    able = [(entry.estimate.time.step, entry.plan) for entry in answer.plans if entry.runs]
    able += [
        (family.seconds, family.plan) for family in answer.families if family.fits and is_supported(family.plan, recipe)
    ]
    parts = (part for entry in answer.plans for part in unsupported_parts(entry.plan, recipe))
    values = {"parts": ", ".join(dict.fromkeys(parts))}
    if not able or answer.chosen.runs:
        return [Message("* plan-only: this version does not run {parts} yet", **values)]
    seconds, plan = min(able, key=lambda it: it[0])
    return [
        Message(
            "* plan-only: this version does not run {parts} yet; with --runnable the first is {plan} or better "
            "({share:percent} slower at most)",
            **values,
            plan=plan.name,
            share=seconds / answer.chosen.estimate.time.step - 1.0,
        )
    ]


def placement_messages(job: Job, plan: Plan) -> list[Message]:
    """Returns a line with the tiers of the network and the axes of the plan that span each of them. The result is empty
    if the network has no tiers outside of nodes."""
    from meshwright.planner.cost.links import link_model, ranks_by_tier
    from meshwright.spec.grid import rank_strides

    if not job.cluster.tiers:
        return []
    links, strides = link_model(job.cluster), rank_strides(plan)
    axes = [(axis, getattr(plan, axis), stride) for axis, stride in strides.items() if getattr(plan, axis) > 1]
    tiers = [
        Message(
            "{link} ({rate:rate} a device) connects {devices}: {axes}",
            link=link.name,
            rate=link.bandwidth,
            devices=span,
            axes=", ".join(f"{axis}{n}" for axis, n, stride in axes if len(ranks_by_tier(links, n, stride)) == at + 1)
            or Message("none"),
        )
        for at, (link, span) in enumerate(zip(links.links, (*links.spans, job.cluster.devices), strict=True))
    ]
    return [Message("network of {plan}: {tiers}", plan=plan.name, tiers=tiers)]


def messages_text(said: Sequence[Message], language: str = "en") -> str:
    """Returns each message on a separate, wrapped line."""
    return "\n".join(wrap_text(translate(sentence, language)) for sentence in said)


def plan_table(job: Job, entries: Sequence[tuple[Plan, Estimate]], language: str = "en") -> str:
    """Returns a table with one plan per line. `memory` is the reserved memory, `spare` the remaining memory of the
    device, and `exposed` the communication that is not hidden."""
    rows = [
        [
            table_heading(head, language)
            for head in ("plan", "step", "tokens/s", "MFU", "memory", "verdict", "spare", "bubble", "exposed")
        ]
    ]
    for plan, estimate in entries:
        time = estimate.time
        rows.append(
            [
                plan.name + ("" if is_supported(plan, job.workload.recipe) else " *"),
                show_step(time.step),
                f"{estimate.tokens_per_second:,.0f}",
                f"{estimate.mfu:.1%}",
                show_bytes(estimate.memory.reserved),
                table_heading(str(estimate.verdict), language),
                f"{estimate.spare / estimate.limit:.0%}" if estimate.limit else "-",
                step_fraction(time.bubble, time),
                step_fraction(exposed_comm_seconds(time), time),
            ]
        )
    return align_columns(wrap_plan_names(rows))


def wrap_plan_names(rows: list[list[str]], at: int = 0) -> list[list[str]]:
    """Breaks long plan names in column `at` over several rows, so that the table fits on the terminal without shortened
    names. Returns the new rows."""
    rest = sum(2 + max(display_width(row[column]) for row in rows) for column in range(len(rows[0])) if column != at)
    found = []
    for row in rows:
        first, *more = split_plan_name(row[at], max(terminal_width() - rest, MIN_NAME_COLUMNS))
        found.append([*row[:at], first, *row[at + 1 :]])
        found += [[*[""] * at, "  " * (not at) + part] for part in more]
    return found


def split_plan_name(name: str, room: int) -> list[str]:
    """Splits a plan's name into lines of at most `room` columns. Lines break before a dot, or in a long list of numbers
    after a dash.

    >>> split_plan_name("dp4.tp2.sp.pp8.z1.interleaved10 *", 20)
    ['dp4.tp2.sp.pp8.z1', '.interleaved10 *']
    """
    pieces = [
        piece
        for part in name.replace(".", "\0.").split("\0")
        for piece in (part.replace("-", "-\0").split("\0") if len(part) > room - 2 else [part])
    ]
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) <= room - 2 * (len(lines) > 1):
            lines[-1] += piece
        else:
            lines.append(piece)
    return [clip_text(line, room) for line in lines]


def table_heading(word: str, language: str) -> str:
    """Returns a table heading in `language`."""
    return translate(term("label", word), language)


def estimate_text(job: Job, plan: Plan, estimate: Estimate, language: str = "en") -> str:
    """Returns the text of one plan: the memory of its pipeline ranks by kind, and its time by kind."""
    shown = shown_stages(len(estimate.per_stage))
    memory = [[table_heading("memory a device", language), *(f"rank {stage}" for stage in shown)]]
    for field in MemoryBreakdown.model_fields:
        memory.append(
            [
                translate(term("memory", field), language),
                *(show_bytes(getattr(estimate.per_stage[stage], field)) for stage in shown),
            ]
        )
    time = [
        [table_heading("time a step", language), table_heading("seconds", language), table_heading("share", language)]
    ]
    time += [
        [
            translate(term("time", field), language),
            show_seconds(value),
            step_fraction(value, estimate.time),
        ]
        for field in TimeBreakdown.model_fields
        if (value := getattr(estimate.time, field)) or field == "step"
    ]
    head = Message(
        "plan     {plan}: {verdict}; {reserved:bytes} of {limit:bytes} usable memory are reserved on the peak rank",
        plan=plan.name,
        verdict=fit_message(estimate),
        reserved=estimate.memory.reserved,
        limit=estimate.limit,
    )
    left_out = (
        Message("(pipeline ranks between {first} and {last} are omitted)", first=shown[-2], last=shown[-1])
        if len(shown) < len(estimate.per_stage)
        else None
    )
    speed = Message("{rate:count} tokens/s, MFU {mfu}", rate=estimate.tokens_per_second, mfu=f"{estimate.mfu:.1%}")
    lines = [
        job_text(job, language),
        wrap_text(translate(head, language)),
        "",
        align_columns(memory),
        *([translate(left_out, language)] if left_out is not None else []),
        *(
            [translate(Message("plus {size:bytes} offloaded to CPU memory or NVMe", size=estimate.offloaded), language)]
            if estimate.offloaded
            else []
        ),
        "",
        align_columns(time),
        "",
        translate(speed, language),
        *(wrap_text(translate(line, language)) for line in placement_messages(job, plan)),
        *(wrap_text(translate(reason, language)) for reason in plan_only_reasons(job, plan)),
        *(wrap_text(translate(Message("note: {note}", note=text), language)) for text in estimate.notes),
    ]
    return "\n".join(lines)


def shown_stages(count: int, most: int = 6) -> list[int]:
    """Returns the pipeline ranks that a table of `most` columns shows: the first ranks and the last rank."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]


def exposed_comm_seconds(time: TimeBreakdown) -> float:
    """Returns the seconds of exposed communication, which does not overlap with compute."""
    return time.tensor + time.data + time.pipeline + time.context + time.expert


def step_fraction(value: float, time: TimeBreakdown) -> str:
    """Returns the seconds `value` as a percentage of the step, or a dash if the step takes no time."""
    return f"{value / time.step:.0%}" if time.step else "-"


def clip_text(text: str, width: int) -> str:
    """Returns `text` shortened to at most `width` columns."""
    if display_width(text) <= width:
        return text
    while display_width(text) > width - 3:
        text = text[:-1]
    return text + "..."


def plan_data(job: Job, plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """Returns the JSON data of one plan: name, plan, estimate, and whether this version runs it. Units are bytes and
    seconds."""
    return {
        "name": plan.name,
        "plan": plan.model_dump(mode="json"),
        "estimate": estimate.model_dump(mode="json"),
        "runs": not plan_only_parts(job, plan),
    }


def search_result_data(job: Job, answer: SearchResult) -> dict[str, Any]:
    """Returns the data of `plan --json`."""
    return {
        "job": job.model_dump(mode="json"),
        "chosen": plan_data(job, answer.chosen.plan, answer.chosen.estimate),
        "plans": [plan_data(job, entry.plan, entry.estimate) for entry in answer.plans],
        "considered": answer.considered,
        "rejected": [
            {"reason": entry.reason, "count": entry.count, "example": entry.example} for entry in answer.rejected
        ],
        "seconds": answer.seconds,
    }


__all__ = ["estimate_text", "job_text", "plan_data", "plan_table", "search_result_data", "search_result_text"]


LAYER_COLUMNS = ("layer", "times", "parameters", "FLOPs", "attention", "kept", "by tp", "more in backward")


def layers_text(model: ModelSpec, precision: str, sequence: int, language: str = "en") -> str:
    """Returns a table with a line for each group of identical layers, then the names of their weights, and notes on the
    model.

    FLOPs are per token in forward, with attention over `sequence` tokens. Activations are the bytes saved per token at
    `precision`, with the percentage of these bytes that tensor parallelism shards.
    """
    size = RECIPES[precision].size
    rows: list[tuple[str, ...]] = [tuple(table_heading(head, language) for head in LAYER_COLUMNS)]
    rows += [_layer_row(layer, size, sequence) for layer in model.layers]
    values = {"model": model.name, "parameters": model.parameters, "blocks": model.blocks, "hidden": model.hidden}
    said = [
        translate(
            Message("model    {model}: {parameters:parameters} parameters, {blocks} blocks, hidden {hidden}", **values),
            language,
        )
    ]
    said += [
        translate(
            Message(
                "a token  of {sequence}, in {precision}; divisible by tp: {divisible}",
                sequence=sequence,
                precision=precision,
                divisible=_divisibility_message(model),
            ),
            language,
        ),
        "",
        align_columns(rows),
        "",
    ]
    said += [wrap_text(translate(line, language)) for layer in model.layers for line in _weight_messages(layer)]
    if model.notes:
        said += [
            "",
            translate(Message("found by running it on the meta device:"), language),
            *(wrap_text(f"- {translate(note, language)}") for note in model.notes),
        ]
    return "\n".join(said)


def _layer_row(layer: LayerSpec, size: int, sequence: int) -> tuple[str, ...]:
    split = layer.saved_split * size + layer.fixed_split + layer.core_context * sequence
    saved = split + layer.saved_whole * size + layer.fixed_whole
    attention = layer.attention_flops * sequence
    return (
        layer.name,
        str(layer.repeat),
        show_count(layer.numel),
        show_count(layer.flops) if layer.flops else "-",
        show_count(attention) if attention else "-",
        show_bytes(saved),
        f"{split / saved:.0%}" if saved else "-",
        show_bytes(layer.transient * size),
    )


def _weight_messages(layer: LayerSpec) -> Iterator[Message]:
    """Yields up to three lines about the weights of a layer. The first names the weights that tensor parallelism
    shards, with the sharded dimension. The second names the replicated weights. The third names a weight that is tied
    to another layer."""
    shared = [f"{parameter.name}[{parameter.split}]" for parameter in layer.parameters if parameter.split is not None]
    whole = [parameter.name for parameter in layer.parameters if parameter.split is None]
    if shared:
        yield Message("{layer}, sharded by tp: {names}", layer=layer.name, names=", ".join(shared))
    if whole:
        yield Message("{layer}, not sharded: {names}", layer=layer.name, names=", ".join(whole))
    if layer.tied and layer.parameters:
        yield Message("{layer}, tied to {to}: {name}", layer=layer.name, to=layer.tied, name=layer.parameters[0].name)


def _divisibility_message(model: ModelSpec) -> Message | str:
    if not model.tensor_parallel:
        return Message("nothing, no layer is sharded among tensor ranks")
    return ", ".join(f"{what} {number}" for what, number in model.divisible.items()) or Message("any")
