"""At ZeRO 1 and 2, weights that are still being gathered when a step returns are waited for before anyone reads them
([Note: overlapped all-gather] in runtime/zero/group_weights.py). The device and its other ranks are played on the CPU
(traced_mesh.py); the elements of other ranks are NaN until a gather is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from race_detector import RaceDetector, detected_races, join
from residual_model import WIDTH, Model, adamw, batch, made
from test_parameter_access import USES
from torch import nn
from torch._dynamo.utils import counters
from torch.optim.swa_utils import AveragedModel
from traced_mesh import SEQUENCE, constant_model, graph_of, still, traced_rank

from meshwright.runtime import compile
from meshwright.runtime.comm.async_collectives import CollectiveWork, all_gather
from meshwright.runtime.zero import group_weights
from meshwright.runtime.zero.group_weights import GroupWeights
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import Trainer, parallelize


@contextmanager
def slow_gathers(dropped: bool = False) -> Iterator[None]:
    """Inside the context, a gather fills what belongs to other ranks with NaN, and with values when it is waited for.
    `dropped`: nobody waits."""

    def start(full: torch.Tensor, shard: torch.Tensor, group: Any, sizes: Any = None) -> CollectiveWork:
        if group is None or shard.untyped_storage().data_ptr() != full.untyped_storage().data_ptr():
            return all_gather(full, shard, group, sizes)
        right, own = full.clone(), shard.clone()
        full.fill_(torch.nan)
        shard.copy_(own)
        return CollectiveWork(None, lambda: None if dropped else full.copy_(right))  # type: ignore[func-returns-value]

    with mock.patch.object(group_weights, "all_gather", start):
        yield


@contextmanager
def trainer_of(plan: str, precision: str = "fp32", model: Model | None = None) -> Iterator[tuple[Model, Trainer]]:
    with traced_rank(0, 2) as rank:
        model = model or made()
        trainer = parallelize(model, adamw, parse_plan(plan).but(bucket=1), precision=precision, prove="never")
        rank.trains = True
        trainer.engine.preflight.skip()
        trainer.engine.preflight.analysed = None
        yield model, trainer
        trainer.close()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of what lies in the memory of the parameters, without a wait."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter.detach().clone() for parameter in model.parameters()]


def gathering(trainer: Trainer) -> int:
    return sum(unit.weights.is_gathering for unit in trainer.engine.zero.units)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", ["dp2.z1", "dp2.z2", "dp2.z1.mb1"])
def test_steps_that_all_gather_async_equal_those_that_wait(
    plan: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    start = GroupWeights.all_gather_async
    for waits in (False, True):
        if waits:
            monkeypatch.setattr(
                GroupWeights, "all_gather_async", lambda weights: (start(weights), weights.finish_gather())[0]
            )
        with trainer_of(plan, precision) as (model, trainer), slow_gathers():
            losses = []
            for step in range(4):
                losses.append(trainer.step(batch(step), wait=False).loss)
                assert gathering(trainer) == (0 if waits else 6)
            losses.append(trainer.evaluate(batch(9)))
            assert not gathering(trainer)
            found.append((losses, values(model)))
    assert found[0][0] == found[1][0] and torch.isfinite(torch.tensor(found[0][0])).all()
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_a_forward_without_the_wait_is_seen() -> None:
    with trainer_of("dp2.z1") as (_, trainer), slow_gathers(dropped=True):
        trainer.step(batch(0), wait=False)
        assert trainer.evaluate(batch(1)) != trainer.evaluate(batch(1))  # NaN


ALL_USES: dict[str, Callable[[Any], Any]] = {
    **USES,
    "averages": AveragedModel,
    "prints": lambda model: repr(model.head.weight),
    "runs the model": lambda model: model(input_ids=batch(0)["input_ids"]),
    "sums over ranks": lambda model: dist.all_reduce(model.head.weight.data),
}


@pytest.mark.parametrize("use", [name for name in ALL_USES if name != "saves the model"])
def test_every_use_between_steps_waits_for_the_weights(use: str) -> None:
    with trainer_of("dp2.z1", "fp64") as (model, trainer), slow_gathers():
        trainer.step(batch(0), wait=False)
        assert gathering(trainer) and values(model.head)[0].isnan().any()
        with torch.no_grad():
            ALL_USES[use](model)
        assert not any(value.isnan().any() for value in values(model.head)[:1])
        assert type(model.head.weight) is torch.nn.Parameter


def test_compiled_code_between_steps_reads_weights_that_have_arrived() -> None:
    """It gets the parameter itself, without torch's dispatch of functions."""
    with trainer_of("dp2.z1", "fp64") as (model, trainer), slow_gathers():
        trainer.step(batch(0))
        assert not gathering(trainer) and type(model.head.weight) is torch.nn.Parameter
        before = values(model)
        dist.broadcast(model.head.weight, 0)
        assert all(map(torch.equal, before, values(model))) and not before[0].isnan().any()


class CompiledCode(torch.autograd.Function):
    """A kernel of a C++ extension, which reads the memory of a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            ctx.save_for_backward(x, weight.detach().clone())
            return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight.sum(), (gradient * x).sum().expand_as(weight)


class ExtendedModel(Model):
    """Layers before and after the blocks use compiled code. Both ranks have a part of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.full((8, WIDTH), 0.01)) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = CompiledCode.apply(self.words(input_ids), self.first)
        for layer in self.layers:
            x = layer(x)
        return self.head(CompiledCode.apply(x, self.last))


def test_compiled_code_outside_of_blocks_reads_weights_that_have_arrived() -> None:
    with trainer_of("dp2.z1", "fp64", ExtendedModel()) as (_, trainer), slow_gathers():
        losses = [trainer.step(batch(step), wait=False).loss for step in range(3)]
        assert gathering(trainer)
        assert torch.isfinite(torch.tensor(losses)).all() and len(set(losses)) == 3


def test_the_form_of_a_weight_needs_no_wait() -> None:
    with trainer_of("dp2.z1") as (model, trainer), slow_gathers():
        trainer.step(batch(0), wait=False)
        before = gathering(trainer)
        weight = model.head.weight
        assert (weight.shape, weight.requires_grad, weight.grad, isinstance(weight, torch.nn.Parameter)) == (
            torch.Size([32, 16]), True, None, True,
        )  # fmt: skip
        assert gathering(trainer) == before > 1


def test_a_copy_of_a_model_is_one_of_ordinary_parameters() -> None:
    with trainer_of("dp2.z1") as (model, trainer), slow_gathers():
        trainer.step(batch(0), wait=False)
        copied = AveragedModel(model)
        assert {type(each) for each in copied.parameters()} == {torch.nn.Parameter}
        assert all(map(torch.equal, values(copied.module), values(model)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's own
def test_a_compiled_block_never_waits_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    monkeypatch.setattr(
        compile, "compiler_backend", lambda: lambda graph, inputs, **_: graphs.append(graph) or graph.forward
    )
    torch._dynamo.reset()
    counters.clear()
    try:
        with traced_rank(0, 2) as rank, slow_gathers():
            model = parallelize(
                constant_model("llama", 2), still, "dp2.z1.compile", anatomy=graph_of("llama", 2), prove="never"
            )
            rank.trains = True
            model.engine.preflight.skip()
            model.engine.preflight.analysed = None
            rows = {name: torch.arange(SEQUENCE).repeat(4, 1) for name in ("input_ids", "labels")}
            losses = [model.step(rows, wait=False).loss for _ in range(4)]
            model.close()
        assert losses == losses[:1] * 4 and not counters["graph_break"] and len(graphs) == 1
    finally:
        torch._dynamo.reset()
        counters.clear()


@pytest.mark.parametrize("plan", ["dp2.z1", "dp2.z2"])
def test_a_gather_in_its_own_stream_races_with_no_kernel_and_the_wait_is_needed(plan: str) -> None:
    """Also where the user reads a weight in another stream before the next forward."""
    whole = raced(plan)
    wait = "wait_event of group_weights.py:GroupWeights._finish_gather"
    assert whole.races == set() and wait in whole.waits
    assert raced(plan, dropped=wait).races
    assert not raced(plan, side_stream=True).races
    for_user = "wait_stream of group_weights.py:GroupWeights._finish_gather"
    assert raced(plan, dropped=for_user, side_stream=True).races


def raced(plan: str, dropped: str = "", side_stream: bool = False) -> RaceDetector:
    """Trains three steps whose gathers run in a stream of their own, as those of NCCL do."""
    with traced_rank(0, 2) as rank, detected_races(dropped) as detector:
        gathers = detector.stream(torch.device("cpu"))

        def start(full: torch.Tensor, shard: torch.Tensor, group: Any, sizes: Any = None) -> CollectiveWork:
            join(gathers.actor.clock, detector.current.clock)  # the library makes its stream wait
            with detector.use_stream(gathers):
                full.mul_(1.0)
            return CollectiveWork(None, gathers.record_event().wait)

        model = constant_model("llama", 2)
        trainer = parallelize(model, still, plan, anatomy=graph_of("llama", 2), prove="never")
        rank.trains = True
        trainer.engine.preflight.skip()
        trainer.engine.preflight.analysed = None
        rows = {name: torch.arange(SEQUENCE).repeat(4, 1) for name in ("input_ids", "labels")}
        with mock.patch.object(group_weights, "all_gather", start):
            for _ in range(3):
                trainer.step(rows, wait=False)
                if side_stream:
                    side = detector.stream(torch.device("cpu"))
                    with detector.use_stream(side):
                        model.lm_head.weight.sum()
                    detector.current_stream().wait_stream(side)
            trainer.close()
    return detector
