"""What a page embeds: the grid as compact JSON, numbers to ten digits, names for all of it in both languages.

`keys` names the columns of a plan, of its seconds and of its bytes. Nothing is left to compute in the page
but shares and differences of what is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.cost.price import Pricer
from meshwright.report.page.grid import Grid, Point, Priced, Standing
from meshwright.report.page.pipeline import chart
from meshwright.report.plans import shown_stages
from meshwright.search.explain import family_name
from meshwright.spec.estimate import Estimate, Memory, Time
from meshwright.spec.plan import Plan
from meshwright.spec.runs import missing
from meshwright.words.lines import translated
from meshwright.words.say import TABLES, name, say

DIGITS = 10
STAGES = 8
ROOM = 900_000
"""Characters of the data, so that a page stays under a megabyte."""
CHARTS = 300_000
"""Of them, what all charts take at most: those of the question first, then the first plan of each setting, then the best of each family."""
MEMORY = tuple(Memory.model_fields)
TIME = tuple(Time.model_fields)
ENTRY = ("name", "time", "of", "ranks", "fullest", "memory", "speed", "mfu", "missing", "notes", "limits")
"""A plan: seconds by kind, how many ranks there are, which are shown, which of these is fullest, their bytes by kind; what each rank shown can
take where ranks lie on unlike groups."""


def page_data(found: Grid, command: Sequence[str], cluster: str | None) -> dict[str, Any]:
    """Everything that the page shows. `command` begins every command; `cluster` is what `--cluster` said, None when it could not have said it."""
    axes, job = found.axes, found.job
    families = sorted({family for point in found.points for standing in point.standings for family, _ in standing.families})
    reasons = sorted({reason for point in found.points for standing in point.standings for reason, _, _ in standing.rejected})
    data: dict[str, Any] = {
        "model": {"name": job.model.name, "parameters": job.model.parameters, "blocks": job.model.blocks, "hidden": job.model.hidden},
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
            "memory": [int(memory) if memory.is_integer() else memory for memory in axes.memories],
        },
        "here": axes.here,
        "keys": {"memory": MEMORY, "time": TIME, "entry": ENTRY},
        "families": families,
        "reasons": reasons,
        "words": {language: words(language, families, reasons) for language in TABLES},
        "points": [point_data(point, families, reasons, point is found.base) for point in found.points],
    }
    rejected = [example for point in found.points for standing in point.standings for _, _, example in standing.rejected]
    priced = [
        each
        for point in found.points
        for standing in point.standings
        for each in (*standing.ranked, *(last for _, last in standing.families))
    ]
    notes = [note for each in priced for note in each.estimate.notes]
    data["lines"] = lines((*rejected, *notes, *(point.error for point in found.points)))
    return {**data, "charts": charts(found, min(CHARTS, ROOM - len(compact(data))))}


def point_data(point: Point, families: Sequence[str], reasons: Sequence[str], whole: bool) -> dict[str, Any]:
    """One cluster, batch and sequence. Plans stand once, standings point at them; each rank of all plans of the question, else of the first ones."""
    shown = [priced for standing in point.standings for priced in (*standing.ranked, *(priced for _, priced in standing.families))]
    first = {standing.ranked[0].plan for standing in point.standings if standing.ranked}
    plans: dict[Plan, Priced] = {priced.plan: priced for priced in shown}
    place = {plan: at for at, plan in enumerate(plans)}
    examples = list(dict.fromkeys(example for standing in point.standings for _, _, example in standing.rejected))
    return {
        "plans": [entry_data(priced, whole or plan in first) for plan, priced in plans.items()],
        "standings": [
            {
                **standing_data(standing, place, families),
                "rejected": [[reasons.index(reason), count, examples.index(example)] for reason, count, example in standing.rejected],
            }
            for standing in point.standings
        ],
        "examples": examples,
        "considered": point.considered,
        "error": point.error,
    }


def standing_data(standing: Standing, place: Mapping[Plan, int], families: Sequence[str]) -> dict[str, Any]:
    """What is true under one memory: places of plans with their verdicts."""
    limit = standing.limit
    return {
        "limit": short(limit),
        "ranked": [[place[priced.plan], str(standing.verdict(priced))] for priced in standing.ranked],
        "families": [[families.index(family), place[priced.plan], str(standing.verdict(priced))] for family, priced in standing.families],
    }


def entry_data(priced: Priced, whole: bool) -> list[Any]:
    """One plan with its price, in the order of ENTRY; without `whole` the memory of its fullest rank only. Empty ends are left out."""
    estimate = priced.estimate
    ranks, fullest = ranks_of(estimate)
    ranks = ranks if whole else [fullest]
    entry: list[Any] = [
        priced.plan.name,
        [short(seconds) for _, seconds in estimate.time],
        len(estimate.per_stage),
        ranks,
        ranks.index(fullest),
        [[short(size) for _, size in estimate.per_stage[rank]] for rank in ranks],
        short(estimate.tokens_per_second),
        short(estimate.mfu),
        ", ".join(missing(priced.plan)),
        list(estimate.notes),
        [short(priced.limits[rank]) for rank in ranks] if priced.limits else [],
    ]
    while not entry[-1]:
        entry.pop()
    return entry


def ranks_of(estimate: Estimate) -> tuple[list[int], int]:
    """Pipeline ranks whose memory is shown, the fullest among them."""
    fullest = estimate.per_stage.index(estimate.memory)
    return sorted({*shown_stages(len(estimate.per_stage), STAGES), fullest}), fullest


def charts(found: Grid, room: int) -> dict[str, Any]:
    """Charts by place of the point and name of the plan, as many as `room` characters hold."""
    home = found.points.index(found.base)
    places = sorted(range(len(found.points)), key=lambda at: at != home)
    wanted = [(home, priced.plan) for standing in found.base.standings for priced in standing.ranked]
    wanted += [(at, standing.ranked[0].plan) for at in places for standing in found.points[at].standings if standing.ranked]
    wanted += [(at, priced.plan) for at in places for standing in found.points[at].standings for _, priced in standing.families]
    pricers: dict[int, Pricer] = {}
    drawn: dict[str, Any] = {}
    for at, plan in (each for each in dict.fromkeys(wanted) if each[1].pp > 1 and not (each[1].shares or each[1].micro_batch_sizes)):
        pricer = pricers.setdefault(at, Pricer(found.points[at].job))
        one = chart(pricer, plan)
        one["seconds"] = short(one["seconds"])
        room -= len(compact(one))
        if room < 0:
            break
        drawn[f"{at} {plan.name}"] = one
    return drawn


def words(language: str, families: Sequence[str], reasons: Sequence[str]) -> dict[str, dict[str, str]]:
    """Names of kinds, families and reasons, as the terminal says them."""
    groups = {"memory": MEMORY, "time": TIME, "reason": reasons}
    said = {group: {word: say(name(group, word), language) for word in found} for group, found in groups.items()}
    return {**said, "family": {family: say(family_name(family), language) for family in families}}


def lines(said: Iterable[str]) -> dict[str, dict[str, str]]:
    """Lines that rules and errors say, by language, where they read otherwise there."""
    once = dict.fromkeys(said)
    return {language: {line: other for line in once if (other := translated(line, language)) != line} for language in TABLES}


def compact(data: Any) -> str:
    """JSON that a page can hold: nothing in it ends the element that it stands in."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def short(number: float) -> float:
    """
    >>> short(1 / 3), short(80 * 2**30)
    (0.3333333333, 85899345920)
    """
    rounded = float(f"{number:.{DIGITS}g}")
    return int(rounded) if math.isfinite(rounded) and rounded == int(rounded) else rounded
