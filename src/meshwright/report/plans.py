"""Plans and estimates as text that fits 100 columns, and as the JSON that the command line promises. Numbers are the estimate's own."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.base.units import show_bytes, show_count, show_seconds
from meshwright.report.text import columns
from meshwright.spec.estimate import Estimate, Memory, Time
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.search.answer import Answer

WIDTH = 100


def question_text(job: Job) -> str:
    """Model, cluster and workload in three lines."""
    work, cluster, model = job.workload, job.cluster, job.model
    groups = " + ".join(
        f"{group.nodes} x {group.devices} {group.device.name} ({show_bytes(group.device.memory)})" for group in cluster.groups
    )
    return "\n".join(
        [
            f"model    {model.name}: {show_count(model.parameters)} parameters, {model.blocks} blocks, hidden {model.hidden}",
            f"cluster  {cluster.name}: {groups}",
            f"work     batch {work.batch} x {work.sequence} tokens, {work.precision}, {work.optimizer.name}",
        ]
    )


def answer_text(job: Job, answer: Answer, why: Sequence[str]) -> str:
    """The ranked plans, why the first one, and what was rejected for what reason."""
    ranked = plan_table([(entry.plan, entry.estimate) for entry in answer.plans])
    tally = f"{answer.considered:,} plans considered in {show_seconds(answer.seconds)}"
    if answer.rejected:
        lines = [(clip(f"{entry.reason} ({entry.example})", WIDTH - 14), f"{entry.count:,}") for entry in answer.rejected]
        tally += ", rejected:\n" + columns(lines, "  ")
    return "\n\n".join([question_text(job), ranked, "\n".join(map(folded, why)), tally])


def folded(line: str) -> str:
    """`line` in at most WIDTH columns, what follows indented."""
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def plan_table(entries: Sequence[tuple[Plan, Estimate]]) -> str:
    """One plan a line; `exposed` is communication that nothing hides."""
    rows = [("plan", "step", "tokens/s", "MFU", "memory", "", "bubble", "exposed")]
    for plan, estimate in entries:
        time = estimate.time
        rows.append(
            (
                clip(plan.name, 40),
                show_seconds(time.step),
                f"{estimate.tokens_per_second:,.0f}",
                f"{estimate.mfu:.1%}",
                show_bytes(estimate.memory.total),
                str(estimate.verdict),
                share(time.bubble, time),
                share(exposed(time), time),
            )
        )
    return columns(rows)


def estimate_text(job: Job, plan: Plan, estimate: Estimate) -> str:
    """One plan: memory of every pipeline rank, time, item by item."""
    shown = shown_stages(len(estimate.per_stage))
    memory = [("memory a device", *(f"rank {stage}" for stage in shown))]
    for field in Memory.model_fields:
        memory.append((field, *(show_bytes(getattr(estimate.per_stage[stage], field)) for stage in shown)))
    smallest = job.cluster.memory
    time = [("time a step", "seconds", "share")]
    time += [
        (field, show_seconds(value), share(value, estimate.time))
        for field in Time.model_fields
        if (value := getattr(estimate.time, field)) or field == "step"
    ]
    verdict = {"fits": "fits", "tight": "fits, but tightly", "no": "does not fit"}[str(estimate.verdict)]
    lines = [
        question_text(job),
        f"plan     {plan.name}: {verdict} in {show_bytes(smallest)}; {estimate.memory.reserved / smallest:.0%} of it is reserved on the busiest rank",
        "",
        columns(memory),
        *([f"(pipeline ranks between {shown[-2]} and {shown[-1]} are left out)"] if len(shown) < len(estimate.per_stage) else []),
        "",
        columns(time),
        "",
        f"{estimate.tokens_per_second:,.0f} tokens/s, MFU {estimate.mfu:.1%}",
        *(f"note: {text}" for text in estimate.notes),
    ]
    return "\n".join(lines)


def shown_stages(count: int, most: int = 6) -> list[int]:
    """Which pipeline ranks a table of `most` columns shows: the first ones and the last."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]


def exposed(time: Time) -> float:
    """Seconds of communication that nothing hides."""
    return time.tensor + time.data + time.pipeline + time.context + time.expert


def share(value: float, time: Time) -> str:
    return f"{value / time.step:.0%}" if time.step else "-"


def clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def entry_data(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """ENTRY of the JSON: name, plan, estimate. Bytes and seconds."""
    return {"name": plan.name, "plan": plan.model_dump(mode="json"), "estimate": estimate.model_dump(mode="json")}


def answer_data(job: Job, answer: Answer) -> dict[str, Any]:
    """The answer of `plan --json`."""
    return {
        "job": job.model_dump(mode="json"),
        "chosen": entry_data(answer.chosen.plan, answer.chosen.estimate),
        "plans": [entry_data(entry.plan, entry.estimate) for entry in answer.plans],
        "considered": answer.considered,
        "rejected": [{"reason": entry.reason, "count": entry.count, "example": entry.example} for entry in answer.rejected],
        "seconds": answer.seconds,
    }


__all__ = ["answer_data", "answer_text", "entry_data", "estimate_text", "plan_table", "question_text"]
