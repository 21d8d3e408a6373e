"""Shards of unlike sizes: the loss is the loss of one device, ranks hold the parts they were given, and checkpoints fit
any other plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equality import alone, anatomy_of, check, make_batch, make_model, make_optimizer, train, train_between_hosts
from hosts import hosts
from world_group import between_hosts

from meshwright.core.errors import InputError
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

SAMPLE = [
    ("llama", "dp2.z3.zw3-1"), ("llama", "dp2.z1.zw1-4"), ("llama", "dp4.z2.zw1-1-2-4"),
    ("llama-tied", "dp2.tp2.z2.mb2.zw2-1"), ("gpt2", "dp2x2.z3.zw1-3.rc-full"), ("llama", "dp2.z1.mb2.ga3-1.zw3-1"),
    ("llama-tied", "dp2.pp2.z1.zw1-2"),
]  # fmt: skip
MORE = [(model, plan) for model in ("llama", "llama-tied", "gpt2", "bert") for plan in (
    "dp4.z1.zw5-1-1-1", "dp4.z3.zw1-2-3-4", "dp2.pp2.z3.mb2.zw1-3", "dp2.pp2.z2.mb2.zbh1.zw4-1",
    "dp2.tp2.sp.z3.mb2.zw1-9", "dp2.cp2.z3.mb2.zw1-2-3-2")
    if not (model == "bert" and "cp" in plan)]  # fmt: skip


@pytest.mark.parametrize(("model", "plan"), SAMPLE)
@pytest.mark.covering(1)
def test_unlike_shards_train_to_the_loss_of_one_device(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")


@pytest.mark.parametrize(("model", "plan"), [SAMPLE[0], pytest.param(*SAMPLE[1], marks=pytest.mark.soak)])
def test_unlike_shards_between_hosts_train_to_the_loss_of_one_device(ranks: Any, model: str, plan: str) -> None:
    check(
        alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train_between_hosts, model, plan, "fp64", 2), "fp64"
    )


@pytest.mark.soak
@pytest.mark.parametrize(("model", "plan"), MORE)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_unlike_shards_of_every_kind_train_to_the_loss_of_one_device(
    ranks: Any, model: str, plan: str, precision: str
) -> None:
    check(alone(model, precision, 2), ranks.run(parse_plan(plan).world, train, model, plan, precision, 2), precision)


def sent(plan: str) -> float:
    """On every rank: bytes of a step, as its record says, where no memory is shared."""
    with between_hosts():
        trainer = parallelize(make_model("llama"), make_optimizer, plan, precision="fp64", anatomy=anatomy_of("llama"))
        return trainer.step(make_batch("llama", 0)).sent["data"]


def test_unlike_shards_send_what_like_ones_send_and_records_say_it(ranks: Any) -> None:
    for like, unlike in zip(ranks.run(2, sent, "dp2.z1"), ranks.run(2, sent, "dp2.z1.zw1-3"), strict=True):
        assert like > 0 and unlike == pytest.approx(
            like, rel=0.02
        )  # of two ranks each sends its slice's rest, then its slice


def gradients_at_once(plan: str) -> float:
    """On every rank, two to a host: bytes of memory for others to read that eight micro-batches took, in whole
    gradients."""
    with hosts(2):
        trainer = parallelize(make_model("llama"), make_optimizer, plan, precision="fp64")
    trainer.step(make_batch("llama", 0, 32))
    units = trainer.engine.zero.units
    slots = {
        id(group.shm): group.shm.buffers
        for unit in units
        if (group := unit.layout.shard_group) is not None and group.shm is not None
    }
    held = sum(slot.segment.size for each in slots.values() for slot in each._all)
    return held / sum(
        unit.gradients.buffer.numel() * unit.placement.shards * unit.gradients.buffer.itemsize for unit in units
    )


@pytest.mark.parametrize("plan", ["dp4.z2.zw1-1-2-4", pytest.param("dp4.z2", marks=pytest.mark.soak)])
def test_full_gradients_of_uneven_shards_are_reduced_after_each_micro_batch(ranks: Any, plan: str) -> None:
    assert max(ranks.run(4, gradients_at_once, plan)) < 4.0


def held(plan: str, folder: str, load: bool) -> tuple[int, float]:
    """Bytes of masters and optimizer states, and a loss: of two steps that are saved, or of one after what was
    saved."""
    trainer = parallelize(
        make_model("llama"), make_optimizer, plan, precision="fp64", clip=1.0, anatomy=anatomy_of("llama")
    )
    if load:
        trainer.load(folder)
        return trainer.bytes()["optimizer"], trainer.step(make_batch("llama", 2)).loss
    for step in range(2):
        trainer.step(make_batch("llama", step))
    trainer.save(folder)
    return trainer.bytes()["optimizer"], trainer.step(make_batch("llama", 2)).loss


def test_ranks_hold_their_parts_and_any_other_plan_goes_on_from_their_checkpoint(ranks: Any, tmp_path: Path) -> None:
    unlike = ranks.run(2, held, "dp2.z3.zw3-1", str(tmp_path / "a"), False)
    assert 2.7 < unlike[0][0] / unlike[1][0] < 3.1
    path = next((tmp_path / "a").glob("step-*"))
    for plan in ("dp2.z1.zw1-2", "dp4.z2", "tp2.mb4"):
        (_, loss), *_ = ranks.run(parse_plan(plan).world, held, plan, str(path), True)
        assert loss == pytest.approx(unlike[0][1], rel=1e-10)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("dp4.z3.zw1-1", "each of the 4 ranks of a shard group"),
        ("dp2.zw1-2", "at z1 to z3"),
        ("dp2.z1.zw1-0", "at least 1"),
        ("dp4.ep2.z1.zw1-1-1-2", "use ep1"),
    ],
)
def test_shards_that_fit_no_group_are_refused_in_one_line(plan: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        parse_plan(plan)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_weights_of_shards_read_back_from_their_name() -> None:
    plan = parse_plan("dp2x2.z3.zw1-3.rc-full")
    assert plan.shard_weights == (1, 3) and parse_plan(plan.name) == plan
