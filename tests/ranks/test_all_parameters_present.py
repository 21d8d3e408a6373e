"""A model of many layers never trains as a smaller one: after every way of cutting it, the ranks together hold each
element of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import SIZES, make_optimizer, read_once

from meshwright.core.errors import InputError
from meshwright.models.registry import build_reference_model
from meshwright.runtime import state_dict
from meshwright.runtime.build.stages import partition as stage_partition
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

LAYERS = 10
CUTS = [
    "dp2.z0", "dp2.z1", "dp2.z3", "tp2", "pp2", "pp4", "pp2.ls6-4", "pp2.interleaved2", "pp2.zbv", "pp2.dualpipev",
    "pp2.tp2", "dp2.pp2.z3", "dp2x2.z2", "cp2.z1",
]  # fmt: skip

FEW = ["pp2.ls6-4", "pp2.interleaved2", "pp2.zbv"]
"""The plans on two ranks that `make test` runs. `make soak` runs all plans."""


def build_deep(layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    return build_reference_model(
        {**SIZES, "kind": "llama", "layers": layers, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 32}
    )


def held(plan: str) -> dict[str, int]:
    """Elements of each parameter that all ranks together would save, each once."""
    trainer = parallelize(build_deep(), make_optimizer, plan, anatomy=read_once("ten layers", build_deep))
    mine = [(item.piece.name, item.data.numel()) for item in state_dict.weight_pieces(trainer.engine, saving=True)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    counts: dict[str, int] = {}
    for name, numel in (piece for part in everyone for piece in part):
        counts[name] = counts.get(name, 0) + numel
    trainer.close()
    return counts


def all_held(plans: list[str]) -> list[dict[str, int]]:
    return [held(plan) for plan in plans]


@pytest.mark.parametrize(
    ("world", "plans"),
    [
        pytest.param(2, FEW, id="2-few"),
        *(
            pytest.param(
                world,
                [plan for plan in CUTS if parse_plan(plan).world == world and plan not in FEW],
                id=f"{world}-others",
                marks=pytest.mark.soak,
            )
            for world in (2, 4)
        ),
    ],
)
def test_every_way_of_cutting_holds_each_element_of_each_layer_once(world: int, plans: list[str], ranks: Any) -> None:
    whole = {f"model/{name}": parameter.numel() for name, parameter in build_deep().named_parameters()}
    assert len([name for name in whole if name.endswith("down_proj.weight")]) == LAYERS
    for plan, counts in zip(plans, ranks.run(world, all_held, plans)[0], strict=True):
        assert counts == whole, plan


@pytest.mark.parametrize(
    "plan", ["pp2.ls4-4", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("pp4.ls2-2-2-2", "pp2.ls6-6"))]
)
def test_stages_that_name_another_number_of_layers_are_refused(plan: str, ranks: Any) -> None:
    with pytest.raises(Exception, match=r"the model has 10 blocks|sums to|10"):
        ranks.run(parse_plan(plan).world, held, plan)


def losing(plan: str) -> str:
    """A cut that leaves a layer out."""
    whole = stage_partition.params_by_layer
    stage_partition.params_by_layer = lambda model, anatomy: whole(model, anatomy)[:-1]  # type: ignore[attr-defined]
    try:
        parallelize(build_deep(), make_optimizer, plan)
    except (AssertionError, InputError) as error:
        return str(error)
    finally:
        stage_partition.params_by_layer = whole  # type: ignore[attr-defined]
    return "it trains"


def test_a_cut_that_loses_a_layer_ends_before_training(ranks: Any) -> None:
    for found in ranks.run(2, losing, "pp2"):
        assert found.startswith("parameters lost or doubled in the cut"), found
