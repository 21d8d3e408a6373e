"""What is computed again or fetched from host memory is what was there: gradients bit for bit, in less memory, as much
as estimated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from equality import anatomy_of, make_batch, make_model
from test_peak_memory import expected, most

from meshwright.core.errors import InputError
from meshwright.runtime.offload.activation_offload import ActivationOffload
from meshwright.train.trainer import parallelize

WAYS = (
    *("rc-full", "rc-full1", "rc-attn", "rc-sac", "rc-sac1", "rc-full1+sac"),
    *(
        "off-activations",
        "rc-full.off-activations",
        "rc-full1.off-activations",
        "rc-sac.off-activations",
        "off-activations1",
        "rc-full1.off-activations1",
    ),
    *("off-activations-disk", "rc-full1.off-activations-disk", "rc-sac.off-activations-disk", "off-activations-disk1"),
)


def gradients(name: str, plan: str) -> dict[str, torch.Tensor] | None:
    trainer = parallelize(make_model(name), torch.optim.AdamW, plan, anatomy=anatomy_of(name))
    return trainer.gradients(make_batch(name, 0))[2]


@pytest.mark.parametrize("around", ["dp1.mb4", "pp2.interleaved2", "dp2.z3", "tp2.sp"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.covering(4)
def test_gradients_are_bit_for_bit_those_of_keeping_everything(ranks: Any, around: str, way: str) -> None:
    from meshwright.spec.plan import parse_plan

    world = parse_plan(around).world
    plain, kept = (
        ranks.once(world, gradients, "llama", around)[0],
        ranks.run(world, gradients, "llama", f"{around}.{way}")[0],
    )
    assert plain.keys() == kept.keys()
    assert all(torch.equal(plain[name], kept[name]) for name in plain)


OTHERS = ("llama-tied", "gpt2", "bert", "hf-llama", "hf-gpt2", "convnet", "mixtral")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.covering(1)
def test_every_model_recomputes_by_operation_to_the_bit(ranks: Any, name: str) -> None:
    plain, kept = (ranks.run(1, gradients, name, f"dp1.mb4{way}")[0] for way in ("", ".rc-sac"))
    assert plain.keys() == kept.keys()
    assert all(torch.equal(plain[name], kept[name]) for name in plain)


def trained(plan: str, precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of four steps, and the weights behind them (rank 0)."""
    model = make_model("hf-llama")
    trainer = parallelize(model, torch.optim.AdamW, plan, anatomy=anatomy_of("hf-llama"), precision=precision)
    return [trainer.step(make_batch("hf-llama", step)).loss for step in range(4)], trainer.full_state_dict() or {}


@pytest.mark.parametrize(
    ("around", "precision"),
    [
        ("dp1.mb4", "bf16-pure"),
        pytest.param("dp2.z3", "bf16", marks=pytest.mark.soak),
        pytest.param("tp2.sp", "fp16", marks=pytest.mark.soak),
    ],
)
def test_low_precision_recomputes_by_operation_to_the_bit(ranks: Any, around: str, precision: str) -> None:
    world = 1 if around.startswith("dp1") else 2
    (losses, weights), (expected, plain) = (
        ranks.run(world, trained, plan, precision)[0] for plan in (f"{around}.rc-sac", around)
    )
    assert losses == expected and all(torch.equal(weights[name], plain[name]) for name in plain)


ESTIMATED = (
    *("dp1.mb4.rc-full2", "dp1.mb4.rc-attn", "pp2.mb2.rc-full1", "tp2.mb4.rc-attn"),
    *(
        "dp1.mb8.rc-sac",
        "dp1.mb8.rc-sac2",
        "dp1.mb8.rc-full2+sac",
        "tp2.sp.mb8.rc-sac",
        "pp2.mb4.rc-sac",
    ),
)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("plan", ESTIMATED)
@pytest.mark.covering(1)
def test_a_rank_allocates_what_the_estimate_says(ranks: Any, plan: str, model: str) -> None:
    from meshwright.spec.plan import parse_plan

    assert expected(model, plan, "fp32") == pytest.approx(
        max(ranks.run(parse_plan(plan).world, most, model, plan, "fp32")), rel=0.05
    )


def test_what_a_block_keeps_twice_waits_once_and_what_was_written_between_twice() -> None:
    away = ActivationOffload(torch.device("cpu"), ())
    weight, given = torch.ones(4, requires_grad=True), torch.arange(4.0)
    with away.collect_block(0):
        one, other = weight * given, weight * given
        given += 1
        third = weight * given
    waits = [each.grad_fn._saved_other for each in (one, other, third)]
    assert waits[0].data_ptr() == waits[1].data_ptr() != waits[2].data_ptr() and waits[0].data_ptr() != given.data_ptr()
    assert [each.tolist() for each in waits] == [[0, 1, 2, 3]] * 2 + [[1, 2, 3, 4]]


def test_of_the_first_blocks_alone_activations_wait(ranks: Any) -> None:
    """Of those that wait one is on the device while other blocks run, and two while one of them does: 8 make room for
    7, 16 for 15, all 32 for 30 or, at the head, 31."""
    from meshwright.planner.cost.step import estimate
    from meshwright.planner.inputs.cluster_parser import read_cluster
    from meshwright.planner.inputs.model_parser import read_model
    from meshwright.spec.job import Job
    from meshwright.spec.plan import parse_plan
    from meshwright.spec.workload import Workload

    job = Job(
        model=read_model("llama-7b"), cluster=read_cluster("1x1:a100-80gb"), workload=Workload(batch=4, sequence=2048)
    )
    kept = [
        estimate(job, parse_plan(f"dp1.mb4{way}")).memory.activations
        for way in ("", ".off-activations8", ".off-activations16", ".off-activations")
    ]
    less = [before - after for before, after in itertools.pairwise(kept)]
    assert less[0] / 7 == pytest.approx(less[1] / 8) and 15 <= less[2] / (less[0] / 7) <= 16
    assert ranks.run(1, sent, "off-activations1") == [1] and ranks.run(1, sent, "off-activations") == [4]


def sent(way: str) -> int:
    """Blocks whose activations waited in the host's memory."""
    trainer = parallelize(make_model("llama"), torch.optim.AdamW, f"dp1.mb8.{way}", anatomy=anatomy_of("llama"))
    away, places = trainer.engine.run.keeping.offload, set()
    enter = away.collect_block
    away.collect_block = lambda place: (places.add(place), enter(place))[1]
    trainer.step(make_batch("llama", 0))
    return len(places)


def test_what_waited_goes_with_the_pass_that_kept_it() -> None:
    away = ActivationOffload(torch.device("cpu"), ())
    hidden, blocks = torch.ones(4, requires_grad=True), []
    for place in range(3):
        with away.collect_block(place):
            hidden = hidden.exp()
        blocks.append(away._last)
    assert [block().place for block in blocks] == [0, 1, 2] and blocks[2]().before() is blocks[1]()
    hidden.sum().backward()
    del hidden
    assert [block() for block in blocks] == [None] * 3


def refusal() -> str:
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32, attn_implementation="eager"
    )
    trainer = parallelize(transformers.GPT2LMHeadModel(config), torch.optim.AdamW, "dp1.rc-attn")
    try:
        trainer.step(make_batch("hf-gpt2", 0))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ["rc-full999", "rc-sac9", "off-activations9"])
def test_more_blocks_than_a_stage_has_are_refused_in_one_line(ranks: Any, way: str) -> None:
    assert ranks.run(1, refused, way)[0].startswith(
        f"plan dp1.{way}: {way} counts the blocks of one stage, which has at most 4"
    )


def refused(way: str) -> str:
    with pytest.raises(InputError) as caught:
        gradients("llama", f"dp1.{way}")
    return str(caught.value)


def test_selective_recompute_without_an_attention_kernel_is_refused_in_one_line(ranks: Any) -> None:
    found = ranks.run(1, refusal)[0]
    assert "scaled_dot_product_attention" in found and "\n" not in found
