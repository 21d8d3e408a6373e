"""Random plans that another system can express: each field is drawn from the values of one of the system's limits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from meshwright.core.errors import InputError
from meshwright.interop.system import ANY, PlanSpaceLimit, System
from meshwright.spec.enums import MESH_AXES
from meshwright.spec.plan import Plan
from meshwright.spec.schedules.schedule import find_schedule

BLOCKS = 32
ANY_VALUES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "tp": (1, 1, 2, 4),
    "pp": (1, 1, 2, 4),
    "cp": (1, 1, 2, 4),
    "ep": (1, 1, 2, 4),
    "dp_shard": (1, 2, 3, 4, 8),
    "dp_replicate": (1, 1, 2, 4),
    "micro_batch": (1, 2, 4),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "context": ("ring", "ulysses"),
    "recompute": ("none", "full"),
    "compile": (False, True),
    "axes": (MESH_AXES, ("dp", "pp", "tp")),
    "offload": ((),),
}


def random_plans(system: System, seed: int) -> Iterator[Plan]:
    """Yields plans that `system` can run, without end."""
    rng = random.Random(seed)
    while True:
        limit = rng.choice(system.limits)
        try:
            plan = Plan(**_fields(rng, limit))
        except (InputError, ValueError):
            continue
        if not limit.violations(plan) and not limit.rule(plan):
            yield plan


def _fields(rng: random.Random, limit: PlanSpaceLimit) -> dict[str, Any]:
    def free(name: str) -> bool:
        return limit.allowed(name) is ANY

    found = {
        name: rng.choice(values if free(name) else list(limit.allowed(name))) for name, values in ANY_VALUES.items()
    }
    if found["zero"] == 0:
        found |= {"dp_shard": 1, "dp_replicate": rng.choice((1, 2, 4))}
    if found["tp"] == 1:
        found["sequence_parallel"] = False
    if found["pp"] == 1:
        found["schedule"] = "1f1b"
    else:
        rules = find_schedule(found["schedule"])
        more = rng.choice((0, 1, 2)) if rules.any_stages_per_rank and free("virtual_stages") else 0
        found["virtual_stages"] = rules.stages_per_rank + more
        if free("layers_per_stage") and rng.random() < 0.3:
            stages = [1] * (found["pp"] * found["virtual_stages"])
            for _ in range(BLOCKS - len(stages)):
                stages[rng.randrange(len(stages))] += 1
            even = Plan(pp=len(stages)).stage_layers(BLOCKS)
            found["layers_per_stage"] = () if tuple(stages) == even else tuple(stages)
    if found["cp"] == 1:
        found["context"] = "ring"
    elif found["context"] == "ulysses" and found["cp"] == 4 and free("ulysses"):
        found["ulysses"] = rng.choice((0, 2))
    if str(found["recompute"]) == "full" and free("recompute_layers"):
        found["recompute_layers"] = rng.choice((0, 0, 1, 3))
    if {str(what).removesuffix("-disk") for what in found["offload"]} & {"optimizer"} and free("offload_share"):
        found["offload_share"] = rng.choice((100, 60, 35))
    return found
