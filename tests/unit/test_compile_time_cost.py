"""What the compiler takes is priced once a launch: it decides between plans of a short run and of no long one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs import named_job

from meshwright.planner.cost import constants
from meshwright.planner.cost.compute import layer_times
from meshwright.planner.cost.cost_context import build_cost_context
from meshwright.planner.cost.plan_grid import TpEpShape
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.search.space import PlanSpace
from meshwright.report.plans import estimate_text
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan


def of_two_kinds(steps: int, **pins: Any) -> Job:
    """Llama 7B whose later blocks are wider: ranks of a pipeline hold one kind, others both."""
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    layers = list(job.model.layers)
    at = next(at for at, layer in enumerate(layers) if layer.name == "block")
    block = layers[at]
    wider = tuple(
        each.but(shape=(each.shape[0], each.shape[1] + 256)) if each.name.endswith("down_proj.weight") else each
        for each in block.parameters
    )
    wider = (
        wider
        if wider != block.parameters
        else (
            block.parameters[0].but(shape=(block.parameters[0].shape[0] + 256, *block.parameters[0].shape[1:])),
            *block.parameters[1:],
        )
    )
    layers[at : at + 1] = [block.but(repeat=16), block.but(repeat=16, parameters=wider)]
    return job.but(
        model=job.model.but(layers=tuple(layers)),
        workload=job.workload.but(steps=steps),
        pins={"compile": True, **pins},
    )


def test_a_rank_compiles_each_kind_of_block_once() -> None:
    job = of_two_kinds(200)
    for plan, kinds in (("dp8.z1.compile", 2), ("dp4.pp2.z1.compile", 1), ("dp8.z1", 0)):
        assert estimate(job, parse_plan(plan)).first == kinds * constants.COMPILE_SECONDS


@pytest.mark.parametrize(
    ("pins", "top"),
    [({"tp": 1, "cp": 1, "zero": 1, "offload": ()}, 1), pytest.param({}, 10, marks=pytest.mark.soak)],
    ids=["of few plans", "of all plans"],
)
def test_the_compiler_changes_the_order_of_a_short_run_and_not_of_a_long_one(pins: dict[str, Any], top: int) -> None:
    plans = search_plans(of_two_kinds(1_000_000, **pins), top=top).plans
    short = search_plans(of_two_kinds(1, **pins), top=1).plans[0]
    long, steps = plans[0], [each.estimate.time.step for each in plans]
    assert steps == sorted(steps)
    assert short.estimate.first < long.estimate.first and short.estimate.time.step > long.estimate.time.step
    assert short.estimate.over(1) < long.estimate.over(1)


@pytest.mark.parametrize(
    ("language", "words"),
    [("en", "the first step of each launch takes 38.8 s more"), ("zh", "每次启动的第一步多用 38.8 s")],
)
def test_the_first_step_of_compiled_blocks_is_said(language: str, words: str) -> None:
    job, plan = of_two_kinds(200), parse_plan("dp8.z1.compile")
    assert words in estimate_text(job, plan, estimate(job, plan), language).replace("\n", " ").replace("  ", " ")


def test_a_compiled_block_keeps_less_and_drops_by_operation_what_its_products_read() -> None:
    """Over tensor ranks too, where a block is one graph with its collectives."""
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    block = next(layer for layer in job.model.layers if layer.name == "block")
    each = 2048 * block.repeat
    fused = each * ((block.fused_split + block.fused_whole) * 2 + block.fused_fixed_split + block.fused_fixed_whole)
    within = 2 * block.fused_split  # of the block that runs backward: made within a kernel
    assert activations(job, "dp8.z3.mb1") - activations(job, "dp8.z3.mb1.compile") == pytest.approx(
        fused + 2048 * within
    )
    assert fused > 0.2 * activations(job, "dp8.z3.mb1")
    for plan in ("dp8.z3.mb1", "dp4.pp2.z1.mb1"):
        eager = activations(job, f"{plan}.rc-sac")
        assert activations(job, f"{plan}.rc-sac.compile") == pytest.approx(eager - 2048 * within)
    eager, compiled = (activations(job, f"cp8.z3.mb1.rc-sac{way}") for way in ("", ".compile"))
    assert compiled == pytest.approx(
        eager, rel=0.01
    )  # attention over eight context ranks is the fullest moment, in both
    for plan in ("tp8", "tp8.sp"):
        assert activations(job, f"{plan}.rc-sac.compile") == pytest.approx(activations(job, f"{plan}.rc-sac"))
        assert activations(job, f"{plan}.rc-sac.compile") < 0.8 * activations(job, f"{plan}.compile")


def test_where_weights_are_put_off_a_compiled_block_keeps_its_activated_gate() -> None:
    """Layers whose weights wait for W are ours, and the gate is activated between two of them; blocks that recompute
    put nothing off."""
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    block = next(layer for layer in job.model.layers if layer.name == "block")
    alive = 2 * block.repeat // 2 * 2048  # tokens of two micro-batches in the blocks of a stage
    dropped = alive * (block.fused_whole * 2 + block.fused_fixed_split + block.fused_fixed_whole)
    assert block.fused_gates == block.fused_split > 0
    assert activations(job, "dp4.pp2.z1.mb1.zbh1") - activations(job, "dp4.pp2.z1.mb1.zbh1.compile") == pytest.approx(
        dropped
    )
    for plan in ("dp4.pp2.z1.mb1.zbh1.rc-full", "dp4.pp2.z1.mb1.rc-full"):
        assert activations(job, f"{plan}.compile") < activations(job, plan) - 2048 * 2 * block.fused_split


def test_steps_of_a_gelu_that_is_written_out_are_no_gate() -> None:
    """They are compiled in one piece, over tensor ranks and where weights are put off too, and none is ever made
    there."""
    sizes = ArchitectureSizes(
        kind="gpt2",
        layers=12,
        hidden=768,
        heads=12,
        ffn=3072,
        vocab=512,
        seq=1024,
        mlp="gelu_new",
        norm="ln",
        pos="learned",
    )
    job = named_job("gpt2-xl", "1x8:a100-80gb", 64, 1024, "bf16").but(model=model_spec("gpt2", sizes))
    block = next(layer for layer in job.model.layers if layer.name == "block")
    assert (block.fused_split, block.fused_gates) == (3 * 3072, 0)
    steps = 1024 * 2 * block.fused_split
    for plan, blocks in (("dp8.z1.mb8", 12), ("dp4.tp2.z1.mb8", 12 / 2), ("dp4.pp2.z1.mb8.zbh1", 6 * 2)):
        dropped = activations(job, plan) - activations(job, f"{plan}.compile")
        assert dropped == pytest.approx(8 * blocks * steps, rel=0.1)
    for plan in ("dp8.z1.mb8.rc-full", "dp8.z1.mb8.rc-sac"):
        dropped = activations(job, plan) - activations(job, f"{plan}.compile")
        assert dropped == pytest.approx(8 * (steps + 1024 * 2 * 3072), rel=0.01)


def test_a_compiled_llama_block_moves_what_norm_rotation_and_gate_read_and_write_once() -> None:
    """7 B: 32 heads of 128, 11,008 inside the feed-forward. Per token and forward."""
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    block = next(layer for layer in job.model.layers if layer.name == "block")
    assert block.moved == 2 * 12 * 4096 + 10 * 2 * 4096 + 6 * 4096 + 5 * 11_008
    assert block.moved - block.fused_moved == 2 * 2 * 4096 + 2 * 2 * 4096 + 6 * 4096 + 3 * 11_008


def test_a_compiled_block_saves_its_traffic_in_forward_twice_in_backward_and_once_in_recompute() -> None:
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    setting, tokens, parallel = build_cost_context(job), np.array([16_384.0]), np.array([False])
    at = next(at for at, entry in enumerate(setting.entries) if entry.is_block)
    eager, compiled = (
        layer_times(setting, TpEpShape(1, 1, 1), 1, is_compiled, tokens, parallel) for is_compiled in (False, True)
    )
    block, rate = setting.entries[at].layer, setting.device.bandwidth * constants.MEMORY_BANDWIDTH_EFFICIENCY
    saved = block.fused_moved * 16_384 * 2 / rate
    assert (eager.forward - compiled.forward)[at].item() == pytest.approx(saved)
    assert (eager.backward - compiled.backward)[at].item() == pytest.approx(2 * saved)
    again = block.derived_moved / block.moved
    assert (eager.derived - compiled.derived)[at].item() == pytest.approx(again * saved)
    for part in ("forward", "backward", "derived"):  # only blocks are compiled
        kept = np.delete(getattr(eager, part) - getattr(compiled, part), at, axis=0)
        assert not kept.any()


def test_the_host_launches_a_compiled_block_in_less_time_than_an_eager_one() -> None:
    """A device that computes small blocks waits for the host."""
    setting = build_cost_context(named_job("llama-tiny", "1x8:a100-80gb", 64, 128, "bf16"))
    at = next(at for at, entry in enumerate(setting.entries) if entry.is_block)
    eager, compiled = (
        layer_times(setting, TpEpShape(1, 1, 1), 1, is_compiled, np.array([64.0]), np.array([False]))
        for is_compiled in (False, True)
    )
    ratio = (eager.forward / compiled.forward)[at].item()
    assert ratio == pytest.approx(1 / constants.COMPILED_LAUNCH_FRACTION)


def test_plans_of_accelerators_are_searched_compiled_and_those_of_cpus_only_over_tensor_ranks() -> None:
    def compiled_by_tp(job: Job) -> set[tuple[bool, bool]]:
        return {(box.tp > 1, choice.compile) for box in PlanSpace(job).boxes() for choice in box.micro_batches}

    def job(cluster: str, **pins: Any) -> Job:
        return named_job("llama-tiny", cluster, 8, 128, "fp32", pins=pins)

    assert compiled_by_tp(job("1x4:a100-80gb")) == {(False, False), (False, True), (True, False), (True, True)}
    assert compiled_by_tp(job("1x4:cpu")) == {(False, False), (True, False), (True, True)}
    for is_pinned in (False, True):
        assert {each for _, each in compiled_by_tp(job("1x4:cpu", compile=is_pinned))} == {is_pinned}


def test_a_cpu_plan_over_tensor_ranks_is_compiled_if_the_run_is_long_enough() -> None:
    def chosen(steps: int) -> bool:
        job = named_job("llama-tiny", "1x4:cpu", 8, 128, "fp32", pins={"tp": 4})
        return search_plans(job.but(workload=job.workload.but(steps=steps)), 1).chosen.plan.compile

    assert not chosen(200) and chosen(10_000_000)


def test_blocks_of_a_long_run_on_accelerators_are_compiled_and_those_of_a_short_one_are_not() -> None:
    def chosen(steps: int, model: str = "llama-7b") -> bool:
        job = named_job(model, "1x8:a100-80gb", 64, 2048, "bf16")
        return search_plans(job.but(workload=job.workload.but(steps=steps)), 1).chosen.plan.compile

    assert chosen(200) and not chosen(1)


def activations(job: Job, plan: str) -> float:
    return estimate(job, parse_plan(plan)).memory.activations
