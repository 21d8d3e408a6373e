"""The end of an epoch: a last batch of any number of rows trains to the loss of one device, and what is added to it
counts nowhere."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from equality import anatomy_of, difference, loss_of, make_batch, make_model, make_optimizer

from meshwright.spec.plan import parse_plan
from meshwright.train.step.inputs import LocalBatch, padded_rows
from meshwright.train.trainer import parallelize

ROWS = (8, 5, 1, 8)
PLANS = ("dp2", "dp2.z3.mb2", "dp4.z1", "dp2.tp2.sp.z2.mb2", "pp2.interleaved2", "dp2.z1.ga6-2", "dp2.pp2.z1.zbh1")


def trained(plan: str) -> tuple[list[tuple[float, int]], int, Any]:
    trainer = parallelize(
        make_model("llama"), make_optimizer, plan, precision="fp64", clip=1.0, anatomy=anatomy_of("llama")
    )
    records = [trainer.step(make_batch("llama", step, rows)) for step, rows in enumerate(ROWS)]
    found = [(record.loss, round(record.rates["labels_per_token"] * record.tokens)) for record in records]
    return found, trainer.samples, trainer.full_state_dict()


@functools.cache
def single() -> tuple[list[tuple[float, int]], dict[str, torch.Tensor]]:
    model = make_model("llama").double()
    optimizer, found = make_optimizer(model.parameters()), []
    for step, rows in enumerate(ROWS):
        optimizer.zero_grad()
        loss, tokens = loss_of(model, "llama", make_batch("llama", step, rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), tokens))
    return found, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.covering(1)
def test_the_last_batch_of_an_epoch_may_have_any_number_of_rows(ranks: Any, plan: str) -> None:
    expected, weights = single()
    results = ranks.run(parse_plan(plan).world, trained, plan)
    for steps, samples, _ in results:
        assert samples == sum(ROWS)
        for (loss, tokens), (alone, counted) in zip(steps, expected, strict=True):
            assert abs(loss / alone - 1) <= 1e-10 and tokens == counted
    for name, weight in weights.items():
        assert difference(results[0][2][name], weight) <= 1e-8


def count_with_prompts(local: bool) -> tuple[int, float, float]:
    trainer = parallelize(make_model("llama"), make_optimizer, "dp2.mb2", precision="fp64", anatomy=anatomy_of("llama"))
    batch = make_batch("llama", 0, 4)
    batch["labels"][:, :6] = -100
    if local:
        batch = LocalBatch([{name: value[2 * trainer.mesh.replica :][:2] for name, value in batch.items()}])
    record = trainer.step(batch)
    return record.tokens, record.rates["labels_per_token"], record.tokens_per_second * record.seconds


@pytest.mark.parametrize("local", [False, True])
def test_tokens_are_rows_times_sequence_whether_they_have_labels_or_not(ranks: Any, local: bool) -> None:
    batch = make_batch("llama", 0, 4)
    batch["labels"][:, :6] = -100
    total, labels = batch["input_ids"].numel(), loss_of(make_model("llama"), "llama", batch)[1]
    assert labels < total
    for tokens, per_token, rate in ranks.run(2, count_with_prompts, local):
        assert tokens == total and round(per_token * tokens) == labels and rate == pytest.approx(tokens)


def test_rows_are_filled_up_to_what_the_order_of_a_pipeline_takes() -> None:
    assert [
        padded_rows(parse_plan(name), 3)
        for name in ("dp2.mb4", "pp4.interleaved2", "pp2.dualpipev", "dp2.z1.ga3-1.mb2")
    ] == [
        8,
        4,
        4,
        8,
    ]
