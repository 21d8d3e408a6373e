"""Builds the HTML page of `plan --page`: its data, its pipeline charts and the HTML frame around them. The page of a
training run uses the same frame.

The pipeline chart shows when each forward and backward of a stage begins and ends. `spec/schedules` orders and
simulates these actions, with the seconds of the cost model. A chart shows only as many micro-batches as are needed to
fill and drain the pipeline. If there are many ranks, it shows only the first and the last ranks. Work after the last
backward (gradient reduction, optimizer update) is not in the chart.

The page embeds the plans of all points as compact JSON. All names are in English and Chinese. The field `keys` lists
the names of a plan's fields, of the kinds of time and of the kinds of memory, in the order of their values. The seconds
and the bytes of a plan are formulas of the batch, the sequence and the rates of the cluster: results of one program,
which the cost model records (planner/cost/step_formula.py) and plan_model.js evaluates.

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
from meshwright.planner.cost.memory import p2p_message_bytes, physical_limit, reserved_bytes
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.rank_contents import RankClass, stage_contents
from meshwright.planner.cost.step import model_flops, peak_flops
from meshwright.planner.cost.step_formula import INPUTS, RATES, StepFormulas
from meshwright.planner.cost.symbolic import OPERATIONS, Program
from meshwright.planner.inputs.plan_only import plan_only_parts
from meshwright.planner.search.best_plans import RISK_MARGIN, plan_family, simplicity_key
from meshwright.planner.search.explain import family_name
from meshwright.report.page.page_grid import (
    GridPoint,
    PageGrid,
    PricedPlan,
    cluster_memory_limit,
    is_continuous,
    plan_risk,
)
from meshwright.report.plans import shown_stages
from meshwright.spec.cluster import Cluster, ClusterRates
from meshwright.spec.constraints import sequence_divisor
from meshwright.spec.estimate import MemoryBreakdown, TimeBreakdown
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
    *("name", "family", "time", "of", "ranks", "members", "memory", "driver"),
    *("risk", "first", "rule", "missing", "notes", "limits", "verdict"),
)
"""The fields of a plan. `time` has the seconds by kind, as operands of the program, and `of` is the number of pipeline
ranks. `memory` has the bytes of distinct ranks by kind (BYTE_FIELDS), as operands, and `members` the index in `memory`
of each rank. `ranks` are the shown ranks, in addition to the peak-memory rank. `driver` is the bytes outside of the
allocator. `risk` is the factor by which uncertainty raises the score. `first` is the compile time divided by the number
of steps. `rule` has RULE_FIELDS; a plan with an empty rule runs only the batch and the sequence of its point.
`missing` has the unsupported parts of the plan's name. If ranks differ, `limits` has the usable memory of each rank,
and `verdict` the fit status."""
BYTE_FIELDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "host", "reserved")
"""The bytes of a rank. `reserved` is omitted if the page computes it."""
RULE_FIELDS = ("rows", "cp", "multiple", "least", "ordered", "divisor")
"""What a batch and a sequence need for a plan: the rows of a micro-batch of one sequence on all replicas, the context
ranks, a divisor of the number of micro-batches, its minimum, its only value unless this is 0, and a divisor of the
sequence."""


def plan_page_data(found: PageGrid, command: Sequence[str], cluster: str | None) -> dict[str, Any]:
    """Returns all data of the page. `command` is the beginning of every command that the page shows. `cluster` is the
    value for `--cluster`, or None if the cluster has no such notation."""
    axes, job = found.axes, found.job
    families = sorted({plan_family(plan) for point in found.points for plan in page_plans(point)})
    reasons = sorted({reason for point in found.points for anchor in point.anchors for reason, _, _ in anchor.rejected})
    program = Program(INPUTS)
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
        "batch": axes.batch,
        "lengths": axes.lengths,
        "microBatch": {**job.workload.fixed, **job.pins}.get("micro_batch", 0),
        "rates": rate_values(job.cluster),
        "hardware": hardware_data(job),
        "keys": {
            "memory": MEMORY_FIELDS,
            "time": TIME_FIELDS,
            "entry": PLAN_FIELDS,
            "rates": RATES,
            "rule": RULE_FIELDS,
        },
        "families": families,
        "reasons": reasons,
        "words": {language: localized_names(language, families, reasons) for language in LANGUAGES},
        "points": [point_data(point, families, reasons, program) for point in found.points],
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
    tight plans, the reserved bytes divided by the allocated bytes (expected, with a safety margin), and the host memory
    of a device."""
    setting = build_cost_context(job)
    return {
        "overhead": [float(each) for each in reserved_bytes(setting, np.array(1.0), 0.0)],
        "host": setting.host_memory,
        "usable": USABLE_MEMORY_FRACTION,
        "physical": physical_limit(setting),
        "flops": sustained_flops(setting, job.workload.recipe.rates[-1]) / setting.device.efficiency,
        "tight": 1.0 + RISK_MARGIN,
    }


def program_data(program: Program, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns those operations of the program that the times of plans need, as one list of numbers: the index of the
    operation, then its operands. Changes the operands in `points` accordingly."""
    inputs, at, of = len(program.names), PLAN_FIELDS.index("time"), PLAN_FIELDS.index("memory")
    rows = [operands for point in points for row in point["plans"] for operands in (row[at], *row[of])]
    needed = {operand for row in rows for operand in row}
    for index in range(len(program.code) - 1, -1, -1):
        if index + inputs in needed:
            needed.update(program.code[index][1:])
    used = sorted(-1 - operand for operand in needed if operand < 0)
    new = {operand: operand for operand in needed if 0 <= operand < inputs}
    new |= {-1 - old: -1 - at for at, old in enumerate(used)}
    new |= {old: inputs + index for index, old in enumerate(sorted(needed - new.keys()))}
    for row in rows:
        row[:] = [new[operand] for operand in row]
    code = [number for index, (operation, *operands) in enumerate(program.code) if index + inputs in needed
            for number in (operation, *(new[operand] for operand in operands))]  # fmt: skip
    constants = [round_number(program.constants[at], DIGITS_OF_CONSTANTS) for at in used]
    return {"operations": OPERATIONS, "code": code, "constants": constants}


def point_data(point: GridPoint, families: Sequence[str], reasons: Sequence[str], program: Program) -> dict[str, Any]:
    """Returns the data of one cluster, batch and sequence."""
    job = point.job
    rows = plan_rows(point, families, program)
    examples = list(dict.fromkeys(example for anchor in point.anchors for _, _, example in anchor.rejected))
    lengths = job, with_double_length(job)
    own, double = (model_flops(each) / peak_flops(each) / each.workload.tokens for each in lengths)
    return {
        "plans": rows,
        "anchors": [
            {
                "memory": cluster_memory_limit(anchor.job.cluster),
                "rates": rate_values(anchor.job.cluster),
                "batch": anchor.job.workload.batch,
                "sequence": anchor.job.workload.sequence,
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
        "batch": job.workload.batch,
        "sequence": job.workload.sequence,
        "flops": [2 * own - double, (double - own) / job.workload.sequence],
        "error": point.error,
    }


def with_double_length(job: Job) -> Job:
    """Returns the job with twice its sequence length."""
    return job.but(workload=job.workload.but(sequence=2 * job.workload.sequence))


def page_plans(point: GridPoint) -> list[Plan]:
    """Returns the plans of a point, simpler plans first. With formulas, one plan covers all micro-batch sizes."""
    plans = [*(priced.plan for priced in point.plans), *filter(has_formulas, point.others)]
    if is_continuous(point.job):
        plans = list({plan.but(micro_batch=1) if has_formulas(plan) else plan: plan for plan in plans[::-1]}.values())
    return sorted(plans, key=simplicity_key)


def has_formulas(plan: Plan) -> bool:
    """Returns whether all replicas and shards of a plan are equal."""
    return not (plan.shares or plan.micro_batch_sizes or plan.shard_weights or plan.placement)


def plan_rows(point: GridPoint, families: Sequence[str], program: Program) -> list[list[Any]]:
    """Returns the rows of the plans of a point, each in the order of PLAN_FIELDS. Empty fields at the end are
    omitted."""
    job, known = point.job, {priced.plan: priced for priced in point.plans}
    formulas = StepFormulas(job, program) if is_continuous(job) and point.plans else None
    rows = []
    for plan in page_plans(point):
        if formulas is not None and has_formulas(plan):
            row = formula_row(formulas, program, plan)
        else:
            row = constant_row(program, known[plan], job)
        notes = list(known[plan].estimate.notes) if plan in known else []
        limits = [round_number(limit) for limit in known[plan].limits] if plan in known else []
        verdict = str(known[plan].estimate.verdict) if limits else ""
        missing = ", ".join(plan_only_parts(job, plan))
        rows.append([plan.name, families.index(plan_family(plan)), *row, missing, notes, limits, verdict])
        while not rows[-1][-1]:
            rows[-1].pop()
    return rows


def formula_row(formulas: StepFormulas, program: Program, plan: Plan) -> list[Any]:
    """Returns the fields `time` to `rule` of a plan whose numbers are formulas."""
    found, rules = formulas.record(plan), plan.schedule_rules
    distinct = list(dict.fromkeys(tuple(map(program.operand, rank)) for rank in found.ranks))
    members = [distinct.index(tuple(map(program.operand, rank))) for rank in found.ranks]
    rule = (plan.dp, plan.cp, rules.multiple_of(plan.pp), rules.min_micro_batches(plan.pp), rules.ordered_micro_batches)
    return [
        [program.operand(found.time[kind]) for kind in TIME_FIELDS],
        plan.pp,
        shown_stages(plan.pp, MAX_RANKS_SHOWN),
        members,
        [list(rank) for rank in distinct],
        round_number(found.driver),
        round_number(plan_risk(formulas.job, plan)),
        round_number(found.first),
        [*rule, sequence_divisor(plan)],
    ]


def constant_row(program: Program, priced: PricedPlan, job: Job) -> list[Any]:
    """Returns the fields `time` to `rule` of a plan whose numbers are constants."""
    known = priced.estimate
    sizes = [
        (each.parameters, each.gradients, each.optimizer, each.activations, each.buffers, 0.0, each.reserved)
        for each in known.per_stage
    ]
    return [
        [program.operand(seconds) for _, seconds in known.time],
        len(sizes),
        shown_stages(len(sizes), MAX_RANKS_SHOWN),
        [*range(len(sizes))],
        [[program.operand(size) for size in row] for row in sizes],
        round_number(known.memory.driver),
        round_number(priced.risk),
        round_number(known.over(job.workload.steps) - known.time.step),
        [],
    ]


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
