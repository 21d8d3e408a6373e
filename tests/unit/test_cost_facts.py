"""Published numbers that the cost model must reproduce."""

from __future__ import annotations

import pytest
from jobs import GIB, cluster, decoder, named_job, small_job

from meshwright.catalog import read as catalog
from meshwright.core.errors import InputError
from meshwright.planner.cost import constants
from meshwright.planner.cost.cost_context import RuntimeModel, UpdateMessages
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.step import estimate, estimate_grid
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import sizes_from_catalog
from meshwright.runtime import weight_gradients
from meshwright.runtime.offload import swap_file, swapper
from meshwright.runtime.shard import optimizer_shard
from meshwright.spec.cluster import ClusterRates
from meshwright.spec.estimate import Estimate, FitStatus
from meshwright.spec.job import Job
from meshwright.spec.model import LayerSpec, ModelSpec, ParameterSpec
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.workload import OptimizerConfig


def of_size(parameters: float, blocks: int = 64) -> ModelSpec:
    """A model that is nothing but parameters, in `blocks` equal layers of a width that all degrees divide."""
    weight = ParameterSpec(name="weight", shape=(round(parameters / blocks / 2**16), 2**16), split=1)
    return ModelSpec(name="size", layers=(LayerSpec(name="block", repeat=blocks, parameters=(weight,)),), hidden=64)


def states(parameters: float, plan: str, precision: str, memory: float = 1e15) -> float:
    """Decimal gigabytes of parameters, gradients in bfloat16 and optimizer on one device."""
    chosen = parse_plan(plan)
    on = cluster(1, chosen.world, memory)
    job = small_job(of_size(parameters), on, batch=chosen.dp * 64, precision=precision, reduce="bf16")
    memory_of = estimate(job, chosen).memory
    return (memory_of.parameters + memory_of.gradients + memory_of.optimizer) / 1e9


@pytest.mark.parametrize(("plan", "gigabytes"), [("dp64", 120), ("dp64.z1", 31.4), ("dp64.z2", 16.6), ("dp64.z3", 1.9)])
def test_zero_stages_hold_what_figure_1_of_the_zero_paper_says(plan: str, gigabytes: float) -> None:
    """7.5 B parameters, mixed precision with Adam, 64 data ranks (Rajbhandari et al., figure 1)."""
    assert states(7.5e9, plan, "bf16") == pytest.approx(gigabytes, abs=0.06)


def test_65b_in_float32_with_adam_is_260_and_260_and_520_gigabytes() -> None:
    memory = estimate(small_job(of_size(65e9), cluster(1, 1), precision="fp32", batch=1), parse_plan("dp1")).memory
    assert [round(value / 1e9) for value in (memory.parameters, memory.gradients, memory.optimizer)] == [260, 260, 520]


def test_7b_in_mixed_precision_is_112_gigabytes_before_the_first_token() -> None:
    assert states(7e9, "dp1", "bf16") == pytest.approx(112, abs=0.1)


def test_200b_as_pp4_tp2_dp8_on_64_devices_needs_400_gb_a_device() -> None:
    assert states(200e9, "dp8.tp2.pp4", "bf16") == pytest.approx(400, abs=0.5)
    job = small_job(of_size(200e9), cluster(8, 8, 80 * GIB), batch=512)
    assert estimate(job, parse_plan("dp8.tp2.pp4")).verdict == FitStatus.no


def test_stochastic_descent_without_momentum_keeps_only_master_weights() -> None:
    job = small_job(of_size(1e9), cluster(1, 1), batch=1, optimizer=OptimizerConfig(name="sgd"))
    memory = estimate(job, parse_plan("dp1")).memory
    assert memory.optimizer == 2 * memory.parameters


def test_tp_saves_10_plus_24_over_t_bytes_and_sp_34_over_t() -> None:
    """Korthikanti et al. (arXiv 2205.05198), table 2, bytes per s b h of a layer without its attention scores."""
    layer = LayerSpec(
        name="block",
        repeat=6,
        parameters=(ParameterSpec(name="w", shape=(8, 8), split=0),),
        saved_split=24 / 2 * 8,
        saved_whole=10 / 2 * 8,
    )
    job = small_job(ModelSpec(name="layer", layers=(layer,), hidden=8), cluster(1, 4), batch=1)
    kept = [estimate(job, parse_plan(name)).memory.activations / (6 * 128 * 8) for name in ("dp1.tp4", "dp1.tp4.sp")]
    assert kept == pytest.approx([10 + 24 / 4, 34 / 4], rel=0.01)


def test_recompute_keeps_one_hidden_state_a_layer_and_one_layer_besides() -> None:
    model = decoder(((12, 256),))
    job = small_job(model, cluster(1, 1), batch=4)
    kept, again = (estimate(job, parse_plan(name)).memory.activations for name in ("dp1.mb4", "dp1.mb4.rc-full"))
    tokens = 4 * 128
    block = model.layers[2]
    one = tokens * (2 * (block.saved_split + block.saved_whole) + block.fixed_split + block.fixed_whole)
    head = tokens * 2 * (model.layers[-1].saved_split + model.layers[-1].saved_whole + model.layers[-2].saved_whole)
    loss = tokens * 2 * model.layers[-1].transient
    assert kept == pytest.approx(12 * one + head + loss)
    assert again == pytest.approx(12 * tokens * 2 * 64 + max(head + loss, one + tokens * 2 * block.transient))


def test_gpipe_keeps_every_micro_batch_and_1f1b_as_many_as_ranks_follow() -> None:
    job = small_job(decoder(((160, 256),), vocabulary=10), cluster(1, 4), batch=16)
    plain, gpipe = (estimate(job, parse_plan(name)) for name in ("dp1.pp4", "dp1.pp4.gpipe"))
    first, second = (memory.activations for memory in plain.per_stage[:2])
    assert first / second == pytest.approx(4 / 3, rel=0.05)
    assert gpipe.per_stage[1].activations / second == pytest.approx(16 / 3, rel=0.05)


def test_time_items_add_up_to_the_step() -> None:
    job = named_job("llama2-70b", "8x8:h100", 512, 4096)
    for name in ("dp8.tp8.sp.z1.rc-full", "dp4.tp4.sp.pp4.z2", "dp4x16.z3.rc-full", "dp8.tp2.pp4.interleaved4"):
        time = estimate(job, parse_plan(name)).time
        assert sum(seconds for kind, seconds in time if kind != "step") == pytest.approx(time.step, rel=1e-12)


def test_memory_items_add_up_and_the_busiest_stage_is_reported() -> None:
    found = estimate(named_job("llama2-70b", "8x8:h100", 512, 4096), parse_plan("dp4.tp4.sp.pp4.z2"))
    memory = found.memory
    assert memory.total == sum(
        (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.buffers)
    )
    assert memory.total == max(stage.total for stage in found.per_stage)
    assert len(found.per_stage) == 4


def test_a_plan_of_another_world_is_refused_with_the_equation() -> None:
    with pytest.raises(InputError, match=r"dp\(4\) \* tp\(3\) \* pp\(2\) = 24 but the cluster has 16 devices"):
        estimate(small_job(on=cluster(2, 8)), parse_plan("dp4.tp3.pp2"))


def test_a_device_without_a_rate_for_the_precision_is_refused() -> None:
    with pytest.raises(InputError, match="v100-32gb has no rate for precision bf16; it has fp32, fp16"):
        estimate(named_job("bert-base", "1x1:v100-32gb", 8, 512, "bf16"), parse_plan("dp1"))


def test_an_even_plan_on_unlike_devices_is_priced_on_the_slowest_and_says_so() -> None:
    mixed = estimate(named_job("gpt2-xl", "1x4:a100-80gb+1x4:v100-32gb", 64, 1024, "fp16"), parse_plan("dp8.z2"))
    alone = estimate(named_job("gpt2-xl", "2x4:v100-32gb", 64, 1024, "fp16"), parse_plan("dp8.z2"))
    assert mixed.time.compute == pytest.approx(alone.time.compute)
    assert "slowest (v100-32gb)" in mixed.notes[0]


def test_ulysses_in_a_node_with_rings_between_beats_ulysses_between_nodes() -> None:
    job = named_job("llama2-7b", "2x8:a100-80gb", 4, 65536, "bf16")
    waits = {
        name: estimate(job, parse_plan(name)).time.context
        for name in ("cp16.z1.rc-full.ulysses", "cp16.z1.rc-full.ulysses8")
    }
    assert 0 < waits["cp16.z1.rc-full.ulysses8"] < waits["cp16.z1.rc-full.ulysses"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("cp8.ulysses8", "smaller than cp"), ("cp8.ulysses3", "smaller than cp"), ("cp8.ulysses1", "smaller than cp")],
)
def test_ranks_that_exchange_heads_are_a_part_of_the_context_ranks(name: str, said: str) -> None:
    assert parse_plan("cp8.ulysses4").name == "cp8.ulysses4" and parse_plan("cp8.ulysses4").ulysses_ranks == 4
    with pytest.raises(InputError, match=said):
        parse_plan(name)


def test_a_capacity_lowers_the_memory_for_uneven_routing_but_not_the_time() -> None:
    job = named_job("mixtral-8x7b", "1x8:h100", 32, 2048, "bf16")
    limited = job.but(workload=job.workload.but(expert_capacity=1.0))
    plan = parse_plan("dp8.ep8.z1.rc-full")
    assert estimate(limited, plan).memory.activations < estimate(job, plan).memory.activations
    assert estimate(limited, plan).time == estimate(job, plan).time


def test_a_dispatch_with_one_copy_per_node_saves_most_across_nodes() -> None:
    plan, ratios = parse_plan("dp16.ep16.z1.rc-full"), []
    for on in ("1x16:h100", "2x8:h100"):
        job = named_job("qwen3-30b-a3b", on, 32, 4096, "bf16")
        several, once = (
            estimate_grid(CostModel(job, RuntimeModel(node_copies=copies)), grid_of_plan(plan, 32, 48)).time.expert
            for copies in (False, True)
        )
        ratios.append(once / several)
    assert ratios[1] < 0.5 < ratios[0]


@pytest.mark.parametrize(
    ("model", "is_gated", "hides"),
    [("deepseek-v3", False, True), ("deepseek-v3", True, True), ("qwen3-30b-a3b", False, False)],
)
def test_a_dispatch_overlaps_with_shared_experts(model: str, is_gated: bool, hides: bool) -> None:
    """Of the two messages of a pass, at most one. A gate marks models that call shared experts first (Qwen2-MoE)."""
    sizes = sizes_from_catalog({**catalog.models()[model], "shared_gate": is_gated})
    job = named_job(model, "4x8:h100", 64, 4096, "bf16").but(model=model_spec(model, sizes))
    plan = parse_plan("dp32.z3.ep4.mb1")
    in_order, beside = (
        estimate_grid(
            CostModel(job, RuntimeModel(dispatch_hidden=hidden)), grid_of_plan(plan, 64, job.model.blocks)
        ).time.expert
        for hidden in (0.0, None)
    )
    assert 0.5 * in_order < beside < in_order if hides else beside == in_order


def test_waits_for_the_routing_add_the_launches_of_forward() -> None:
    job, plan = named_job("qwen3-30b-a3b", "2x8:h100", 32, 4096, "bf16"), parse_plan("dp16.ep16.z1.rc-full")
    ahead, waiting = (
        estimate_grid(CostModel(job, RuntimeModel(routing_waits=waits)), grid_of_plan(plan, 32, 48)).time.step
        for waits in (False, True)
    )
    kernels = 1 + 8 * 2 + 5  # two stacked weights of eight local experts, attention and the router
    launches = kernels * constants.KERNELS_PER_MATRIX * constants.KERNEL_LAUNCH_SECONDS
    # two micro-batches of 48 layers, each with a forward and its recompute
    assert waiting - ahead == pytest.approx(2 * 48 * 2 * launches, rel=0.02)


def driver_of(on: str, plan: str) -> float:
    """GiB outside of the allocator on the peak rank of Llama 2 7B."""
    return estimate(named_job("llama2-7b", on, 64, 512), parse_plan(plan)).memory.driver / GIB


def test_communicators_of_nccl_are_added_to_the_context_of_nvidia_devices() -> None:
    """With the sizes of NCCL's source: 12 MiB for each of 24 channels, 256 MiB for messages, 256 MiB for sums in the
    switch among 8 devices of an H100 node."""
    assert driver_of("1x1:h100", "dp1.rc-full.off-optimizer") == 1.0 == driver_of("1x8:mi300x", "dp8.z3")
    assert driver_of("1x8:h100", "dp8.z3") == 1 + (256 + 24 * 12 + 256) / 1024
    assert driver_of("1x8:a100-80gb", "tp8.sp") == 1 + (256 + 24 * 12) / 1024
    messages = 256 + 24 * 12 + 32 * 12  # of pp2: one peer on 32 channels
    assert driver_of("1x8:a100-80gb", "dp2.tp2.sp.pp2") == 1 + (3 * (256 + 24 * 12) + messages) / 1024


def test_a_measured_rate_of_a_link_changes_no_communicator() -> None:
    job = named_job("llama2-7b", "1x8:h100", 64, 2048, "bf16")
    slow = job.but(cluster=job.cluster.with_rates(ClusterRates(link=50e9)))
    nominal, measured = (estimate(each, parse_plan("dp8.z3")) for each in (job, slow))
    assert nominal.memory.driver == measured.memory.driver and nominal.time.step < measured.time.step


def of_runtime(on: str, plan: Plan, batch: int, practice: RuntimeModel) -> Estimate:
    """The estimate of Llama 2 7B in bf16, with gradients in bf16, under another runtime."""
    job = named_job("llama2-7b", on, batch, 2048, "bf16", reduce="bf16")
    return estimate_grid(CostModel(job, practice), grid_of_plan(plan, batch, 32))


def test_gradients_that_backward_creates_are_not_beside_all_activations() -> None:
    plan = parse_plan("dp1.mb4")
    kept, fleeting = (
        [of_runtime("1x1:h200", plan, batch, RuntimeModel(fleeting=lazy)).memory.total for batch in (4, 8)]
        for lazy in (False, True)
    )
    head = 32000 * 4096
    assert kept[0] - fleeting[0] == pytest.approx((6_738_415_616 - head) * 2, rel=1e-3)
    assert kept[1] == fleeting[1]


def test_a_pipeline_that_communicates_once_per_step_stores_full_weights_and_gradients() -> None:
    plan = parse_plan("dp8.pp2.z3")
    sharded, once = (
        of_runtime("2x8:h100", plan, 128, RuntimeModel(reduced=4, once_per_step=once)) for once in (False, True)
    )
    shard = sharded.memory.parameters
    assert once.memory.parameters == pytest.approx(9 * shard)
    assert once.memory.gradients == pytest.approx(shard + 2 * 8 * shard)
    assert once.time.data < sharded.time.data / 4


def test_an_all_reduce_over_replicas_may_overlap_with_backward() -> None:
    plan = Plan(dp_replicate=4, dp_shard=8, zero=1, micro_batch=4)
    after, beside = (
        of_runtime("4x8:h100@1x400Gb", plan, 128, RuntimeModel(replicas_hidden=hidden)).time.data
        for hidden in (False, True)
    )
    assert beside < 0.6 * after


def test_zero_1_in_one_message_saves_the_hops_of_each_layer_and_owners_add_hops() -> None:
    by_layer, whole, owners = (
        {
            plan: of_runtime("64x8:h100", parse_plan(plan), 512, RuntimeModel(reduce_hidden=False, messages=each))
            for plan in ("dp64.tp8.z1", "dp512.z1")
        }
        for each in UpdateMessages
    )
    copies = (32 * 9 + 2 * 9) * 64 * constants.SLICE_COPY_SECONDS  # of nine weights a layer, for each rank
    # Although one message for all weights also means an all-reduce of gradients, which takes half as much again.
    assert whole["dp64.tp8.z1"].time.data - copies < 0.55 * by_layer["dp64.tp8.z1"].time.data
    assert owners["dp512.z1"].time.data > 2 * by_layer["dp512.z1"].time.data


@pytest.mark.parametrize("messages", [UpdateMessages.owners, UpdateMessages.whole])
def test_zero_1_with_owners_or_one_message_all_reduces_gradients(messages: UpdateMessages) -> None:
    scattered, summed = (
        of_runtime("16x1:h100@1x100Gb", parse_plan("dp16.z1"), 16, RuntimeModel(reduce_hidden=False, messages=each))
        for each in (UpdateMessages.layers, messages)
    )
    assert summed.time.data == pytest.approx(1.5 * scattered.time.data, rel=0.05)


@pytest.mark.parametrize(("plan", "hidden_calls", "calls"), [("tp2.mb4", 2, 4), ("tp2.sp.mb4", 4, 10)])
def test_the_reduction_of_input_gradients_may_overlap_with_weight_gradients(
    plan: str, hidden_calls: int, calls: int
) -> None:
    """Of all collectives of a block, `hidden_calls` take only the slowdown of 13 % of their time."""
    in_order, overlapped = (
        of_runtime("1x2:h100", parse_plan(plan), 4, RuntimeModel(dgrad_hidden=hidden)).time.tensor
        for hidden in (False, True)
    )
    assert overlapped / in_order == pytest.approx(1 - 0.87 * hidden_calls / calls, abs=0.02)


def fast_job(rate: float) -> Job:
    """Llama 2 7B on two H100 whose products are `rate` times as fast as they are."""
    job = named_job("llama2-7b", "1x2:h100", 8, 4096, "bf16")
    device = job.cluster.groups[0].device
    fast = device.but(peak={name: rate * flops for name, flops in device.peak.items()})
    return job.but(cluster=job.cluster.but(groups=(job.cluster.groups[0].but(device=fast),)))


@pytest.mark.parametrize(
    ("plan", "rate", "forward", "backward"),
    [
        ("tp2.mb4", 0.01, 0.38, 0.18),
        ("tp2.sp.mb4", 0.01, 0.28, 0.16),
        ("tp2.mb4", 1e3, 1.38, 1.38),
        ("tp2.sp.mb4", 1e3, 1.38, 1.25),
    ],
)
def test_tensor_collectives_overlap_with_products_that_are_long_enough(
    plan: str, rate: float, forward: float, backward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of 4 chunks takes 1.38 times as long as one of 128 MiB. Behind long products, 13 % of it are exposed,
    and of a row layer in forward also the last chunk, which is 1/6. Behind short products all is exposed. Backward
    gathers the input of a region in one chunk. The additional products of chunks have a price of their own."""
    monkeypatch.setattr(constants, "MATMUL_RAMP_SECONDS", 0.0)
    job, grid = fast_job(rate), grid_of_plan(parse_plan(plan), 8, 32)
    one, several = (CostModel(job, RuntimeModel(tensor_chunks=chunks)).work(grid) for chunks in (1, 4))
    index = max(range(len(one.forward)), key=lambda at: one.forward[at].sum())
    found = [
        float(getattr(several, name)[index].sum() / getattr(one, name)[index].sum())
        for name in ("tensor_forward", "tensor_backward")
    ]
    assert found == pytest.approx([forward, backward], abs=0.01)


def test_each_additional_product_of_chunks_loses_its_start_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward of two regions in four chunks: three products more for each row layer."""
    job, grid, found = fast_job(1.0), grid_of_plan(parse_plan("tp2.mb4"), 8, 32), []
    for seconds in (3e-6, 0.0):
        monkeypatch.setattr(constants, "MATMUL_RAMP_SECONDS", seconds)
        found.append(CostModel(job, RuntimeModel(tensor_chunks=4)).work(grid).tensor_forward.max())
    assert found[0] - found[1] == pytest.approx(2 * 3 * 3e-6)


def test_frozen_weights_have_no_gradients_that_hide_sums_of_input_gradients() -> None:
    job = fast_job(10.0)
    layers = job.model.layers
    frozen = tuple(
        layer.but(parameters=tuple(each.but(frozen=True) for each in layer.parameters))
        if layer.name == "block"
        else layer
        for layer in layers
    )
    grid = grid_of_plan(parse_plan("tp2.mb4"), 8, 32)
    one, other = (
        CostModel(job.but(model=job.model.but(layers=some)), RuntimeModel(tensor_chunks=4)).work(grid).tensor_backward
        for some in (layers, frozen)
    )
    assert other.sum() > 1.1 * one.sum()


@pytest.mark.parametrize(("on", "cuts"), [("1x2:cpu", False), ("2x1:cpu@1Gb", True), ("2x2:cpu@1Gb", False)])
def test_cpu_ranks_that_share_memory_have_one_chunk(on: str, cuts: bool) -> None:
    job = named_job("llama-tiny", on, 32, 256, "fp32")
    plan = parse_plan("tp2.mb32" if job.cluster.devices == 2 else "dp2.tp2.mb16")
    one, several = (
        estimate_grid(CostModel(job, RuntimeModel(tensor_chunks=chunks)), grid_of_plan(plan, 32, 4)).time.tensor
        for chunks in (1, 4)
    )
    assert (several != one) == cuts


def compute_of_gpt2(**sizes: int) -> float:
    """The seconds of compute of a step of GPT-2 124M with other sizes."""
    changed = sizes_from_catalog({**catalog.models()["gpt2-small"], **sizes})
    job = named_job("gpt2-small", "1x1:a100-80gb", 16, 1024, "bf16").but(model=model_spec("gpt2-small", changed))
    return estimate(job, parse_plan("dp1.mb16")).time.compute


def test_a_vocabulary_that_is_not_aligned_costs_a_quarter_of_a_small_step() -> None:
    assert compute_of_gpt2(vocab=50257) / compute_of_gpt2(vocab=50304) == pytest.approx(1.25, abs=0.02)
    assert compute_of_gpt2(vocab=50256) <= compute_of_gpt2(vocab=50304)


def test_attention_pads_heads_and_products_pad_the_inner_dimension() -> None:
    wide, padded = (compute_of_gpt2(hidden=960, heads=heads, kv_heads=heads, ffn=3840) for heads in (10, 12))
    assert padded > wide
    aligned, uneven = (compute_of_gpt2(ffn=ffn) for ffn in (3136, 3080))
    assert uneven == pytest.approx(aligned, rel=0.01)


def test_tp_above_the_kv_heads_replicates_keys_and_values() -> None:
    job = named_job("llama2-70b", "4x8:h100", 64, 4096, reduce="bf16")
    at_8, at_16 = (estimate(job, parse_plan(plan)) for plan in ("dp4.tp8", "dp2.tp16"))
    whole = 80 * 2 * 8192 * 1024 * 2
    assert at_16.memory.parameters == pytest.approx((at_8.memory.parameters - whole / 8) / 2 + whole, rel=1e-3)
    apart = job.but(model=job.model.but(layers=tuple(_apart(layer) for layer in job.model.layers)))
    assert estimate(apart, parse_plan("dp4.tp8")) == at_8
    without = estimate(apart, parse_plan("dp2.tp16"))
    assert (
        without.memory.activations < at_16.memory.activations
        and without.time.step < at_16.time.step < 1.01 * without.time.step
    )


def _apart(layer: LayerSpec) -> LayerSpec:
    """As if keys and values could be cut into any number of shares."""
    return layer.but(parameters=tuple(parameter.but(ways=()) for parameter in layer.parameters))


def test_what_is_priced_of_the_runtime_is_what_the_runtime_has() -> None:
    """The planner imports nothing of it: each number stands twice."""
    priced = (
        constants.CHUNK_ELEMENTS,
        constants.SWAP_BUFFERS,
        constants.BOUNCE_BUFFER_BYTES,
        constants.MIN_IN_PLACE_ELEMENTS,
    )
    assert priced == (
        optimizer_shard.CHUNK_ELEMENTS,
        swapper.SWAP_BUFFERS,
        swap_file.IO_THREADS * swap_file.BOUNCE_BUFFER_BYTES,
        weight_gradients.MIN_IN_PLACE_ELEMENTS,
    )
