"""Builds the HTML page of `plan --page`: its data, its pipeline charts and the HTML frame around them. The page of a
training run uses the same frame.

The pipeline chart shows when each forward and backward of a stage begins and ends. `spec/schedules` orders and
simulates these actions, with the seconds of the cost model. A chart shows only as many micro-batches as are needed to
fill and drain the pipeline. If there are many ranks, it shows only the first and the last ranks. Work after the last
backward (gradient reduction, optimizer update) is not in the chart.

The page embeds the plans of all points as compact JSON. All names are in English and Chinese. The field `keys` lists
the names of a plan's fields, of the kinds of time and of the kinds of memory, in the order of their values. The seconds
of a plan are formulas of the rates of the cluster: results of one program, which the cost model records
(planner/cost/step_formula.py) and plan_model.js evaluates.

Every page fills one HTML frame with its body, texts, script and data. The HTML file refers to no other file, and its
content security policy forbids any request.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from meshwright.core.messages import LANGUAGES, term, translate
from meshwright.core.units import show_step
from meshwright.core.version import __version__
from meshwright.planner.cost.compute import sustained_flops
from meshwright.planner.cost.constants import USABLE_MEMORY_FRACTION
from meshwright.planner.cost.cost_context import build_cost_context
from meshwright.planner.cost.cost_model import CostModel, PassTime
from meshwright.planner.cost.heterogeneous import group_cost_models
from meshwright.planner.cost.links import p2p_seconds
from meshwright.planner.cost.memory import p2p_message_bytes, physical_limit
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.rank_contents import RankClass, stage_contents
from meshwright.planner.cost.step import model_flops, peak_flops
from meshwright.planner.cost.step_formula import RATES, StepFormulas
from meshwright.planner.cost.symbolic import OPERATIONS, Program
from meshwright.planner.inputs.plan_only import plan_only_parts
from meshwright.planner.search.best_plans import RISK_MARGIN, plan_family
from meshwright.planner.search.explain import family_name
from meshwright.report.page.page_grid import GridPoint, PageGrid, PricedPlan, cluster_memory_limit
from meshwright.report.plans import shown_stages
from meshwright.spec.cluster import Cluster, ClusterRates
from meshwright.spec.estimate import Estimate, MemoryBreakdown, TimeBreakdown
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.schedules.action import ActionSpan, ScheduleTimeline, simulate_orders
from meshwright.spec.schedules.schedule import schedule_orders

CHART_UNITS = 10_000
"""The width of a chart in chart units. The start and the end of an action are whole numbers of chart units."""
MAX_CHART_ACTIONS = 1280
"""The maximum number of actions in one chart."""
MAX_CHART_RANKS = 8
ACTION_KINDS = "FBW"


def simulate_pipeline(pricer: CostModel, plan: Plan, micro_batches: int) -> ScheduleTimeline:
    """Simulates the first `micro_batches` micro-batches of a step. A virtual stage takes as long as its layers."""
    setting = pricer.setting
    box = grid_of_plan(plan, setting.job.workload.batch, setting.job.model.blocks)
    table = stage_contents(setting.entries, box.orders[0])
    stages = [
        RankClass(plan.stage_to_rank(at), 1, row[None], ((tuple(row.tolist()), 1),)) for at, row in enumerate(table)
    ]
    groups = plan.placement or (0,) * plan.pp
    on = group_cost_models(setting.job, sorted(set(groups)), plan.world) if plan.placement else {0: pricer}
    passes = {group: each.passes(box, each.class_layout(box, stages)) for group, each in on.items()}
    own = [groups[plan.stage_to_rank(stage)] for stage in range(len(stages))]
    forward, backward, weights = (
        np.array(
            [
                np.broadcast_to(passes[group][part], (len(stages), 1, 1, 1, 1, 1, 1))[at].item()
                for at, group in enumerate(own)
            ]
        )
        for part in map(PassTime._fields.index, ("forward", "backward", "weights"))
    )
    weights = np.where([plan.splits_backward(stage) for stage in range(plan.stages)], weights, 0.0)
    tokens = np.array([plan.micro_batch * setting.job.workload.sequence / plan.cp])
    passed = (
        p2p_seconds(setting.fabric, p2p_message_bytes(setting, box, tokens), plan.pp, box.strides["pp"]).item()
        if plan.pp > 1
        else 0.0
    )
    order = schedule_orders(plan.schedule, plan.pp, plan.virtual_stages, micro_batches, plan.actions)
    return simulate_orders(order, forward.tolist(), (backward - weights).tolist(), passed, weights.tolist())


def pipeline_chart(pricer: CostModel, plan: Plan) -> dict[str, Any]:
    """Returns the data of the chart. `of` and `count` are the numbers of micro-batches in the step and in the chart.
    `turns` is the number of virtual stages per rank, `seconds` the duration of the chart. `rows` has one row for each
    rank in `ranks`."""
    whole = plan.micro_batches(pricer.setting.job.workload.batch)
    count = min(whole, chart_micro_batches(plan))
    shown = chart_ranks(plan.pp, MAX_CHART_ACTIONS // (2 * plan.virtual_stages * count))
    found = simulate_pipeline(pricer, plan, count)
    scale = CHART_UNITS / found.makespan
    rows = [chart_row(found.spans[rank], scale) for rank in shown]
    return {
        "of": whole,
        "count": count,
        "turns": plan.virtual_stages,
        "seconds": found.makespan,
        "ranks": shown,
        "rows": rows,
    }


def chart_row(spans: Sequence[ActionSpan], scale: float) -> list[int]:
    """Returns five numbers for each action: its kind, the index of its stage on the rank, its micro-batch, the idle
    time before it, and its duration. Times are in chart units; `scale` is the number of chart units per second."""
    found, now = [], 0
    own = sorted({span.action.stage for span in spans})
    for (kind, stage, micro_batch), start, end in spans:
        begins, ends = round(start * scale), round(end * scale)
        found += [ACTION_KINDS.index(kind), own.index(stage), micro_batch, begins - now, ends - begins]
        now = ends
    return found


def chart_micro_batches(plan: Plan) -> int:
    """Returns the number of micro-batches of a chart, which is enough to fill and drain the pipeline. If the schedule
    runs in rounds of `pp` micro-batches, the chart has one round."""
    rules = plan.schedule_rules
    if rules.in_rounds:
        return plan.pp
    return rules.ordered_micro_batches or max(min(max(2 * plan.pp, 8), 24), rules.min_micro_batches(plan.pp))


def chart_ranks(pp: int, most: int) -> Sequence[int]:
    """Returns all pipeline ranks, or only the first and the last ranks if there are more than `most`.

    >>> chart_ranks(4, 9), chart_ranks(16, 4), chart_ranks(16, 0)
    ([0, 1, 2, 3], [0, 1, 14, 15], [0])
    """
    most = max(min(most, MAX_CHART_RANKS), 1)
    return list(range(pp)) if pp <= most else [*range(-(-most // 2)), *range(pp - most // 2, pp)]


SIGNIFICANT_DIGITS, DIGITS_OF_CONSTANTS = 10, 13
MAX_RANKS_SHOWN = 8
MAX_DATA_CHARACTERS = 850_000
"""The maximum number of characters of the data. It keeps a page smaller than a megabyte."""
MAX_CHART_CHARACTERS = 250_000
"""The maximum number of characters of all charts together. The charts of the job have priority, then the best plan of
each anchor."""
MEMORY_FIELDS = tuple(MemoryBreakdown.model_fields)
TIME_FIELDS = tuple(TimeBreakdown.model_fields)
PLAN_FIELDS = (
    *("name", "family", "time", "of", "ranks", "peak", "memory"),
    *("safe", "risk", "first", "missing", "notes", "limits", "verdict"),
)
"""The fields of a plan. `time` has the seconds by kind, as operands of the program, and `of` is the number of pipeline
ranks. `ranks` are the shown ranks, and `memory` has the bytes by kind for each of these ranks. `peak` is the index in
`ranks` of the peak-memory rank. `first` is the compile time divided by the number of steps. `missing` has the
unsupported parts of the plan's name. If ranks differ, `limits` has the usable memory of each shown rank, and `verdict`
the fit status. For the other fields see `PricedPlan`."""


def plan_page_data(found: PageGrid, command: Sequence[str], cluster: str | None) -> dict[str, Any]:
    """Returns all data of the page. `command` is the beginning of every command that the page shows. `cluster` is the
    value for `--cluster`, or None if the cluster has no such notation."""
    axes, job = found.axes, found.job
    families = sorted({plan_family(priced.plan) for point in found.points for priced in point.plans})
    reasons = sorted({reason for point in found.points for anchor in point.anchors for reason, _, _ in anchor.rejected})
    program = Program(RATES)
    data: dict[str, Any] = {
        "model": {
            "name": job.model.name,
            "parameters": job.model.parameters,
            "blocks": job.model.blocks,
            "hidden": job.model.hidden,
        },
        "precision": job.workload.precision,
        "optimizer": job.workload.optimizer.name,
        "objective": str(found.objective),
        "command": list(command),
        "budget": bool(job.cluster.budget),
        "clusters": [cluster if axis == job.cluster else axis.name for axis in axes.clusters],
        "axes": {
            "devices": [axis.devices for axis in axes.clusters],
            "batch": axes.batches,
            "sequence": axes.sequences,
        },
        "here": axes.here,
        "inputs": {"memory": axes.memory, **axes.rates},
        "rates": rate_values(job.cluster),
        "hardware": hardware_data(job),
        "keys": {"memory": MEMORY_FIELDS, "time": TIME_FIELDS, "entry": PLAN_FIELDS, "rates": RATES},
        "families": families,
        "reasons": reasons,
        "words": {language: localized_names(language, families, reasons) for language in LANGUAGES},
        "points": [point_data(found, point, families, reasons, program) for point in found.points],
    }
    data["program"] = program_data(program, data["points"])
    rejected = [example for point in found.points for anchor in point.anchors for _, _, example in anchor.rejected]
    notes = [note for point in found.points for priced in point.plans for note in priced.estimate.notes]
    data["lines"] = localized_lines((*rejected, *notes, *(point.error for point in found.points)))
    return {
        **data,
        "charts": pipeline_charts(found, min(MAX_CHART_CHARACTERS, MAX_DATA_CHARACTERS - len(compact_json(data)))),
    }


def rate_values(cluster: Cluster) -> list[float]:
    """Returns the rates of the cluster in the order of RATES. Without rates, all values are 1."""
    return list((cluster.rates or ClusterRates(**dict.fromkeys(RATES, 1.0))).model_dump().values())


def hardware_data(job: Job) -> dict[str, Any]:
    """Returns the constants of a device with which the page computes limits and rates: the usable memory divided by the
    memory, the usable memory of the job's device, FLOP/s of large matrix products at an efficiency of 1, the factor for
    tight plans."""
    setting = build_cost_context(job)
    return {
        "usable": USABLE_MEMORY_FRACTION,
        "physical": physical_limit(setting),
        "flops": sustained_flops(setting, job.workload.recipe.rates[-1]) / setting.device.efficiency,
        "tight": 1.0 + RISK_MARGIN,
    }


def program_data(program: Program, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns those operations of the program that the times of plans need, as one list of numbers: the index of the
    operation, then its operands. Changes the operands in `points` accordingly."""
    inputs, at = len(program.names), PLAN_FIELDS.index("time")
    rows = [row for point in points for row in point["plans"]]
    needed = {operand for row in rows for operand in row[at]}
    for index in range(len(program.code) - 1, -1, -1):
        if index + inputs in needed:
            needed.update(program.code[index][1:])
    new = {operand: operand for operand in needed if operand < inputs}
    new |= {old: inputs + index for index, old in enumerate(sorted(needed - new.keys()))}
    for row in rows:
        row[at] = [new[operand] for operand in row[at]]
    code = [number for index, (operation, *operands) in enumerate(program.code) if index + inputs in needed
            for number in (operation, *(new.get(operand, operand) for operand in operands))]  # fmt: skip
    constants = [round_number(number, DIGITS_OF_CONSTANTS) for number in program.constants]
    return {"operations": OPERATIONS, "code": code, "constants": constants}


def point_data(
    found: PageGrid, point: GridPoint, families: Sequence[str], reasons: Sequence[str], program: Program
) -> dict[str, Any]:
    """Returns the data of one cluster, batch and sequence. At the base point every plan has the memory of several
    ranks; otherwise plans have only that of the peak-memory rank."""
    job, whole = point.job, point is found.base
    formulas = StepFormulas(job, program) if job.cluster.rates and point.plans else None
    examples = list(dict.fromkeys(example for anchor in point.anchors for _, _, example in anchor.rejected))
    return {
        "plans": [
            [
                priced.plan.name,
                families.index(plan_family(priced.plan)),
                time_operands(formulas, program, priced),
                *priced_plan_data(priced, whole, job),
            ]
            for priced in point.plans
        ],
        "anchors": [
            {
                "memory": cluster_memory_limit(anchor.cluster),
                "rates": rate_values(anchor.cluster),
                "score": round_number(anchor.score, DIGITS_OF_CONSTANTS) if math.isfinite(anchor.score) else None,
                "rejected": [
                    [reasons.index(reason), count, examples.index(example)]
                    for reason, count, example in anchor.rejected
                ],
            }
            for anchor in point.anchors
        ],
        "examples": examples,
        "considered": point.considered,
        "pins": point.pins,
        "tokens": job.workload.tokens,
        "flops": model_flops(job) / peak_flops(job),
        "error": point.error,
    }


def time_operands(formulas: StepFormulas | None, program: Program, priced: PricedPlan) -> list[int]:
    """Returns the seconds of a plan by kind, as operands of `program`. Without formulas, they are constants."""
    plan = priced.plan
    if formulas is None or plan.shares or plan.micro_batch_sizes or plan.shard_weights:
        return [program.operand(seconds) for _, seconds in priced.estimate.time]
    seconds = formulas.record(plan)
    return [program.operand(seconds[kind]) for kind in TIME_FIELDS]


def priced_plan_data(priced: PricedPlan, whole: bool, job: Job) -> list[Any]:
    """Returns the fields of a plan after its times, in the order of PLAN_FIELDS.

    `whole`: whether the data contains the memory of several ranks; otherwise it contains only the memory of the
    peak-memory rank. Empty fields at the end are omitted.
    """
    estimate = priced.estimate
    ranks, peak_rank = ranks_with_memory(estimate)
    ranks = ranks if whole else [peak_rank]
    entry: list[Any] = [
        len(estimate.per_stage),
        ranks,
        ranks.index(peak_rank),
        [[round_number(size) for _, size in estimate.per_stage[rank]] for rank in ranks],
        round_number(priced.safe),
        round_number(priced.risk),
        round_number(estimate.over(job.workload.steps) - estimate.time.step),
        ", ".join(plan_only_parts(job, priced.plan)),
        list(estimate.notes),
        [round_number(priced.limits[rank]) for rank in ranks] if priced.limits else [],
        str(estimate.verdict) if priced.limits else "",
    ]
    while not entry[-1]:
        entry.pop()
    return entry


def ranks_with_memory(estimate: Estimate) -> tuple[list[int], int]:
    """Returns a pair: the pipeline ranks whose memory is shown, in ascending order, and the peak-memory rank, which is
    one of them."""
    peak_rank = estimate.per_stage.index(estimate.memory)
    return sorted({*shown_stages(len(estimate.per_stage), MAX_RANKS_SHOWN), peak_rank}), peak_rank


def pipeline_charts(found: PageGrid, room: int) -> dict[str, Any]:
    """Returns as many charts as fit in `room` characters of JSON. The key of a chart is the index of its point, a space
    and the name of its plan. A plan without a pipeline, or with unequal micro-batches, has no chart."""
    home = found.points.index(found.base)
    places = sorted(range(len(found.points)), key=lambda at: at != home)
    wanted = [
        (at, priced.plan)
        for at in places
        for priced in sorted(found.points[at].plans, key=lambda each: each.estimate.time.step)[
            : 99 if at == home else 3
        ]
    ]
    pricers: dict[int, CostModel] = {}
    drawn: dict[str, Any] = {}
    for at, plan in (
        each for each in dict.fromkeys(wanted) if each[1].pp > 1 and not (each[1].shares or each[1].micro_batch_sizes)
    ):
        pricer = pricers.setdefault(at, CostModel(found.points[at].job))
        one = pipeline_chart(pricer, plan)
        one["seconds"] = round_number(one["seconds"])
        room -= len(compact_json(one))
        if room < 0:
            break
        drawn[f"{at} {plan.name}"] = one
    return drawn


def localized_names(language: str, families: Sequence[str], reasons: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns the names of memory kinds, time kinds, plan families and rejection reasons in `language`, as in the text
    output."""
    groups = {"memory": MEMORY_FIELDS, "time": TIME_FIELDS, "reason": reasons}
    said = {group: {word: translate(term(group, word), language) for word in found} for group, found in groups.items()}
    return {**said, "family": {family: translate(family_name(family), language) for family in families}}


def localized_lines(said: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns translations of lines, by language. Lines without a translation are omitted."""
    once = dict.fromkeys(said)
    return {
        language: {line: other for line in once if (other := translate(line, language)) != line}
        for language in LANGUAGES
    }


def compact_json(data: Any) -> str:
    """Returns JSON that is safe inside a script element: no text in the data can end the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def round_number(number: float, digits: int = SIGNIFICANT_DIGITS) -> float:
    """Rounds a number to `digits` significant digits.

    >>> round_number(1 / 3), round_number(80 * 2**30)
    (0.3333333333, 85899345920)
    """
    rounded = float(f"{number:.{digits}g}")
    return int(rounded) if math.isfinite(rounded) and rounded == int(rounded) else rounded


FRAME_FILE, STYLE_FILE = "frame.html", "style.css"


def plan_page_text(found: PageGrid, command: Sequence[str], cluster: str | None, language: str = "en") -> str:
    """Returns the HTML page of a plan. `language`: the language in which the page opens."""
    job = found.job
    title = f"{job.model.name}, {job.cluster.name}: meshwright plan"
    best = found.base.anchors[0].best if found.base.anchors else None
    answer = f"{best.name} \u00b7 {show_step(best.estimate.time.step)}" if best else ""
    return fill_frame("plans", title, plan_page_data(found, command, cluster), language, answer)


def fill_frame(page: str, title: str, data: Mapping[str, Any], language: str, answer: str = "") -> str:
    """Returns the HTML frame, filled with the body, the data and the scripts of `page` (plans or run). Inserted texts
    are never interpreted as HTML. A browser shows `title` and `answer` until it has run the scripts."""
    places = {
        "TITLE": html.escape(title),
        "ANSWER": html.escape(answer),
        "LANGUAGE": language,
        "STYLE": read_asset(STYLE_FILE),
        "BODY": read_asset(page_body(page)),
        "DATA": compact_json({**data, "language": language, "version": __version__}),
        "SCRIPT": "\n".join(map(read_asset, page_scripts(page))),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda place: places[place[1]].rstrip("\n"), read_asset(FRAME_FILE))


def page_body(page: str) -> str:
    """Returns the name of the file with the HTML body of a page."""
    return f"{page}.html"


def page_scripts(page: str) -> tuple[str, ...]:
    """Returns the names of the script files of a page, in order."""
    model = ("plan_model.js",) if page == "plans" else ()
    return f"{page}_words.js", "numbers.js", "draw.js", "frame.js", *model, f"{page}.js"


def read_asset(name: str) -> str:
    """Returns the text of a file in this folder."""
    return (resources.files("meshwright.report.page") / name).read_text(encoding="utf-8")
