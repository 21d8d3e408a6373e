"""What a page embeds: the grid as compact JSON, numbers to eleven digits, names for all of it in both languages.

`keys` names the columns of an entry's seconds and of its bytes, which are those of each of its `ranks`. Nothing is left to compute in the page
but shares and differences of what is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cost.price import Pricer
from meshwright.report.page.grid import Grid, Point, Priced, Standing
from meshwright.report.page.pipeline import chart
from meshwright.report.plans import shown_stages
from meshwright.search.explain import family_name
from meshwright.spec.estimate import Estimate, Memory, Time
from meshwright.spec.plan import Plan
from meshwright.spec.runs import missing
from meshwright.words.say import TABLES, name, say

DIGITS = 11
STAGES = 8
CHARTS = 300_000
"""Characters that all charts take at most: those of the question first, then the first plan of each setting, then the best of each family."""
MEMORY = tuple(Memory.model_fields)
TIME = tuple(Time.model_fields)


def page_data(found: Grid, command: Sequence[str], cluster: str | None) -> dict[str, Any]:
    """Everything that the page shows. `command` begins every command; `cluster` is what `--cluster` said, None when it could not have said it."""
    axes, job = found.axes, found.job
    families = sorted({family for point in found.points for standing in point.standings for family, _ in standing.families})
    reasons = sorted({reason for point in found.points for reason, _, _ in point.rejected})
    return {
        "model": {"name": job.model.name, "parameters": job.model.parameters, "blocks": job.model.blocks, "hidden": job.model.hidden},
        "precision": job.workload.precision,
        "optimizer": job.workload.optimizer.name,
        "objective": str(found.objective),
        "command": list(command),
        "clusters": [cluster if axis == job.cluster else axis.name for axis in axes.clusters],
        "axes": {
            "devices": [axis.devices for axis in axes.clusters],
            "batch": axes.batches,
            "sequence": axes.sequences,
            "memory": [int(memory) if memory.is_integer() else memory for memory in axes.memories],
        },
        "here": axes.here,
        "keys": {"memory": MEMORY, "time": TIME},
        "families": families,
        "reasons": reasons,
        "words": {language: words(language, families, reasons) for language in TABLES},
        "points": [point_data(point, families, reasons, point is found.base) for point in found.points],
        "charts": charts(found),
    }


def point_data(point: Point, families: Sequence[str], reasons: Sequence[str], whole: bool) -> dict[str, Any]:
    """One cluster, batch and sequence. Plans stand once, standings point at them; each rank of all plans of the question, else of the first ones."""
    shown = [priced for standing in point.standings for priced in (*standing.ranked, *(priced for _, priced in standing.families))]
    first = {standing.ranked[0].plan for standing in point.standings if standing.ranked}
    plans: dict[Plan, Priced] = {priced.plan: priced for priced in shown}
    place = {plan: at for at, plan in enumerate(plans)}
    return {
        "plans": [entry_data(priced, whole or plan in first) for plan, priced in plans.items()],
        "standings": [standing_data(standing, place, families) for standing in point.standings],
        "rejected": [[reasons.index(reason), count, example] for reason, count, example in point.rejected],
        "considered": point.considered,
        "error": point.error,
    }


def standing_data(standing: Standing, place: Mapping[Plan, int], families: Sequence[str]) -> dict[str, Any]:
    """What is true under one memory: places of plans with their verdicts."""
    limit = standing.limit
    return {
        "limit": short(limit),
        "ranked": [[place[priced.plan], str(priced.verdict(limit))] for priced in standing.ranked],
        "families": [[families.index(family), place[priced.plan], str(priced.verdict(limit))] for family, priced in standing.families],
    }


def entry_data(priced: Priced, whole: bool) -> dict[str, Any]:
    """One plan with its price; without `whole` the memory of its fullest rank only."""
    estimate = priced.estimate
    ranks, fullest = ranks_of(estimate)
    ranks = ranks if whole else [fullest]
    return {
        "name": priced.plan.name,
        "time": [short(seconds) for _, seconds in estimate.time],
        "of": len(estimate.per_stage),
        "ranks": ranks,
        "fullest": ranks.index(fullest),
        "memory": [[short(size) for _, size in estimate.per_stage[rank]] for rank in ranks],
        "speed": short(estimate.tokens_per_second),
        "mfu": short(estimate.mfu),
        **({"missing": ", ".join(absent)} if (absent := missing(priced.plan)) else {}),
        **({"notes": list(estimate.notes)} if estimate.notes else {}),
    }


def ranks_of(estimate: Estimate) -> tuple[list[int], int]:
    """Pipeline ranks whose memory is shown, the fullest among them."""
    fullest = estimate.per_stage.index(estimate.memory)
    return sorted({*shown_stages(len(estimate.per_stage), STAGES), fullest}), fullest


def charts(found: Grid) -> dict[str, Any]:
    """Charts by place of the point and name of the plan."""
    home = found.points.index(found.base)
    places = sorted(range(len(found.points)), key=lambda at: at != home)
    wanted = [(home, priced.plan) for standing in found.base.standings for priced in standing.ranked]
    wanted += [(at, standing.ranked[0].plan) for at in places for standing in found.points[at].standings if standing.ranked]
    wanted += [(at, priced.plan) for at in places for standing in found.points[at].standings for _, priced in standing.families]
    pricers: dict[int, Pricer] = {}
    drawn: dict[str, Any] = {}
    room = CHARTS
    for at, plan in (each for each in dict.fromkeys(wanted) if each[1].pp > 1):
        pricer = pricers.setdefault(at, Pricer(found.points[at].job))
        one = chart(pricer, plan)
        one["seconds"] = short(one["seconds"])
        room -= len(json.dumps(one, separators=(",", ":")))
        if room < 0:
            break
        drawn[f"{at} {plan.name}"] = one
    return drawn


def words(language: str, families: Sequence[str], reasons: Sequence[str]) -> dict[str, dict[str, str]]:
    """Names of kinds, families and reasons, as the terminal says them."""
    groups = {"memory": MEMORY, "time": TIME, "reason": reasons}
    said = {group: {word: say(name(group, word), language) for word in found} for group, found in groups.items()}
    return {**said, "family": {family: say(family_name(family), language) for family in families}}


def short(number: float) -> float:
    """
    >>> short(1 / 3), short(80 * 2**30)
    (0.33333333333, 85899345920)
    """
    rounded = float(f"{number:.{DIGITS}g}")
    return int(rounded) if math.isfinite(rounded) and rounded == int(rounded) else rounded
