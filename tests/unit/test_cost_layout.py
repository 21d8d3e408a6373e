"""Parameter, gradient and optimizer bytes of the estimate are those of the flat layout that the runtime builds, on
every pipeline rank."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import cluster, decoder, small_job

from meshwright.planner.cost.step import estimate
from meshwright.spec.job import Job
from meshwright.spec.layout import LayerParams, ParamSlot, bucket_layouts
from meshwright.spec.plan import Plan
from meshwright.spec.precision import RECIPES


def expected(job: Job, plan: Plan) -> list[tuple[float, float, float]]:
    """Bytes of parameters, gradients and optimizer of each pipeline rank, straight from the layout, layer by layer."""
    recipe, states = RECIPES[job.workload.precision], job.workload.optimizer.states
    model, last = job.model, plan.stages - 1
    tied = any(layer.tied for layer in model.layers)
    stages: list[list[LayerParams]] = [[] for _ in range(plan.stages)]

    def slots(name: str, parameters, alone: bool) -> LayerParams:
        return LayerParams(
            name,
            tuple(ParamSlot(f"{name}.{it.name}", it.local_numel(plan.tp), it.split is not None) for it in parameters),
            alone,
        )

    bounds = [sum(plan.stage_layers(model.blocks)[: stage + 1]) for stage in range(plan.stages)]
    block = 0
    for layer in model.layers:
        for _ in range(layer.repeat):
            if layer.name == "block":
                stage = next(stage for stage, bound in enumerate(bounds) if block < bound)
                block += 1
            else:
                stage = last if layer.name in ("back", "head") else 0
            own = layer.parameters[1:] if layer.tied else layer.parameters
            stages[stage].append(slots(f"{layer.name}.{block}", own, tied and layer.name == "embedding"))
    if tied and last:
        stages[last].append(slots("copy", model.layers[0].parameters, True))
    result = []
    for rank in range(plan.pp):
        held = [
            unit
            for stage in range(rank, plan.stages, plan.pp)
            for unit in bucket_layouts(stages[stage], plan.zero, plan.dp_shard, plan.bucket, recipe.size)
        ]
        whole = sum(unit.numel for unit in held)
        shard = whole // plan.dp_shard
        result.append(
            (
                (shard if plan.zero == 3 else whole) * recipe.size,
                (shard if plan.zero >= 2 else whole) * recipe.gradient_size,
                (shard if plan.zero >= 1 else whole) * (recipe.master + states * recipe.state_size),
            )
        )
    return result


@st.composite
def cases(draw) -> tuple[Job, Plan]:
    heads = draw(st.sampled_from([2, 4, 6]))
    runs = tuple((draw(st.integers(1, 6)), heads * draw(st.integers(5, 40))) for _ in range(draw(st.integers(1, 2))))
    model = decoder(
        runs,
        hidden=heads * draw(st.integers(3, 12)),
        heads=heads,
        vocabulary=draw(st.integers(50, 900)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    blocks = model.blocks
    tp = draw(st.sampled_from([size for size in (1, 2, 3) if heads % size == 0]))
    pp = draw(st.integers(1, min(4, blocks)))
    virtual = draw(st.integers(1, blocks // pp)) if pp > 1 else 1
    zero = draw(st.integers(0, 3))
    shard = draw(st.integers(1, 5)) if zero else 1
    plan = Plan(
        dp_replicate=draw(st.integers(1, 2)),
        dp_shard=shard,
        tp=tp,
        pp=pp,
        zero=zero,
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        bucket=draw(st.sampled_from([1, 3_000, 40_000, 300_000, 25 * 2**20])),
    )
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16", "fp64"]))
    return small_job(model, cluster(1, plan.world), batch=plan.dp * pp, precision=precision), plan


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_pipeline_rank_holds_the_bytes_of_the_flat_layout(case: tuple[Job, Plan]) -> None:
    job, plan = case
    got = [(memory.parameters, memory.gradients, memory.optimizer) for memory in estimate(job, plan).per_stage]
    assert got == expected(job, plan)
