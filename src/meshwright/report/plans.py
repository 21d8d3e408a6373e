"""Plans and estimates as text that fits 100 columns, and as the JSON that the command line promises. Numbers are the estimate's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.base.units import show_bytes, show_seconds
from meshwright.report.text import columns, columns_of, folded, screen
from meshwright.spec.estimate import Estimate, Memory, Time
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.runs import missing, runs
from meshwright.words.lines import translated
from meshwright.words.say import Sentence, name, say, tell
from meshwright.words.verdict import verdict

if TYPE_CHECKING:
    from meshwright.search.answer import Answer

NAME = 20
"""Columns that a plan's name has at the least, however narrow the terminal."""


def question_text(job: Job, language: str = "en") -> str:
    """Model, cluster and workload in three lines."""
    work, cluster, model = job.workload, job.cluster, job.model
    groups = " + ".join(
        f"{group.nodes} x {group.devices} {group.device.name} ({show_bytes(group.device.memory)})" for group in cluster.groups
    )
    values = {"model": model.name, "parameters": model.parameters, "blocks": model.blocks, "hidden": model.hidden}
    lines = [
        tell("question.model", **values),
        tell("question.cluster", cluster=cluster.name, groups=groups),
        tell("question.work", batch=work.batch, sequence=work.sequence, precision=work.precision, optimizer=work.optimizer.name),
    ]
    return "\n".join(folded(say(line, language)) for line in lines)


def answer_text(job: Job, answer: Answer, why: Sequence[Sentence], language: str = "en") -> str:
    """The ranked plans, why the first one, and what was rejected for what reason."""
    ranked = plan_table([(entry.plan, entry.estimate) for entry in answer.plans], language)
    ranked += "".join(f"\n{folded(say(remark, language))}" for remark in not_run(answer))
    tally = tell("answer.considered", count=answer.considered, seconds=answer.seconds)
    lines = [say(tell("answer.rejected", tally=tally) if answer.rejected else tally, language)]
    if answer.rejected:
        width = max(len(f"{entry.count:,}") for entry in answer.rejected)
        for entry in answer.rejected:
            example = f"{say(name('reason', entry.reason), language)} ({translated(entry.example, language)})"
            lines.append(folded(f"  {entry.count:>{width},}  {example}", indent=" " * (width + 6)))
    said = told([*why, *(tell("estimate.note", note=note) for note in answer.chosen.estimate.notes)], language)
    return "\n\n".join([question_text(job, language), ranked, said, "\n".join(lines)])


def not_run(answer: Answer) -> list[Sentence]:
    """Which of the plans only are planned, and the first that this version runs."""
    if all(entry.runs for entry in answer.plans):
        return []
    able = [(entry.estimate.time.step, entry.plan) for entry in answer.plans if entry.runs]
    able += [(family.seconds, family.plan) for family in answer.families if family.fits and runs(family.plan)]
    values = {"parts": ", ".join(dict.fromkeys(part for entry in answer.plans for part in missing(entry.plan)))}
    if not able or answer.chosen.runs:
        return [tell("answer.planned", **values)]
    seconds, plan = min(able, key=lambda it: it[0])
    return [tell("answer.runs", **values, plan=plan.name, share=seconds / answer.chosen.estimate.time.step - 1.0)]


def told(said: Sequence[Sentence], language: str = "en") -> str:
    """Sentences, each on a line of its own that is folded."""
    return "\n".join(folded(say(sentence, language)) for sentence in said)


def plan_table(entries: Sequence[tuple[Plan, Estimate]], language: str = "en") -> str:
    """One plan a line; `memory` is what is reserved, `spare` what is left of the device, `exposed` communication that nothing hides."""
    rows = [[label(head, language) for head in ("plan", "step", "tokens/s", "MFU", "memory", "verdict", "spare", "bubble", "exposed")]]
    for plan, estimate in entries:
        time = estimate.time
        rows.append(
            [
                plan.name + ("" if runs(plan) else " *"),
                show_step(time.step),
                f"{estimate.tokens_per_second:,.0f}",
                f"{estimate.mfu:.1%}",
                show_bytes(estimate.memory.reserved),
                label(str(estimate.verdict), language),
                f"{estimate.spare / estimate.limit:.0%}" if estimate.limit else "-",
                share(time.bubble, time),
                share(exposed(time), time),
            ]
        )
    return columns(broken(rows))


def broken(rows: list[list[str]], at: int = 0) -> list[list[str]]:
    """The same with long names of plans in column `at` broken over several lines, so that the table fits and names that differ look different."""
    rest = sum(2 + max(columns_of(row[column]) for row in rows) for column in range(len(rows[0])) if column != at)
    found = []
    for row in rows:
        first, *more = parts_of(row[at], max(screen() - rest, NAME))
        found.append([*row[:at], first, *row[at + 1 :]])
        found += [[*[""] * at, "  " * (not at) + part] for part in more]
    return found


def parts_of(name: str, room: int) -> list[str]:
    """A plan's name in pieces of at most `room` columns, broken before a dot, and in a long list of numbers behind a dash.

    >>> parts_of("dp4.tp2.sp.pp8.z1.interleaved10 *", 20)
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
    return [clip(line, room) for line in lines]


def show_step(seconds: float) -> str:
    """A step beside others: in seconds as long as that has a digit behind the point.

    >>> show_step(75.26), show_step(0.5), show_step(4200.0)
    ('75.3 s', '500.0 ms', '1 h 10 min')
    """
    return f"{seconds:.1f} s" if 60.0 <= seconds < 1000.0 else show_seconds(seconds)


def label(word: str, language: str) -> str:
    """A heading, in the language of the screen."""
    return say(name("label", word), language)


def estimate_text(job: Job, plan: Plan, estimate: Estimate, language: str = "en") -> str:
    """One plan: memory of every pipeline rank, time, item by item."""
    shown = shown_stages(len(estimate.per_stage))
    memory = [[label("memory a device", language), *(f"rank {stage}" for stage in shown)]]
    for field in Memory.model_fields:
        memory.append([say(name("memory", field), language), *(show_bytes(getattr(estimate.per_stage[stage], field)) for stage in shown)])
    time = [[label("time a step", language), label("seconds", language), label("share", language)]]
    time += [
        [say(name("time", field), language), show_seconds(value), share(value, estimate.time)]
        for field in Time.model_fields
        if (value := getattr(estimate.time, field)) or field == "step"
    ]
    head = tell("estimate.plan", plan=plan.name, verdict=verdict(estimate), reserved=estimate.memory.reserved, limit=estimate.limit)
    left_out = tell("estimate.left_out", first=shown[-2], last=shown[-1]) if len(shown) < len(estimate.per_stage) else None
    speed = tell("estimate.speed", rate=estimate.tokens_per_second, mfu=f"{estimate.mfu:.1%}")
    lines = [
        question_text(job, language),
        folded(say(head, language)),
        "",
        columns(memory),
        *([say(left_out, language)] if left_out is not None else []),
        *([say(tell("estimate.offloaded", size=estimate.offloaded), language)] if estimate.offloaded else []),
        "",
        columns(time),
        "",
        say(speed, language),
        *(folded(say(tell("estimate.note", note=text), language)) for text in estimate.notes),
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
    """`text` in at most `width` columns."""
    if columns_of(text) <= width:
        return text
    while columns_of(text) > width - 3:
        text = text[:-1]
    return text + "..."


def entry_data(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """ENTRY of the JSON: name, plan, estimate, whether this version runs it. Bytes and seconds."""
    return {"name": plan.name, "plan": plan.model_dump(mode="json"), "estimate": estimate.model_dump(mode="json"), "runs": runs(plan)}


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
