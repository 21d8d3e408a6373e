"""Families of models, unmodified, under every kind of plan: the loss is the loss of one device in float64, to 1e-10.

`make test` runs one of them; the soak runs every family under every plan (bench/results/families.md).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from equality import check, read_once
from model_families import FAMILIES, batch_of, build_family, objective_of
from torch.nn import functional as F
from world_group import Collectives, world_comm_group

from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.runtime.tensor_parallel.layers import shard_model
from meshwright.spec.plan import parse_plan
from meshwright.train.proof.reference_run import use_float64
from meshwright.train.trainer import parallelize

pytest.importorskip("transformers")
torch.set_num_threads(1)

PLANS = (
    "dp2.mb4", "tp2.mb8", "tp4.mb8", "tp8.mb8", "tp2.sp.mb8", "pp2.mb4", "tp2.pp2.mb4", "dp2.z3.mb4", "dp2.tp2.z2.mb4",
    "pp2.dp2.z3.mb2", "tp2.mb4.rc-full", "dp2.tp2.sp.z1.mb4", "dp2.tp2.pp2.z1.mb2", "tp4.sp.mb8",
)  # fmt: skip


def anatomy_of(name: str) -> ModelGraph:
    return read_once(f"family {name}", functools.partial(build_family, name))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def under_plan(name: str, plan: str) -> dict[str, Any] | str:
    """On every rank: what `equality.train` gives for a family, or why the plan is refused."""
    model = use_float64(build_family(name).double())
    try:
        trainer = parallelize(model, optimizer_of, plan, precision="fp64", clip=1.0, anatomy=anatomy_of(name))
        loss, tokens, gradients = trainer.gradients(batch_of(name, 0))
    except InputError as error:
        return str(error)
    records = [trainer.step(batch_of(name, step)) for step in range(2)]
    result = {"first": loss, "tokens": tokens, "gradients": gradients, "losses": [record.loss for record in records]}
    result |= {"norms": [record.gradient_norm for record in records], "weights": trainer.full_state_dict()}
    result["evaluated"] = trainer.evaluate(batch_of(name, 9))
    trainer.close()
    return result


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """What one device computes, with torch's own loss and optimizer."""
    model = use_float64(build_family(name).double())
    optimizer = optimizer_of(model.parameters())
    shift = objective_of(name) == "causal"

    def loss_of(step: int) -> torch.Tensor:
        batch = {
            key: value.double() if value.is_floating_point() else value for key, value in batch_of(name, step).items()
        }
        labels = batch.pop("labels")
        output = model(**batch)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        labels = F.pad(labels[:, 1:], (0, 1), value=-100) if shift else labels
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)

    labels = batch_of(name, 0)["labels"]
    loss = loss_of(0)
    loss.backward()
    result: dict[str, Any] = {"first": loss.item(), "tokens": int(((labels[:, 1:] if shift else labels) != -100).sum())}
    result["gradients"] = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    result |= {"losses": [], "norms": []}
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        result["losses"].append(loss.item())
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    result["weights"] = {key: value.detach() for key, value in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        result["evaluated"] = loss_of(9).item()
    return result


REFUSED = {
    ("opt", "sp"): "reads batch and sequence as one",
    ("codegen", "sp"): "is not sharded",
    ("olmo2", "sp"): "is not sharded",
    ("deberta", "sp"): "is not sharded",
    ("stablelm-norm", "sp"): "is not sharded",
    ("mamba", "tp"): "this one has none",
    ("vit", "sp"): "sequence (17) is not a multiple of tp(",
    ("t5", "sp"): "the blocks are in several lists",
    ("falcon", "tp8"): "must divide",
    ("cohere", "tp8"): "too few key-value heads",
    ("deepseek-v3", "sp"): "reads batch and sequence as one",
    ("blenderbot", "sp"): "is not sharded",
    ("albert", "sp"): "runs more than once",
    ("albert", "pp"): "stages need at least one block each",
    ("resnet-group", "sp"): "the blocks are in several lists",
    ("resnet-group", "tp8"): "must divide groups of bn1 (4)",
}
"""Family and part of the plan: what the refusal says."""


IN_PART = {
    "stablelm-norm": 2,
    "olmo2": 2,
    "codegen": 2,
    "deberta": 2,
    "albert": 2,
    "mamba": 0,
    "t5": 10,
    "mixtral": 2,
    "qwen3-moe": 2,
    "gpt-oss": 2,
    "deepseek-v3": 4,
}
"""Regions of two blocks where they are not the attention and the feed-forward of each; T5 has two stacks, one of them
with two attentions."""


def run_pair(ranks: Any, name: str, plan: str) -> tuple[float, float] | str:
    results = ranks.run(parse_plan(plan).world, under_plan, name, plan)
    if isinstance(results[0], str):
        assert len(set(results)) == 1, "ranks refuse for different reasons"
        assert "\n" not in results[0]
        return results[0]
    return check(alone(name), results, "fp64")


def pairs() -> list[tuple[str, str]]:
    """Every family with every plan."""
    return (
        [(name, plan) for name in FAMILIES for plan in PLANS]
        + [("resnet-group", plan) for plan in PLANS]
        + [("resnet", "tp2.mb8")]
    )


def turn() -> list[tuple[str, str]]:
    """A plan for each of the families that are named most, each kind of plan in turn."""
    order = ("tp2.mb8", "tp4.mb8", "tp2.sp.mb8", "pp2.mb4", "dp2.tp2.z2.mb4", "tp2.mb4.rc-full")
    named = list(FAMILIES)[: list(FAMILIES).index("t5")]
    chosen = [(name, order[index % len(order)]) for index, name in enumerate(named)]
    return [
        *chosen,
        ("mistral", "tp8.mb8"),
        ("t5", "tp2.mb8"),
        ("t5", "tp2.sp.mb8"),
        ("t5", "dp2.z1.mb2.rc-full"),
        ("cohere", "tp2.mb8"),
        ("deepseek-v3", "tp2.mb8"),
        ("modernbert-decoder", "pp2.mb4"),
        ("openai-gpt", "pp2.mb4"),
        ("blenderbot", "pp2.mb4"),
        ("resnet", "tp2.mb8"),
        ("resnet-group", "tp4.mb8"),
    ]


def refused(name: str, plan: str) -> str | None:
    """What the refusal says where there must be one."""
    parsed = parse_plan(plan)
    kinds = (
        ["sp"] * parsed.sequence_parallel
        + ["tp8"] * (parsed.tp == 8)
        + ["tp4"] * (parsed.tp == 4)
        + ["tp"] * (parsed.tp > 1)
    )
    kinds += ["pp"] * (parsed.pp > 1)
    return next((REFUSED[name, kind] for kind in kinds if (name, kind) in REFUSED), None)


def judge(ranks: Any, name: str, plan: str) -> tuple[float, float] | str:
    """What is found of a pair; AssertionError where it is not what it must be."""
    found, expected = run_pair(ranks, name, plan), refused(name, plan)
    if isinstance(found, str):
        assert expected is not None, found
        assert expected in found, f"{found!r} does not say {expected!r}"
    else:
        assert expected is None, f"{name} under {plan} was to be refused"
    return found


EVERY_TIME = [("falcon-multi-query", "tp4.mb8")]


@pytest.mark.parametrize(
    ("name", "plan"),
    [*EVERY_TIME, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in turn() if pair not in EVERY_TIME)],
)
def test_a_family_computes_what_one_device_computes(ranks: Any, name: str, plan: str) -> None:
    judge(ranks, name, plan)


@pytest.mark.soak
def test_every_family_under_every_plan(ranks: Any, sweep: Any) -> None:
    sweep("families", "Families under plans", pairs(), lambda name, plan: judge(ranks, name, plan), by_plan=True)


class Dropping(torch.nn.Module):
    """Dropout on a share, and behind the row layer on what every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down, self.outer = (
            torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8), torch.nn.Dropout(0.5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.down(self.inner(self.up(x).abs() + 1)))


class DroppingModel(torch.nn.Module):
    shift_labels = False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.outer = torch.nn.Embedding(32, 8), torch.nn.Embedding(8, 8), torch.nn.Dropout(0.5)
        self.blocks = torch.nn.ModuleList(Dropping() for _ in range(2))
        self.head = torch.nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.outer(self.table(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Kept(list[torch.Tensor]):
    """A list that recompute does not restore, because its class is derived."""


def drop(plan: str) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """What was dropped of the shares and of the whole, in the first pass and when it was computed again; the loss."""
    torch.manual_seed(0)
    trainer = parallelize(DroppingModel(), optimizer_of, plan, precision="fp64")
    shares, whole = Kept(), Kept()
    ids = torch.arange(16).view(2, 8)
    trainer.step({"input_ids": ids, "labels": ids})  # what is asked once, before the first step, drops nothing
    for block in trainer.engine.model.blocks:
        block.inner.register_forward_hook(lambda module, args, output: shares.append((output == 0).detach()))
        block.outer.register_forward_hook(lambda module, args, output: whole.append((output == 0).detach()))
    loss = trainer.step({"input_ids": ids, "labels": ids}).loss
    trainer.close()
    return shares, whole, loss


@pytest.mark.parametrize("plan", [pytest.param("tp2.mb2", marks=pytest.mark.soak), "tp2.mb2.rc-full", "tp2.sp.mb2"])
def test_dropout_differs_on_shards_and_agrees_on_replicas_also_in_recompute(ranks: Any, plan: str) -> None:
    (shares, whole, loss), (others, alike, same) = ranks.run(2, drop, plan)
    assert loss == same
    for one, other in zip(shares, others, strict=True):
        assert 0.3 < one.double().mean() < 0.7
        assert not torch.equal(one, other)
    assert all(torch.equal(one, other) == ("sp" not in plan) for one, other in zip(whole, alike, strict=True))
    if "rc" in plan:
        assert torch.equal(shares[0], shares[3])
        assert torch.equal(shares[1], shares[2])


def after_dropping(plan: str) -> tuple[int, dict[str, torch.Tensor]]:
    """The stage of this rank, and after two steps its random state and the weights that tensor ranks hold whole."""
    torch.manual_seed(0)
    trainer = parallelize(DroppingModel(), optimizer_of, plan, precision="fp64")
    ids = torch.arange(16).view(2, 8)
    for _ in range(2):
        trainer.step({"input_ids": ids, "labels": ids})
    split, units = trainer.engine.anatomy.splits, trainer.engine.zero.units
    found = {
        name: unit.layout.view(unit.weights.full, name).clone()
        for unit in units
        for name in unit.layout.offsets
        if name not in split
    }
    trainer.close()
    return trainer.mesh.coords.pp, {**found, "random": torch.get_rng_state()}


@pytest.mark.parametrize(
    "plan", [*(pytest.param(plan, marks=pytest.mark.soak) for plan in ("tp2.sp.mb1", "tp2.pp2.mb1")), "tp2.sp.pp2.mb1"]
)
def test_tensor_ranks_keep_one_random_state_and_equal_weights_under_dropout(ranks: Any, plan: str) -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}
    for stage, found in ranks.run(parse_plan(plan).world, after_dropping, plan):
        for name, value in seen.setdefault(stage, found).items():
            assert torch.equal(value, found[name]), (stage, name)
    assert "places.weight" in seen[0]


@pytest.mark.parametrize("plan", ["dp2.mb4", "tp2.mb4"])
def test_batch_norm_over_parts_of_a_batch_is_refused_with_the_exact_way(ranks: Any, plan: str) -> None:
    for said in ranks.run(2, under_plan, "resnet", plan):
        assert "bn1 is a norm with batch statistics" in said
        assert "use dp1 with the batch as one micro-batch" in said
        assert "\n" not in said


def count_collectives(name: str) -> tuple[int, int]:
    """(forward, backward) collectives of a block: those of the blocks alone, by the difference to a model whose blocks
    are left out."""
    counts = []
    for blocks in (1, 2):
        model = build_family(name)
        found = anatomy_of(name)
        shard_model(model, found, world_comm_group(shared=False), False)
        for index in range(blocks, 2):
            model.get_submodule(found.block(index)).forward = lambda hidden, *args, **kwargs: hidden
        batch = {key: value for key, value in batch_of(name, 0).items() if key != "labels"}
        with Collectives() as forward:
            logits = model(**batch).logits
        with Collectives() as backward:
            logits.sum().backward()
        counts.append((forward.count, backward.count))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "gpt-neox")), "phi3"]
)
def test_a_block_costs_two_all_reduces_forward_and_two_backward(ranks: Any, name: str) -> None:
    assert ranks.run(2, count_collectives, name) == [(2, 2)] * 2
