"""The loss in chunks is the loss: alone, over tensor ranks, with tied heads, stages and shards; and the logits never
exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import alone, check, train
from test_families import under_plan
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models.registry import build_reference_model
from meshwright.train.trainer import parallelize

torch.set_num_threads(1)
PAIRS = [
    ("llama", "mb8.lc3"), ("llama-tied", "tp2.mb4.lc4"), ("llama", "tp2.sp.mb4.lc2"), ("gpt2", "dp2.z3.mb2.lc2"),
    ("bert", "tp2.mb4.lc5"), ("llama-tied", "pp2.mb2.lc4"), ("hf-llama", "tp2.z1.mb4.lc4"), ("llama", "cp2.mb4.lc2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), PAIRS)
@pytest.mark.covering(1)
def test_a_loss_in_chunks_is_the_loss_of_one_device(ranks: Any, name: str, plan: str) -> None:
    world = 1 if plan.startswith("mb") else 2
    check(alone(name, "fp64", 2), ranks.run(world, train, name, plan, "fp64", 2), "fp64")


def test_a_model_that_caps_its_logits_is_refused_in_one_line(ranks: Any) -> None:
    said = ranks.run(1, under_plan, "gemma2", "mb8.lc4")[0]
    assert said == "lc4: the model changes the logits after its head (a soft cap or a scale): leave lc out"


class Largest(TorchDispatchMode):
    """The most numbers of a floating tensor that was made."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device.type != "meta"
                and function.__name__ not in ("view.default", "t.default")
            ):
                self.size = max(self.size, tensor.numel())
        return result


def largest(plan: str) -> int:
    """In a step over 8 x 16 places and a vocabulary of 4,096, with 16 features."""
    model = build_reference_model(
        {"kind": "llama", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 16, "vocab": 4096, "seq": 16}
    )
    trainer = parallelize(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), plan)
    ids = torch.arange(128).view(8, 16)
    with Largest() as seen:
        trainer.gradients({"input_ids": ids, "labels": ids})
    trainer.close()
    return seen.size


def test_all_logits_never_exist(ranks: Any) -> None:
    whole, parts = ranks.run(1, largest, "mb8")[0], ranks.run(1, largest, "mb8.lc8")[0]
    assert whole >= 128 * 4096
    assert parts < 128 * 4096 / 2
