"""Every plan of 1, 2, 4 and 8 ranks on every model, in both precisions: the loss is the loss of one device. Hours on two cores.

MESHWRIGHT_SOAK=2/8 runs the second of eight parts of the pairs, spread evenly. The table goes to bench/results/soak.md when all have run.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from equality import MODELS, ROWS, alone, check, train

from meshwright.base.errors import InputError
from meshwright.spec.plan import Plan, Recompute, Schedule, parse_plan
from meshwright.spec.rules import batch_faults
from meshwright.spec.runs import missing

TABLE = Path(__file__).parents[2] / "bench" / "results" / "soak.md"


def product() -> Iterator[tuple[str, str]]:
    """Every legal plan of 1, 2, 4 and 8 ranks on every model."""
    schedules = [
        (Schedule.one_f_one_b, 1),
        (Schedule.gpipe, 1),
        (Schedule.interleaved, 2),
        (Schedule.zb1, 1),
        (Schedule.zbv, 2),
        (Schedule.dualpipev, 2),
    ]
    for model in MODELS:
        for world in (1, 2, 4, 8):
            for tp in (1, 2, 4):
                for pp in (1, 2, 4):
                    dp, rest = divmod(world, tp * pp)
                    if rest or not dp or (model == "convnet" and tp * pp > 1):
                        continue
                    for fields in _variants(dp, tp, pp, schedules):
                        try:
                            plan = Plan(**fields)
                            plan.stage_layers(4)
                            plan.micro_batches(ROWS)
                        except (InputError, ValueError):
                            continue
                        if not missing(plan) and not any(batch_faults(plan, ROWS)):
                            yield model, plan.name


def _variants(dp: int, tp: int, pp: int, schedules: list[tuple[Schedule, int]]) -> Iterator[dict[str, Any]]:
    for zero in range(4):
        for replicate in (1, 2) if zero and dp >= 4 else (1,):
            for recompute in Recompute:
                for schedule, virtual in schedules if pp > 1 else schedules[:1]:
                    for sequence_parallel in (False, True) if tp > 1 else (False,):
                        groups = {"dp_replicate": dp} if zero == 0 else {"dp_replicate": replicate, "dp_shard": dp // replicate}
                        yield {
                            **groups, "tp": tp, "pp": pp, "zero": zero, "recompute": recompute, "schedule": schedule,
                            "virtual_stages": virtual, "sequence_parallel": sequence_parallel,
                        }  # fmt: skip


def family(plan: Plan) -> str:
    """What the plan is made of.

    >>> family(parse_plan("dp2.tp2.z3.mb2")), family(parse_plan("dp1"))
    ('tp x ZeRO-3', 'one device')
    """
    parts = [name for name, degree in (("tp", plan.tp), ("pp", plan.pp)) if degree > 1]
    parts += [f"ZeRO-{plan.zero}"] if plan.zero else ["dp"] if plan.dp > 1 else []
    return " x ".join(parts) or "one device"


@functools.cache
def expected(model: str, precision: str) -> dict[str, Any]:
    return alone(model, precision, steps=2)


@pytest.mark.soak
def test_every_plan_of_the_product_computes_what_one_device_computes(ranks: Any) -> None:
    part, parts = map(int, os.environ.get("MESHWRIGHT_SOAK", "1/1").split("/"))
    pairs = sorted(set(product()))[part - 1 :: parts]
    rows: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    failures = []
    for model, name in pairs:
        plan = parse_plan(name)
        for precision in ("fp64", "fp32"):
            try:
                found = check(expected(model, precision), ranks.run(plan.world, train, model, name, precision, 2), precision)
                rows.setdefault((model, family(plan), precision), []).append(found)
            except AssertionError as error:
                failures.append(f"{model} {name} {precision}: {str(error).splitlines()[0]}")
    said = f"{len(pairs)} of {len(set(product()))} pairs of model and plan, part {part} of {parts}, in float64 and float32: {len(failures)} differ."
    lines = ["| model | strategy | precision | plans | largest difference of a loss | of a first gradient |", "|---|---|---|---|---|---|"]
    for (model, kind, precision), found in sorted(rows.items()):
        loss, gradient = (max(column) for column in zip(*found, strict=True))
        lines.append(f"| {model} | {kind} | {precision} | {len(found)} | {loss:.1e} | {gradient:.1e} |")
    TABLE.write_text("# Every plan against one device\n\n" + "\n".join([said, "", *lines, *(f"\n- {line}" for line in failures)]) + "\n")
    assert not failures, "\n".join(failures)
