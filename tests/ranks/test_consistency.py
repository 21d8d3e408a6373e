"""Ranks that were given unlike plans, models, weights or batches say so in one line, all of them, instead of waiting
for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import anatomy_of, make_batch, make_model, make_optimizer

from meshwright.core.errors import InputError
from meshwright.models.registry import build_reference_model
from meshwright.train.step.inputs import LocalBatch, _is_close
from meshwright.train.trainer import parallelize

OTHER = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 96, "seq": 32, "kind": "llama"}


def refused(what: str) -> str:
    """On every rank: what training says, where rank 1 was given something else."""
    odd = dist.get_rank() == 1
    model = make_model("llama")
    plan, precision, batch = "tp2", "fp32", make_batch("llama", 0)
    if odd:
        plan = "pp2" if what == "plan" else plan
        precision = "fp64" if what == "precision" else precision
        model = build_reference_model(OTHER) if what == "model" else model
        if what == "weights":
            model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    try:
        trainer = parallelize(model, make_optimizer, plan, precision=precision)
        if what in ("late", "share"):
            trainer.step(
                LocalBatch([batch], 9)
                if what == "share" and not odd
                else batch
                if what == "late"
                else LocalBatch([batch, batch], 9)
            )
        for _ in range(3 if what == "later" else 0):
            trainer.step(batch)
        if odd:
            batch = {
                "lengths": {key: value[:, :12] for key, value in batch.items()},
                "names": {**batch, "extra": batch["labels"]},
            }.get(what, batch)
            batch = make_batch("llama", 1) if what in ("numbers", "later") else batch
            batch = {key: value.flip(0) for key, value in batch.items()} if what == "order" else batch
            batch = {key: value[:4] for key, value in batch.items()} if what == "late" else batch
        trainer.step(batch)
    except InputError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("plan", "ranks disagree on the plan: ranks 0 and 1 were given tp2 and pp2"),
        ("precision", "ranks disagree on the precision: fp32 on rank 0, fp64 on rank 1"),
        ("model", "ranks disagree on the model: "),
        ("weights", "ranks disagree on the weights: those of rank 1"),
        ("lengths", "rank 0 was given input_ids [8, 16], labels [8, 16], rank 1 input_ids [8, 12], labels [8, 12]"),
        ("names", "rank 1 extra [8, 16], input_ids [8, 16], labels [8, 16]; pass the global batch on every rank"),
        ("numbers", "rank 1 was given other values than rank 0"),
        ("later", "rank 1 was given other values than rank 0"),
        ("order", "rank 1 was given other values than rank 0"),
        ("late", "rank 1 input_ids [4, 16], labels [4, 16]"),
        ("share", "rank 0 was given 1 micro-batch, rank 1 2 micro-batches; give all ranks of a replica the same rows"),
        ("nothing", "it ran"),
    ],
)
@pytest.mark.covering(2)
def test_ranks_that_disagree_are_told_what_about_before_anything_hangs(ranks: Any, what: str, said: str) -> None:
    for line in ranks.run(2, refused, what):
        assert said in line and "\n" not in line


def test_replicas_may_read_rows_of_other_lengths_each(ranks: Any) -> None:
    assert ranks.run(2, of_two_lengths) == [True, True]


def of_two_lengths() -> bool:
    trainer = parallelize(make_model("llama"), make_optimizer, "dp2.z1", precision="fp64", anatomy=anatomy_of("llama"))
    width = 16 - 4 * dist.get_rank()
    return bool(
        torch.isfinite(
            torch.tensor(
                trainer.step(
                    LocalBatch([{key: value[:, :width] for key, value in make_batch("llama", 0).items()}])
                ).loss
            )
        )
    )


def test_weights_that_are_no_number_on_one_rank_alone_are_others() -> None:
    nan, inf = float("nan"), float("inf")
    assert _is_close([1.0, nan, inf, 0.0], [1.0005, nan, inf, 0.0])
    assert not any(
        _is_close([one], [other])
        for one, other in ((nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (inf, -inf), (1.0, 1.1))
    )
