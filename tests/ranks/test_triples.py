"""Every three choices of a plan together, on 1 to 8 ranks: the loss and the first gradients of one device in float64;
every two in float32.

The choices are model, ranks, tensor ranks, stages with their schedule, context ranks with their way to attend, expert
ranks, ZeRO with its shards,
recompute, micro-batch, and what may stand beside them: what waits elsewhere, chunks of the loss, another order of axes.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from equality import ROWS, SEQUENCE, alone, check, train
from sweep import covering

from meshwright.core.errors import InputError
from meshwright.spec.constraints import (
    batch_violations,
    context_parallel_violations,
    sequence_violations,
    tensor_parallel_violations,
    unsupported_parts,
    world_size_violations,
)
from meshwright.spec.plan import parse_plan

MODELS, SPARSE, MORE = (
    ("llama", "llama-tied", "hf-gpt2", "bert", "convnet"),
    ("mixture", "mixtral"),
    ("gpt2", "hf-llama"),
)
"""MORE stand in the pairs of float32 alone."""
WORLDS = (1, 2, 3, 4, 6, 8)
PLACES = {
    "tensor": ("", "tp2", "tp2.sp", "tp4"),
    "stages": ("", "pp2", "pp2.zbh1", "pp2.zbv", "pp2.interleaved2", "pp3", "pp4.gpipe", "pp2.dualpipev"),
    "context": ("", "cp2", "cp2.ulysses", "cp4.ulysses2"),
    "experts": ("", "ep2", "ep4"),
    "data": ("", "dp2", "dp2.z1", "dp2.z2", "dp2.z3", "dp2x2.z3", "dp4.z2", "dp3.ga3-3-2", "z3", "dp2.z2.zw3-1"),
    "recompute": ("", "rc-full", "rc-attn", "rc-full1"),
    "micro": ("", "mb2"),
    "beside": ("", "off-activations", "off-optimizer", "off-parameters", "off-optimizer-disk60.off-parameters-disk50",
        "lc2", "order-dp-pp-tp", "order-tp-dp-pp"),
}  # fmt: skip

SAMPLE = [
    ("hf-gpt2", "tp2.cp2.z2.mb4.rc-full"), ("mixture", "pp2.cp2.ep2.z3.mb4.rc-full"),
    ("llama-tied", "pp2.z3.mb4.off-optimizer-disk60.off-parameters-disk50"),
]  # fmt: skip
"""The pairs that `make test` runs. Each strategy occurs in one of them, combined with others."""
SOAKED = [
    ("mixtral", "tp2.pp2.ep2.zbh1.mb2.off-activations"),
    ("llama", "dp2.pp2.z3.zbh1.rc-full.off-activations"), ("llama-tied", "pp2.cp2.z3.rc-attn"),
    ("mixtral", "dp2.tp2.ep2.z3.off-optimizer-disk30.off-parameters-disk60"),
]  # fmt: skip


def ranks_of(name: str) -> int:
    """Quickly, of a name whose plan may not be legal."""
    return math.prod(
        int(part) for degrees in re.findall(r"(?:^|\.)(?:dp|tp|pp|cp)([\dx]+)", name) for part in degrees.split("x")
    )


@functools.cache
def legal(kind: str, name: str) -> str | None:
    """The plan's own name, where it is one of such a model on so many ranks."""
    try:
        plan = parse_plan(name)
        plan.stage_layers(2 if kind in SPARSE else 4)
    except InputError:
        return None
    divisible = {"heads": 4, "kv_heads": 2 if kind == "mixtral" else 4, "ffn": 16 if kind in SPARSE else 128}
    rules = (
        world_size_violations(plan, plan.world),
        batch_violations(plan, ROWS),
        sequence_violations(plan, SEQUENCE),
        tensor_parallel_violations(plan, divisible),
        context_parallel_violations(plan, divisible),
    )
    return None if unsupported_parts(plan) or any(any(rule) for rule in rules) else plan.name


def choices(model: str) -> Iterator[tuple[tuple[str, ...], tuple[str, str]]]:
    """(choices, pair) of everything that is legal."""
    whole = (
        {"tensor", "stages", "context", "experts"} if model == "convnet" else set() if model in SPARSE else {"experts"}
    )
    for parts in itertools.product(*(("",) if place in whole else values for place, values in PLACES.items())):
        name = ".".join(filter(None, parts)) or "dp1"
        kind = model if model in SPARSE else ""
        if (
            ranks_of(name) in WORLDS
            and (plan := legal(kind, name)) is not None
            and not (model == "convnet" and ("lc" in plan or "rc-attn" in plan))
        ):
            yield (model, f"world {ranks_of(name)}", *parts), (model, plan)


@pytest.mark.parametrize(
    ("model", "plan"), [*SAMPLE, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in SOAKED)]
)
def test_strategies_together_compute_what_one_device_computes(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")


@pytest.mark.soak
def test_every_three_choices_together_compute_what_one_device_computes(ranks: Any, sweep: Any) -> None:
    three = [candidate for model in (*MODELS, *SPARSE) for candidate in choices(model)]
    two = [(each, (f"{model} fp32", plan)) for model in (*MODELS, *SPARSE, *MORE) for each, (_, plan) in choices(model)]

    def judge(model: str, plan: str) -> tuple[float, float]:
        name, _, precision = model.partition(" ")
        precision = precision or "fp64"
        return check(
            alone(name, precision, 2), ranks.run(parse_plan(plan).world, train, name, plan, precision, 2), precision
        )

    sweep("triples", "Every three choices together", covering(three, 3) + covering(two, 2), judge)
