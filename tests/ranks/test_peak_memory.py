"""The most that a rank allocates in a step is what the estimate says, on ranks that really run: within 5 %, for every
plan of the main job."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import read_once

from meshwright.models.registry import build_reference_model
from meshwright.runtime.host_process import malloc_trim
from meshwright.runtime.shard.optimizer_shard import CHUNK_ELEMENTS
from meshwright.train.memory import trace_memory
from meshwright.train.trainer import parallelize

SMALL = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 352, "vocab": 1024, "seq": 128}
LEARNED = {"mlp": "gelu", "norm": "ln", "linear_bias": True, "pos": "learned", "tied_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {"llama": {"kind": "llama", **SMALL}, "gpt2": {"kind": "gpt2", **SMALL, **LEARNED}}
OTHERS = {"hf-llama": MODELS["llama"], "hf-gpt2": {**MODELS["gpt2"], "ffn": 512, "mlp": "gelu_new"}}
"""Of transformers, whose GPT-2 writes its gelu out."""
BATCH = 16
CONTEXT = ("cp2.mb16", "cp2.mb8.rc-sac", "cp2.rc-full", "cp2.mb16.ulysses", "cp2.mb16.rc-full.ulysses", "cp4.mb4")
PLANS = (
    "dp2",
    "dp2.z1",
    "dp2.mb4.z2",
    "dp4.z3",
    "tp2.mb4",
    "tp2.sp.mb2",
    "pp2",
    "pp4.mb2",
    "pp2.gpipe",
    "pp2.interleaved2",
    "pp2.mb4.interleaved2",
    "dp2.tp2.z3.rc-full",
    *(KEEPING := ("pp2.mb4.zbh1", "pp2.mb8.zbh1", "pp4.mb4.zbh1", "pp4.mb8.zbh1")),
    "pp2.mb4.zbh1.rc-full",
    "pp2.mb4.zbh1.rc-sac",
    "pp2.mb4.zbh1.rc-full1+sac",
    "pp2.mb2.zbv.rc-sac",
    "dp2.pp2.z2",
    "dp2.cp2.z3.mb4",
    *CONTEXT,
    "dp2.z1.off-optimizer-disk",
    "dp2.z1.off-optimizer-disk50",
    "pp2.mb2.off-optimizer-disk",
    "dp2.z3.off-optimizer-disk",
    "dp2.z3.off-parameters-disk",
    "dp2.z3.off-parameters-disk50",
    "dp2.z3.off-optimizer-disk.off-parameters-disk",
    "dp2.z3.off-optimizer-disk60.off-parameters-disk50",
    "dp2.z3.off-optimizer-disk30.off-parameters-disk70",
    "dp1.z3.off-optimizer-disk60.off-parameters-disk50",
    "pp2.z3.mb2.off-optimizer-disk60.off-parameters-disk50",
    "tp2.z3.off-optimizer-disk40.off-parameters-disk70",
)


OF_GPT2 = (
    "dp2.z1",
    "pp2",
    "pp2.interleaved2",
    "pp2.mb4.interleaved2",
    *KEEPING,
    "pp2.mb4.zbh1.rc-full",
    "pp2.mb4.zbh1.rc-sac1",
    *CONTEXT,
    "dp2.z3.off-parameters-disk",
    "dp2.z3.off-optimizer-disk.off-parameters-disk",
)
"""A tied vocabulary, learned positions, norms with biases."""

OF_IMAGES = ("dp2", "dp2.mb4", "tp2", "tp2.mb4", "dp2.z3", "dp2.z3.mb4")
"""Of a convolutional network. Of one small image, torch unfolds the maps."""

TIED = tuple(f"dp2{size}.z{zero}" for zero in (2, 3) for size in ("", ".mb2", ".mb4", ".mb8"))
"""Of it all numbers of micro-batches where gradients are reduced in units of unlike lengths: 8, 4, 2 and 1."""


def made(model: str) -> torch.nn.Module:
    if model in MODELS:
        return build_reference_model(MODELS[model])
    import transformers

    sizes = {"vocab_size": SMALL["vocab"], "use_cache": False}
    if model == "hf-gpt2":
        shape = {
            "n_embd": SMALL["hidden"],
            "n_layer": SMALL["layers"],
            "n_head": SMALL["heads"],
            "n_positions": SMALL["seq"],
        }
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**shape, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        )
    shape = {
        "hidden_size": SMALL["hidden"],
        "num_hidden_layers": SMALL["layers"],
        "num_attention_heads": SMALL["heads"],
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=SMALL["ffn"], **sizes))


def most_and_buffer(model: str, plan: str, precision: str) -> tuple[float, int]:
    """Of the second step, on every rank: what is held after it, and what came and went above that. And the bytes of the
    largest buffer of whole
    gradients at ZeRO 2 and 3: ranks that keep in step need one less of them than ranks that do not."""
    torch.manual_seed(0)
    trainer = parallelize(
        made(model),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        plan,
        precision=precision,
        anatomy=read_once(f"peak of {model}", functools.partial(made, model)),
    )
    ids = torch.randint(SMALL["vocab"], (BATCH, SMALL["seq"]), generator=torch.Generator().manual_seed(1))
    trainer.step({"input_ids": ids, "labels": ids})  # the third takes what the second does
    with trace_memory() as watch:
        trainer.step({"input_ids": ids, "labels": ids})
    trainer.close()
    held = sum(size for kind, size in trainer.bytes().items() if kind != "offloaded")
    buffer = max(unit.layout.numel * 4 for unit in trainer.engine.zero.units) if trainer.plan.zero >= 2 else 0
    return held + trainer.passing + watch.peak - watch.remaining, buffer


def most(model: str, plan: str, precision: str) -> float:
    return most_and_buffer(model, plan, precision)[0]


def expected(model: str, plan: str, precision: str) -> float:
    from meshwright.planner.cost.step import estimate
    from meshwright.planner.inputs.architecture import model_spec
    from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
    from meshwright.planner.inputs.cluster_parser import read_cluster
    from meshwright.spec.job import Job
    from meshwright.spec.plan import parse_plan
    from meshwright.spec.workload import Workload

    chosen = parse_plan(plan)
    workload = Workload(batch=BATCH, sequence=SMALL["seq"], precision=precision)
    job = Job(
        model=model_spec(model, ArchitectureSizes(**{**MODELS, **OTHERS}[model])),
        cluster=read_cluster(f"1x{chosen.world}:cpu"),
        workload=workload,
    )
    return estimate(job, chosen).memory.total


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *(("llama", plan) for plan in PLANS),
        *(("gpt2", plan) for plan in OF_GPT2),
        *((model, plan) for model in OTHERS for plan in KEEPING),
    ],
)
@pytest.mark.covering(3)
def test_the_fullest_rank_allocates_what_the_estimate_says(ranks: Any, model: str, plan: str) -> None:
    from meshwright.spec.plan import parse_plan

    world = parse_plan(plan).world
    measured, buffer = map(max, zip(*ranks.run(world, most_and_buffer, model, plan, "fp32"), strict=True))
    assert 0.95 * measured <= expected(model, plan, "fp32") <= 1.05 * (measured + buffer)


def most_of_images(plan: str) -> float:
    """Of the fourth step: checks run passes of their own in the first three."""
    torch.manual_seed(0)
    sizes = {"kind": "convnet", "layers": 4, "hidden": 32, "classes": 10}
    trainer = parallelize(build_reference_model(sizes), functools.partial(torch.optim.AdamW, fused=True), plan)
    random = torch.Generator().manual_seed(1)
    images, labels = torch.randn(BATCH, 3, 32, 32, generator=random), torch.randint(10, (BATCH,), generator=random)
    for _ in range(3):
        trainer.step({"images": images, "labels": labels})
    with trace_memory() as watch:
        trainer.step({"images": images, "labels": labels})
    trainer.close()
    held = sum(size for kind, size in trainer.bytes().items() if kind != "offloaded")
    return float(held + trainer.passing + watch.peak - watch.remaining)


@pytest.mark.parametrize("plan", OF_IMAGES)
def test_ranks_of_a_convolutional_network_allocate_what_the_estimate_says(ranks: Any, plan: str) -> None:
    from meshwright.planner.cost.step import estimate
    from meshwright.planner.inputs.cluster_parser import read_cluster
    from meshwright.planner.inputs.model_parser import read_model
    from meshwright.spec.job import Job
    from meshwright.spec.plan import parse_plan
    from meshwright.spec.workload import Workload

    workload = Workload(batch=BATCH, sequence=1, precision="fp32")
    job = Job(model=read_model("convnet-tiny"), cluster=read_cluster("1x2:cpu"), workload=workload)
    measured = max(ranks.run(2, most_of_images, plan))
    assert measured == pytest.approx(estimate(job, parse_plan(plan)).memory.total, rel=0.08)


@pytest.mark.parametrize("plan", TIED)
@pytest.mark.covering(1)
def test_where_gradients_wait_for_other_ranks_takes_the_same_memory_whoever_is_late(ranks: Any, plan: str) -> None:
    """So there needs no room for ranks that are out of step: the estimate is met on both sides."""
    assert max(ranks.run(2, most, "gpt2", plan, "fp32")) == pytest.approx(expected("gpt2", plan, "fp32"), rel=0.05)


def grown() -> tuple[int, int]:
    """Bytes by which a rank's resident memory grows at most from its model to the end of its first step, and what it
    holds then."""
    ids = torch.arange(16).view(1, 16)
    parallelize(build_reference_model({**MODELS["llama"], "layers": 1}), torch.optim.AdamW, "dp1").step(
        {"input_ids": ids, "labels": ids}
    )  # what is imported late
    gc.collect()
    malloc_trim()  # what tests before this one left over in the heap would be taken first
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = most_resident()
    trainer = parallelize(
        build_reference_model({**MODELS["llama"], "hidden": 512, "ffn": 1376}), torch.optim.AdamW, "dp1"
    )
    trainer.step({"input_ids": ids, "labels": ids})
    return most_resident() - before, sum(trainer.bytes().values())


def most_resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of resident memory is read from /proc")
def test_the_first_update_does_not_hold_all_states_twice() -> None:
    """In a new process. A fork of this one has free pages in its heap, and pages that the system may take back
    meanwhile: both hide a part of the growth."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        most, held = process.apply(grown)
    assert held < most < 1.35 * held


def made_apart(precision: str) -> tuple[int, int]:
    """Elements whose states lie by themselves, at most, when the optimizer returns in the first update; and all."""
    ids, found = torch.arange(16).view(1, 16), []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        averages = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
        found.append(sum(each.numel() for each in averages if each.untyped_storage().nbytes() == each.nbytes))

    def watched(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        optimizer.register_step_post_hook(look)
        return optimizer

    trainer = parallelize(
        build_reference_model({**MODELS["llama"], "hidden": 512, "ffn": 1376}), watched, "dp1", precision=precision
    )
    found.clear()  # of the trial
    trainer.step({"input_ids": ids, "labels": ids})
    return max(found), sum(run.numel() for run in trainer.optimizer.state)


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_states_are_laid_together_a_few_runs_at_a_time(ranks: Any, precision: str) -> None:
    apart, elements = ranks.run(1, made_apart, precision)[0]
    assert 0 < apart <= CHUNK_ELEMENTS < elements / 8


if __name__ == "__main__":
    from pool import Pool

    from meshwright.spec.plan import parse_plan

    pool = Pool()
    model, *plans = sys.argv[1:]
    for plan in plans or PLANS:
        found = [sorted(pool.run(parse_plan(plan).world, most, model, plan, "fp32"))[-1] for _ in range(2)]
        said = expected(model, plan, "fp32")
        print(
            f"{plan:30}", *(f"{each / 2**20:8.3f}" for each in found), f"{said / 2**20:8.3f}", f"{said / found[0]:.3f}"
        )
