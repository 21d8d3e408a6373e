"""Losses that read parameters beside the output: equal to one device where every data rank holds them, refused in one
line where no rank holds them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import residual_model
import torch
import torch.nn.functional as F
from residual_model import Model, batch

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

Loss = Callable[[Any, dict[str, Any]], torch.Tensor]


def plain(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def head(model: Model) -> Loss:
    return lambda output, batch: plain(output, batch) + 0.1 * model.head.weight.square().sum()


def words(model: Model) -> Loss:
    return lambda output, batch: plain(output, batch) + 0.1 * model.words.weight.square().sum()


def block(model: Model) -> Loss:
    return lambda output, batch: plain(output, batch) + 0.1 * model.layers[0].up.weight.abs().sum()


def everything(model: Model) -> Loss:
    return lambda output, batch: plain(output, batch) + 0.1 * sum(each.square().sum() for each in model.parameters())


def captured(model: Model) -> Loss:
    taken = list(model.parameters())
    return lambda output, batch: plain(output, batch) + 0.1 * sum(each.square().sum() for each in taken)


def data(model: Model) -> Loss:
    return lambda output, batch: plain(output, batch) + 0.1 * sum(each.data.norm() for each in model.parameters())


READS = [head, words, block, everything, captured, data]
Read = Callable[[Model], Loss]


def made() -> Model:
    return residual_model.made().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def alone(read: Read) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, losses = made(), []
    loss_of, optimizer, gradients = read(model), sgd(model.parameters()), {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(batch(step)["input_ids"]), batch(step))
        loss.backward()
        gradients = gradients or {name: value.grad.clone() for name, value in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, dict(model.state_dict())


def trained(plan: str, read: Read) -> Any:
    model = made()
    loss = read(model)
    try:
        trainer = parallelize(model, sgd, plan, precision="fp64", loss=loss)
        gradients = trainer.gradients(batch(0))[2]
        losses = [trainer.step(batch(step)).loss for step in range(3)]
    except InputError as error:
        return str(error)
    return losses, gradients, trainer.full_state_dict()


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("plan", ["dp2", "dp2.z1.mb1", "dp2.z2.mb1"])
@pytest.mark.covering(2)
def test_a_penalty_counts_once_whatever_the_number_of_data_ranks_and_micro_batches(
    ranks: Any, plan: str, read: Read
) -> None:
    losses, gradients, weights = alone(read)
    results = ranks.run(2, trained, plan, read)
    for found in results:
        assert found[0] == pytest.approx(losses, rel=1e-10)
    for expected, full in ((gradients, results[0][1]), (weights, results[0][2])):
        for name, value in expected.items():
            torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("plan", ["tp2", "pp2.mb2", "dp2.z3"])
@pytest.mark.covering(3)
def test_a_loss_that_reads_parameters_is_refused_where_no_rank_holds_them_all(
    ranks: Any, plan: str, read: Read
) -> None:
    for said in ranks.run(2, trained, plan, read):
        assert isinstance(said, str) and said.startswith(f"plan {plan}: ") and "\n" not in said, said
        reasons = ("the loss reads the parameter", "outside of the forward", "before parallelize")
        assert any(reason in said for reason in reasons), said
