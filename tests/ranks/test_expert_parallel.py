"""Mixtures of experts: under every plan the loss is the loss of one device, whoever holds the experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import (
    ROWS,
    adapted,
    alone,
    anatomy_of,
    check,
    difference,
    loss_of,
    made,
    make_batch,
    make_model,
    make_optimizer,
    train,
)
from moe_models import MIXTURES
from sweep import covering
from test_cost_model_states import held

from meshwright.core.errors import InputError
from meshwright.models.moe import MoeExperts
from meshwright.models.registry import build_reference_model
from meshwright.spec.constraints import unsupported_parts, world_size_violations
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.workload import LoraConfig
from meshwright.train.trainer import parallelize

SAMPLE = [
    ("mixture", "dp2.ep2.z1"), ("mixture", "dp2.ep2.z2.rc-full"), ("mixture", "tp2"), ("mixture", "tp2.sp.ep2.mb2"),
    ("mixture", "cp2.ep2"), ("mixture", "dp2.tp2.ep4.z3.mb2"), ("mixture", "tp4.ep2.mb4"),
    ("mixture", "dp2.pp2.ep2.z3"), ("mixtral", "dp2.ep2.z2"), ("qwen3-moe", "tp2.sp.ep2.mb2"),
    ("llama4", "dp2.tp2.ep4.z3.mb2"), ("llama4", "tp2.mb2"), ("qwen2-moe", "tp2.ep2.mb2"), ("gpt-oss", "tp2.mb2"),
    ("dbrx", "tp2.ep2.mb2"), ("deepseek-v3", "dp2.ep2.z3"), ("mixture", "dp2.tp2.ep4.z1.mb2.order-tp-dp-pp"),
]  # fmt: skip
"""Each strategy with experts, and families of each form, under some of them."""

WIDER = [
    ("mixture", "dp2"), ("mixture", "dp4.ep2.z1"), ("mixture", "dp2x2.ep2.z2.mb2"), ("mixture", "tp2.sp.mb2"),
    ("mixture", "dp2.tp2.ep2.z1"), ("mixture", "dp2.tp2.pp2.ep2.z3.mb2"), ("mixture", "dp2.cp2.ep4.z1"),
    ("mixture", "pp2.dp2.ep2.z1.zbh1"), ("mixture", "dp2.ep2.z1.off-activations"), ("mixture", "dp2.ep2.z1.rc-attn"),
    ("mixtral", "tp2.mb2"), ("gpt-oss", "tp4.ep2.mb2"), ("olmoe", "tp2.ep2"), ("granite-moe", "dp2.ep2.z3"),
    ("deepseek-v3", "tp2.ep2"), ("deepseek-v3", "pp3"), ("glm4-moe", "dp2.tp2.ep4.z1"),
]  # fmt: skip

SOAKED = [*((model, plan, "fp64") for model, plan in WIDER), *((model, plan, "fp32") for model, plan in SAMPLE)]


@pytest.mark.parametrize(("model", "plan"), SAMPLE)
@pytest.mark.covering(1)
def test_a_mixture_computes_what_one_device_computes_in_float64(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")


@pytest.mark.soak
@pytest.mark.parametrize(("model", "plan", "precision"), SOAKED)
def test_a_mixture_computes_what_one_device_computes_under_more_plans(
    ranks: Any, model: str, plan: str, precision: str
) -> None:
    check(alone(model, precision, 2), ranks.run(parse_plan(plan).world, train, model, plan, precision, 2), precision)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp2.mb4", "dp2.ep2.z1.mb2"),
        pytest.param("dp2.tp2.ep4.z3", "tp2", marks=pytest.mark.soak),
        pytest.param("dp4.ep2.z2", "pp2", marks=pytest.mark.soak),
        pytest.param("dp2.tp2.ep4.z3.order-tp-dp-pp", "tp2", marks=pytest.mark.soak),
    ],
)
def test_an_moe_model_resumes_from_a_checkpoint_of_another_layout(
    ranks: Any, tmp_path: Path, first: str, second: str
) -> None:
    straight = alone("gpt-oss", "fp64", steps=3)["losses"]
    ranks.run(parse_plan(first).world, begin, first, str(tmp_path))
    for losses in ranks.run(parse_plan(second).world, go_on, second, str(tmp_path)):
        assert losses == pytest.approx(straight[2:], rel=1e-10)


def make_trainer(plan: str, precision: str = "fp64", model: str = "gpt-oss") -> Any:
    return parallelize(
        made(model, precision), make_optimizer, plan, precision=precision, clip=1.0, anatomy=anatomy_of(model)
    )


def begin(plan: str, folder: str) -> None:
    """On every rank: two steps, saved."""
    trainer = make_trainer(plan)
    for step in range(2):
        trainer.step(make_batch("gpt-oss", step))
    trainer.save(folder)


def go_on(plan: str, folder: str) -> list[float]:
    """On every rank: the step behind those that were saved."""
    trainer = make_trainer(plan)
    trainer.load(Path(folder) / "step-00000002")
    return [trainer.step(make_batch("gpt-oss", 2)).loss]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("dp2.tp2.ep2.z3", "fp32"),
        pytest.param("dp2.ep2.z1", "bf16", marks=pytest.mark.soak),
        pytest.param("tp4.ep2", "fp32", marks=pytest.mark.soak),
    ],
)
def test_ranks_store_the_estimated_bytes_with_experts_on_data_and_tensor_ranks(
    ranks: Any, name: str, precision: str
) -> None:
    from meshwright.planner.cost.step import estimate
    from meshwright.planner.inputs.architecture import model_spec
    from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
    from meshwright.planner.inputs.cluster_parser import read_cluster
    from meshwright.spec.job import Job
    from meshwright.spec.workload import Workload

    sizes = {
        "kind": "decoder",
        "layers": 4,
        "hidden": 48,
        "heads": 4,
        "ffn": 20,
        "vocab": 101,
        "seq": 16,
        "experts": 6,
        "top_k": 2,
        "moe_ffn": 20,
    }
    plan = parse_plan(name).but(bucket=30_000)
    workload = Workload(batch=4, sequence=16, precision=precision)
    job = Job(
        model=model_spec("mixture", ArchitectureSizes(**sizes)),
        cluster=read_cluster(f"1x{plan.world}:cpu"),
        workload=workload,
    )
    memory = estimate(job, plan).per_stage[0]
    for rank, found in enumerate(ranks.run(plan.world, held, sizes, name, precision, 30_000)):
        if rank % plan.tp == 0:  # the vocabulary does not divide: the other tensor ranks hold some rows less
            assert found == {kind: getattr(memory, kind) for kind in found}


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        ("mixture", "dp3.ep3.z1", "ep(3) does not divide experts(8)"),
        ("llama", "dp2.ep2.z1", "ep(2) needs routed experts"),
        ("mixture", "dp2.cp3.ep5.z1", "ep(5) does not divide dp_shard(2) * cp(3) * tp(1) = 6"),
    ],
)
def test_experts_that_cannot_be_dealt_are_refused_in_one_line(ranks: Any, model: str, plan: str, message: str) -> None:
    for said in ranks.run(parse_plan(plan).world, refusal, plan, model):
        assert message in said and "\n" not in said


def refusal(plan: str, model: str) -> str:
    """On every rank: what making the trainer says."""
    with pytest.raises(InputError) as caught:
        make_trainer(plan, model=model)
    return str(caught.value)


@pytest.mark.parametrize("plan", ["dp2.tp2.ep2.z1.mb2", pytest.param("pp2", marks=pytest.mark.soak)])
def test_the_record_says_how_much_busier_the_busiest_expert_is_whatever_the_plan(ranks: Any, plan: str) -> None:
    model, batch = make_model("mixture").double(), make_batch("mixture", 0)
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "MoeExperts":
            module.register_forward_pre_hook(
                lambda module, args: chosen.append(torch.bincount(args[1].flatten(), minlength=8))
            )
    model(batch["input_ids"])
    expected_load = max(float(counts.max() * 8 / counts.sum()) for counts in chosen)
    assert set(ranks.run(parse_plan(plan).world, load_of, plan)) == {round(expected_load, 3)}  # as records round it


def load_of(plan: str) -> float:
    """On every rank: the load in the first record."""
    load = make_trainer(plan, model="mixture").step(make_batch("mixture", 0)).expert_load
    assert load is not None
    return float(load)


REFUSED = (
    "is not sharded",
    "reads batch and sequence as one",
    "does not call scaled_dot_product_attention",
    "how to shard these experts is not known",
)
"""What refusals of these plans may say."""


def product() -> Iterator[tuple[tuple[str, ...], tuple[str, str]]]:
    """(choices, pair): every plan of 2, 4, 6 and 8 ranks with experts dealt, on every mixture."""
    degrees = itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2, 3, 4, 8), (1, 2))
    for (tp, pp, cp, dp, replicate), zero, ep, parallel in itertools.product(
        degrees, range(4), (2, 4, 8), (False, True)
    ):
        groups = {"dp_replicate": dp} if zero == 0 else {"dp_replicate": replicate, "dp_shard": dp // replicate}
        if (
            tp * pp * cp * dp not in (2, 4, 6, 8)
            or dp % replicate
            or ROWS % dp
            or (replicate > 1 and not (zero and dp > replicate))
        ):
            continue
        try:
            plan = Plan(**groups, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, sequence_parallel=parallel)
        except (InputError, ValueError):
            continue
        if not unsupported_parts(plan) and not any(world_size_violations(plan, plan.world)):
            choices = [f"world {plan.world}", f"tp{tp}{'.sp' * parallel}", *map(str, (pp, cp, dp, replicate, zero, ep))]
            yield from (((model, *choices), (model, plan.name)) for model in MIXTURES)


@pytest.mark.soak
def test_every_two_choices_with_experts_compute_what_one_device_computes(ranks: Any, sweep: Any) -> None:
    """MESHWRIGHT_SOAK='whole 2/80' runs its part of all of them."""

    def judge(model: str, plan: str) -> tuple[float, float] | str:
        try:
            return check(
                alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64"
            )
        except AssertionError as error:
            said = str(error).strip().splitlines()[-1]
            if "InputError: " not in said:
                raise
            assert any(words in said for words in REFUSED), said
            return said.partition("InputError: ")[2]

    sweep("experts", "Experts under every two choices of a plan", covering(product(), 2), judge)


@pytest.mark.parametrize(("plan", "part"), [("dp2.ep2.z3.mb2", ".experts."), ("tp2.ep2.mb2", "_bias")])
def test_frozen_experts_and_frozen_parts_of_them_are_dealt_too(ranks: Any, plan: str, part: str) -> None:
    model = frozen_model(part).double()
    batch = make_batch("gpt-oss", 0)
    loss_of(model, "gpt-oss", batch)[0].backward()
    gradients = ranks.run(parse_plan(plan).world, frozen_gradients, plan, part)[0]
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == trained.keys() and not any(part in name for name in gradients)
    for name, gradient in trained.items():
        assert gradient is not None and difference(gradients[name], gradient) < 1e-10, name


def frozen_model(part: str) -> Any:
    model = make_model("gpt-oss")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    return model


def frozen_gradients(plan: str, part: str) -> dict[str, torch.Tensor] | None:
    """On every rank: the first full gradients (rank 0)."""
    trainer = parallelize(frozen_model(part), make_optimizer, plan, precision="fp64", anatomy=anatomy_of("gpt-oss"))
    gradients: dict[str, torch.Tensor] | None = trainer.gradients(make_batch("gpt-oss", 0))[2]
    return gradients


SIX = {
    "kind": "decoder",
    "layers": 2,
    "hidden": 24,
    "heads": 6,
    "kv_heads": 6,
    "ffn": 12,
    "vocab": 96,
    "seq": 32,
    "experts": 6,
    "top_k": 2,
    "moe_ffn": 12,
}


@pytest.mark.parametrize(
    "plan",
    [
        "dp3.ep3.z2.mb2",
        *(
            pytest.param(plan, marks=pytest.mark.soak)
            for plan in ("tp3.ep3", "dp3.tp2.ep6.z3", "pp2.dp3.ep3.z1", "dp6.ep3.z3")
        ),
    ],
)
def test_three_and_six_ranks_share_six_experts(ranks: Any, plan: str) -> None:
    model, batch = six_model().double(), make_batch("mixture", 0, rows=12)
    loss_of(model, "mixture", batch)[0].backward()
    gradients = ranks.run(parse_plan(plan).world, six_gradients, plan)[0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and difference(gradients[name], parameter.grad) < 1e-10, name


def six_model() -> Any:
    torch.manual_seed(0)
    return build_reference_model(SIX)


def six_gradients(plan: str) -> dict[str, torch.Tensor] | None:
    """On every rank: the first full gradients (rank 0)."""
    gradients: dict[str, torch.Tensor] | None = parallelize(
        six_model(), make_optimizer, plan, precision="fp64"
    ).gradients(make_batch("mixture", 0, rows=12))[2]
    return gradients


def adapted_mixture() -> Any:
    return adapted(make_model("mixtral"), LoraConfig(rank=2, alpha=4.0))


@pytest.mark.parametrize(
    "plan",
    ["dp2.ep2.z3.mb2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("tp2.ep2.mb2", "pp2.dp2.ep2.z1"))],
)
def test_adapters_beside_dealt_experts_train_as_on_one_device(ranks: Any, plan: str) -> None:
    pytest.importorskip("peft")
    model = adapted_mixture().double()
    loss_of(model, "mixtral", make_batch("mixtral", 0))[0].backward()
    gradients = ranks.run(parse_plan(plan).world, adapted_gradients, plan)[0]
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == trained.keys() and all(".lora_" in name for name in trained)
    for name, gradient in trained.items():
        assert gradient is not None and difference(gradients[name], gradient) < 1e-10, name


def adapted_gradients(plan: str) -> dict[str, torch.Tensor] | None:
    """On every rank: the first full gradients of the adapters (rank 0)."""
    gradients: dict[str, torch.Tensor] | None = parallelize(
        adapted_mixture(), make_optimizer, plan, precision="fp64"
    ).gradients(make_batch("mixtral", 0))[2]
    return gradients


class Skipping(MoeExperts):
    """A number beyond all experts stands for none."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        beyond = index >= self.num_experts
        return super().forward(hidden, index.masked_fill(beyond, 0), weights.masked_fill(beyond, 0.0))


class Passing(Skipping):
    """It stands for an expert that gives what it is given."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        beyond = index >= self.num_experts
        return super().forward(hidden, index, weights) + hidden * (weights * beyond).sum(1, keepdim=True)


def with_classes_beyond(kind: type[MoeExperts]) -> Any:
    """A mixture whose routers know three experts more than there are."""
    model = make_model("mixture")
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = kind
        layer.mlp.gate.weight = torch.nn.Parameter(torch.randn(11, 32, generator=torch.Generator().manual_seed(3)))
    return model


def gradients_beyond(kind: type[MoeExperts], plan: str) -> Any:
    """On every rank: the first full gradients (rank 0) and the loads that the first record tells; or why the plan is
    refused."""
    try:
        trainer = parallelize(with_classes_beyond(kind), make_optimizer, plan, precision="fp64")
    except InputError as error:
        return str(error)
    gradients, said = trainer.gradients(make_batch("mixture", 0))[2], trainer.step(make_batch("mixture", 0)).experts
    return gradients, said.loads if said else ()


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(Skipping, "dp2.ep2.z1"), (Skipping, "tp2.ep2.mb2"), (Skipping, "tp2"), (Passing, "tp2"), (Passing, "dp2.z3")],
)
@pytest.mark.covering(1)
def test_a_number_beyond_all_experts_is_a_pair_of_none(ranks: Any, kind: type[MoeExperts], plan: str) -> None:
    model = with_classes_beyond(kind).double()
    loss_of(model, "mixture", make_batch("mixture", 0))[0].backward()
    gradients, loads = ranks.run(parse_plan(plan).world, gradients_beyond, kind, plan)[0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and difference(gradients[name], parameter.grad) < 1e-10, name
    assert [len(load) for load in loads] == ([8, 8] if kind is Skipping else [])


def test_experts_beside_one_that_gives_what_it_is_given_are_not_dealt(ranks: Any) -> None:
    for said in ranks.run(2, gradients_beyond, Passing, "dp2.ep2.z1"):
        assert "ep(2) needs routed experts" in said and "\n" not in said
