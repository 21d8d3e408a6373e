"""Every three choices of a plan together, on 1 to 8 ranks: the loss and the first gradients of one device.

The choices are model, ranks, tensor ranks, stages with their schedule, context ranks with their way to attend, expert ranks, ZeRO, recompute, offload and micro-batch.
All legal products are listed; plans are taken from the list until no three choices that can stand together are left that no plan has. A part of
them runs as MESHWRIGHT_SOAK says (2/8: the second of eight). The table goes to bench/results/triples.md.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from equality import ROWS, SEQUENCE, alone, check, train

from meshwright.base.errors import InputError
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.rules import batch_faults, context_faults, sequence_faults, tensor_faults, world_faults
from meshwright.spec.runs import missing

TABLE = Path(__file__).parents[2] / "bench" / "results" / "triples.md"
DENSE, SPARSE = ("llama", "llama-tied", "hf-gpt2", "bert"), ("mixture", "mixtral")
WORLDS = (1, 2, 3, 4, 6, 8)
PLACES = {
    "tensor": ("", "tp2", "tp2.sp", "tp4"),
    "stages": ("", "pp2", "pp2.zb1", "pp2.zbv", "pp2.interleaved2", "pp3", "pp4.gpipe", "pp2.dualpipev"),
    "context": ("", "cp2", "cp2.ulysses", "cp4.ulysses2"),
    "experts": ("", "ep2", "ep4"),
    "data": ("", "dp2", "dp2.z1", "dp2.z2", "dp2.z3", "dp2x2.z3", "dp4.z2", "dp3.sh3-3-2", "z3", "dp1x1.z2"),
    "recompute": ("", "rc-layer", "rc-selective", "rc-layer1"),
    "offload": ("", "off-activations"),
    "micro": ("", "mb2"),
}  # fmt: skip

SAMPLE = [
    ("llama", "dp2.pp2.z3.zb1.rc-layer.off-activations"), ("llama-tied", "pp2.cp2.z3.rc-selective"), ("hf-gpt2", "tp2.cp2.z2.mb2.rc-layer"),
    ("mixture", "pp2.cp2.ep2.z3.rc-layer"), ("mixtral", "tp2.pp2.ep2.zb1.mb2.off-activations"),
]  # fmt: skip
"""For every `make test`: each strategy among others."""


def legal(model: str, name: str) -> str | None:
    """The plan's own name, where it is one of this model on so many ranks."""
    try:
        plan = parse_plan(name)
        plan.stage_layers(2 if model in SPARSE else 4)
    except InputError:
        return None
    divisible = {"heads": 4, "kv_heads": 2 if model == "mixtral" else 4, "ffn": 16 if model in SPARSE else 128}
    rules = (
        world_faults(plan, plan.world),
        batch_faults(plan, ROWS),
        sequence_faults(plan, SEQUENCE),
        tensor_faults(plan, divisible),
        context_faults(plan, divisible),
    )
    if plan.world not in WORLDS or missing(plan) or any(any(rule) for rule in rules):
        return None
    return plan.name


def choices(model: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """(choices, plan) of everything that is legal."""
    places = [PLACES[place] if place != "experts" or model in SPARSE else ("",) for place in PLACES]
    for parts in itertools.product(*places):
        name = legal(model, ".".join(filter(None, parts)) or "dp1")
        if name is not None:
            yield (model, f"world {parse_plan(name).world}", *parts), name


@functools.cache
def covering() -> tuple[tuple[str, str], ...]:
    """Plans in which every three choices that can stand together do."""
    candidates = [(each, name) for model in (*DENSE, *SPARSE) for each, name in choices(model)]
    random.Random(0).shuffle(candidates)
    left = {triple for each, _ in candidates for triple in triples(each)}
    taken: list[tuple[str, str]] = []
    for least in (110, 80, 60, 40, 25, 12, 6, 3, 1):
        for each, name in candidates:
            new = left & triples(each)
            if len(new) >= least:
                left -= new
                taken.append((each[0], name))
    return tuple(dict.fromkeys(taken))


@functools.cache
def triples(each: tuple[str, ...]) -> frozenset[tuple[tuple[int, str], ...]]:
    return frozenset(itertools.combinations(enumerate(each), 3))


@functools.cache
def expected(model: str) -> dict[str, Any]:
    return alone(model, "fp64", steps=2)


@pytest.mark.parametrize(("model", "plan"), SAMPLE)
def test_strategies_together_compute_what_one_device_computes(ranks: Any, model: str, plan: str) -> None:
    check(expected(model), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")


def family(plan: Plan) -> str:
    parts = [name for name, degree in (("tp", plan.tp), ("pp", plan.pp), ("cp", plan.cp), ("ep", plan.ep)) if degree > 1]
    return " x ".join([*parts, f"ZeRO-{plan.zero}"] if plan.zero else [*parts, *(["dp"] if plan.dp > 1 else [])]) or "one device"


@pytest.mark.soak
def test_every_three_choices_together_compute_what_one_device_computes(ranks: Any) -> None:
    part, parts = map(int, os.environ.get("MESHWRIGHT_SOAK", "1/1").split("/"))
    pairs = covering()[part - 1 :: parts]
    rows: dict[str, list[tuple[float, float]]] = {}
    failures = []
    for model, name in pairs:
        plan = parse_plan(name)
        try:
            rows.setdefault(family(plan), []).append(check(expected(model), ranks.run(plan.world, train, model, name, "fp64", 2), "fp64"))
        except AssertionError as error:
            failures.append(f"{model} {name}: {(str(error).strip().splitlines() or ['?'])[-1]}")
        write(f"{len(pairs)} of {len(covering())} pairs of model and plan, part {part} of {parts}", rows, failures)
    assert not failures, "\n".join(failures)


def write(what: str, rows: dict[str, list[tuple[float, float]]], failures: list[str]) -> None:
    """The table of what has run so far."""
    ran = sum(map(len, rows.values()))
    said = f"{what}, in float64, on {', '.join(map(str, WORLDS))} ranks: {ran} equal, {len(failures)} not."
    lines = ["| strategies | pairs | largest difference of a loss | of a first gradient |", "|---|---|---|---|"]
    for kind, found in sorted(rows.items()):
        loss, gradient = (max(column) for column in zip(*found, strict=True))
        lines.append(f"| {kind} | {len(found)} | {loss:.1e} | {gradient:.1e} |")
    TABLE.write_text(
        "# Every three choices together, against one device\n\n"
        + "\n".join([said, "", *lines, *(f"\n- {line}" for line in failures)])
        + "\n"
    )
