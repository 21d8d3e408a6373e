"""Verifies a plan on real ranks for `meshwright verify`: it trains a reduced model under the plan for VERIFY_STEPS
steps and compares the results with torch's own training on one device.

Verification compares the loss of every step, the gradients of the first step, the final weights, and the numbers of
parameters and labels. Rows have unequal numbers of valid labels, so a plan that wrongly averages the means of the rows
fails. Dropout is 0 under the plan and on one device, since the two would draw different random numbers. In float64, the
model's own casts to float32 become casts to float64 (proof/reference_run.py).

A relative difference is the norm of the difference divided by the norm on one device. A gradient is only rounding error
if its norm is at most 10 eps times the norm of all gradients. An example is the gradient of a key bias: the bias shifts
all scores of a query equally and so changes no attention weight. Such gradients are counted but not compared. The
weights of these parameters are not compared either, since AdamW turns the rounding error into full steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.block_lists import params_by_layer
from meshwright.analysis.declared_regions import USER_RULES_ATTRIBUTE
from meshwright.analysis.dry_run import dry_run
from meshwright.analysis.example_inputs import extra_inputs, make_example, name_positional_inputs
from meshwright.analysis.run_conditions import set_seed
from meshwright.core.codec import StrictModel, validate_data
from meshwright.core.errors import InputError
from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.models.model_io import IGNORE_INDEX
from meshwright.models.registry import build_from_config, transformers_config
from meshwright.runtime.expert_parallel.load_balancing import (
    CAPACITY_ATTRIBUTE,
    aux_loss_coefficient,
    drop_over_capacity,
)
from meshwright.runtime.loss import Batch, LossHead, extract_logits
from meshwright.spec.constraints import check_batch_size
from meshwright.spec.grid import first_row
from meshwright.spec.job import ModelSource
from meshwright.spec.layout import NF4_BLOCK_NUMEL
from meshwright.spec.plan import Plan
from meshwright.spec.workload import LoraConfig, OptimizerConfig
from meshwright.train.first_difference import ModuleRecorder, RecordedPass, find_first_difference
from meshwright.train.model import attach_lora, build_model, model_objective, vocabulary_size
from meshwright.train.optimizer import optimizer_factory
from meshwright.train.proof.reference_run import use_float64
from meshwright.train.rank_main import RankControl, join_process_groups
from meshwright.train.tiny_config import reduced_expert_count, shrink_config
from meshwright.train.trainer import Trainer, parallelize

VERIFY_STEPS, SEQUENCE_LENGTH, HIDDEN_SIZE, HEAD_COUNT, VOCABULARY_SIZE, IMAGE_SIDE_PIXELS = 3, 32, 64, 8, 251, 16
VERIFY_TOLERANCES = {"fp64": (1e-10, 1e-10, 1e-8), "fp32": (1e-6, 1e-5, 1e-3)}
"""By precision: the largest accepted relative differences of the losses, of the gradients of the first step, and of the
final weights."""
DTYPE_BY_PRECISION = {"fp64": torch.float64, "fp32": torch.float32}
InjectFault = Callable[[nn.Module], None]


class VerifyRequest(StrictModel):
    """The payload that starts a verification. `plan` has already been adapted to the reduced model."""

    model: ModelSource
    plan: Plan
    optimizer: OptimizerConfig
    precisions: tuple[str, ...]
    seed: int = 1
    lora: LoraConfig | None = None
    capacity: float | None = None


class VerifyResult(StrictModel):
    """The result in one precision. `loss`, `gradient` and `weight` are the largest relative differences. `where` is the
    parameter with the largest gradient difference, `weight_where` that with the largest weight difference. `missing`
    lists the parameters that have a gradient only under the plan or only on one device."""

    precision: str
    loss: float
    gradient: float
    where: str
    weight: float
    weight_where: str
    parameters: tuple[int, int] = Field(description="number of parameters on one device, and under the plan")
    labels: tuple[int, int] = Field(
        description="number of valid labels of the first batch on one device, and under the plan"
    )
    labels_by_replica: tuple[int, ...]
    steps: int = VERIFY_STEPS
    rounding: int = Field(default=0, description="number of gradients that consist only of rounding errors")
    missing: tuple[str, ...] = ()
    first: str = Field(default="", description="first module that differs, and in what; empty if all modules are equal")

    @property
    def equal(self) -> bool:
        """Returns whether all differences are within the tolerances, and all counts under the plan equal those on one
        device."""
        loss, gradient, weight = VERIFY_TOLERANCES[self.precision]
        counts = self.parameters[0] == self.parameters[1] and self.labels[0] == self.labels[1] and not self.missing
        return counts and self.loss <= loss and self.gradient <= gradient and self.weight <= weight


def verify(channel: RankControl, payload: IpcMessage) -> int:
    """Runs on every rank of `meshwright verify`. `payload` is a VerifyRequest. Rank 0 sends a VerifyResult for each
    precision. Returns the exit status of the rank."""
    question = validate_data(VerifyRequest, payload)
    with join_process_groups(channel.rank, channel.world):
        for precision in question.precisions:
            ours = _run_under_plan(question, precision)
            found = compare_results(question, precision, ours) if channel.rank == 0 else None
            first = (
                locate_difference(question, precision)
                if _broadcast_flag(channel.world, found is not None and not found.equal)
                else ""
            )
            if found is not None:
                found = found.but(first=first)
                channel.say("found", finding=found.model_dump(), equal=found.equal)
    return 0


# --- the reduced model ----------------------------------------------------------------------------


def reduced_width(question: VerifyRequest) -> int:
    """Returns the hidden size of the reduced model. With a base in 4 bits, each tensor rank needs a block of the inputs
    of a row."""
    is_packed = question.lora is not None and question.lora.base is not None
    return max(HIDDEN_SIZE, NF4_BLOCK_NUMEL * question.plan.tp if is_packed else 0)


def shrink_source(source: ModelSource, plan: Plan, hidden: int = HIDDEN_SIZE) -> ModelSource:
    """Returns `source` with reduced sizes. The reduced model has as many blocks as the stages of `plan` need, and an
    odd vocabulary size. The ratio of query heads to key-value heads does not change, unless tensor parallelism needs
    more key-value heads. A source without sizes is returned unchanged."""
    if not source.sizes:
        return source
    given = source.sizes
    small: dict[str, Any] = {"layers": sum(plan.layers_per_stage) or max(2, plan.stages)}
    if given.get("kind") == "convnet":
        small |= {"hidden": 16, "image": IMAGE_SIDE_PIXELS}
    else:
        sharing = max(1, int(given.get("heads", 1)) // max(1, int(given.get("kv_heads", 1))))
        small |= {
            "hidden": hidden,
            "heads": HEAD_COUNT,
            "kv_heads": min(HEAD_COUNT, max(HEAD_COUNT // sharing, plan.tp)),
            "head_dim": hidden // HEAD_COUNT,
        }
        small |= {"ffn": 2 * hidden, "vocab": VOCABULARY_SIZE, "seq": SEQUENCE_LENGTH}
        small |= {"pos_rows": SEQUENCE_LENGTH} if given.get("pos_rows") else {}
        if experts := int(given.get("experts") or 0):
            count = reduced_expert_count(experts, plan.ep)
            small |= {"experts": count, "top_k": min(int(given["top_k"]), count // 2), "moe_ffn": hidden}
    return source.but(sizes={**given, **small})


def build_small_model(question: VerifyRequest) -> nn.Module:
    """Builds the reduced model in host memory, without dropout. A model from a user's function keeps its sizes."""
    source, width = question.model, reduced_width(question)
    config = _transformers_config(source)
    model = (
        _build_small_hf_model(config, question, width)
        if config is not None
        else build_model(shrink_source(source, question.plan, width), question.seed, weights=False)
    )
    if source.rules:
        setattr(model, USER_RULES_ATTRIBUTE, source.rules)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    if question.lora is not None:
        attach_lora(model, question.lora, question.seed)
    if question.capacity is not None:
        setattr(model, CAPACITY_ATTRIBUTE, question.capacity)
    return model


def _transformers_config(source: ModelSource) -> Any:
    """Returns the configuration of a model that transformers builds, or None."""
    if not source.folder:
        return transformers_config(source.sizes) if source.sizes else None
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source.folder)


def _build_small_hf_model(config: Any, question: VerifyRequest, width: int) -> nn.Module:
    """Builds the model of the configuration with small sizes, random weights and dropout rates of 0."""
    plan = question.plan
    layers = sum(plan.layers_per_stage) or max(2, plan.stages)
    sizes = {
        "hidden": width,
        "heads": HEAD_COUNT,
        "ffn": 2 * width,
        "vocabulary": VOCABULARY_SIZE,
        "sequence": SEQUENCE_LENGTH,
        "side": IMAGE_SIDE_PIXELS,
        "ep": plan.ep,
    }
    shrink_config(config, layers, plan.tp, sizes)
    set_seed(question.seed)
    return build_from_config(config)


def make_batch(objective: str, vocabulary: int, rows: int, step: int, main: str = "images", channels: int = 3) -> Batch:
    """Makes a random batch of `rows` rows, which have unequal numbers of valid labels. `step` is the seed. `main` is
    the name of the model's image input, `channels` the number of channels of an image."""
    random = torch.Generator().manual_seed(1000 + step)
    if objective == "images":
        labels = torch.randint(0, vocabulary, (rows,), generator=random)
        labels[1::3] = IGNORE_INDEX
        return {
            main: torch.randn(rows, channels, IMAGE_SIDE_PIXELS, IMAGE_SIDE_PIXELS, generator=random),
            "labels": labels,
        }
    ids = torch.randint(0, vocabulary, (rows, SEQUENCE_LENGTH), generator=random)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : (row * 7 + step) % (SEQUENCE_LENGTH - 2)] = IGNORE_INDEX
    if objective == "pairs":
        return {"input_ids": ids.flip(1), "decoder_input_ids": ids, "labels": labels}
    return {"input_ids": ids, "labels": labels}


def make_batch_like(model: nn.Module, vocabulary: int, rows: int, step: int) -> Batch:
    """Makes a random batch for a model whose inputs `make_batch` does not support.

    Floating-point inputs are noise in the shapes of the model's example inputs. Integer inputs repeat the rows of the
    example, or are random if the example is on the meta device. Labels are random, one for each row or position of the
    logits. Raises InputError if the model returns no such logits.
    """
    random = torch.Generator().manual_seed(1000 + step)
    kind = next(model.parameters()).dtype

    def drawn(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if value.is_floating_point():
            return torch.randn(rows, *value.shape[1:], generator=random).to(kind)
        own = None if value.is_meta else value[torch.arange(rows) % len(value)]
        return torch.randint(0, vocabulary, (rows, *value.shape[1:]), generator=random) if own is None else own

    batch = {name: drawn(value) for name, value in name_positional_inputs(model, make_example(model)).items()}
    with torch.no_grad(), dry_run(model):
        logits = extract_logits(model(**batch))
    if logits is None or logits.ndim not in (2, 3):
        raise InputError(
            Message(
                "{type} returns no logits per row or position, which verify compares: compare its loss in your own "
                "loop",
                type=type(model).__name__,
            )
        )
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=random)
    for row in range(rows):
        left_out = (row * 7 + step) % max(labels[row].numel() - 2, 1) if labels.ndim > 1 else int(row % 3 == 1)
        labels.view(rows, -1)[row, :left_out] = IGNORE_INDEX
    return {**batch, "labels": labels}


# --- under the plan and on one device -------------------------------------------------------------


def _make_batches(question: VerifyRequest, model: nn.Module, dtype: torch.dtype) -> list[Batch]:
    vocabulary, config, rows = (
        _vocabulary_size(question, model),
        getattr(model, "config", None),
        check_batch_size(question.plan),
    )
    if extra_inputs(make_example(model)):
        made = [make_batch_like(model, vocabulary, rows, step) for step in range(VERIFY_STEPS)]
        return [
            {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
            for batch in made
        ]
    objective = str(model_objective(question.model, model))
    if objective == "images" and question.model.folder:
        vocabulary = int(getattr(config, "num_labels", vocabulary))
    main = getattr(model, "main_input_name", "images") if objective == "images" else "images"
    batches = [
        make_batch(objective, vocabulary, rows, step, main, getattr(config, "num_channels", 3))
        for step in range(VERIFY_STEPS)
    ]
    return [
        {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
        for batch in batches
    ]


def _vocabulary_size(question: VerifyRequest, model: nn.Module) -> int:
    if question.model.sizes:
        return vocabulary_size(shrink_source(question.model, question.plan), model)
    return vocabulary_size(question.model, model) or VOCABULARY_SIZE


def _build_trainer(question: VerifyRequest, precision: str) -> tuple[Trainer, list[Batch]]:
    model = build_small_model(question)
    if precision == "fp64":
        use_float64(model.double())
    batches = _make_batches(question, model, torch.float32)
    rule = question.optimizer
    return parallelize(
        model, optimizer_factory(rule), question.plan, precision=precision, clip=rule.clip, seed=question.seed
    ), batches


def _run_under_plan(question: VerifyRequest, precision: str, spoil: InjectFault | None = None) -> dict[str, Any]:
    """Trains under the plan. All ranks call it.

    Returns a dictionary with these keys:
    - `losses`: the loss of the first batch before any update, then the loss of every step.
    - `labels`: the number of valid labels of the first batch. `by_replica`: this number for each replica.
    - `gradients`: the gradients of the first batch, on rank 0.
    - `weights`: the weights after the last step, on rank 0.

    Tests use `spoil` to inject a fault into the parallel model before training.
    """
    trainer, batches = _build_trainer(question, precision)
    if spoil is not None:
        spoil(trainer.engine.model)
    first, labels, gradients = trainer.gradients(batches[0])
    losses = [trainer.step(batch).loss for batch in batches]
    rows, objective, plan = check_batch_size(question.plan), trainer.engine.objective, question.plan
    borders = [first_row(plan, rows, replica) for replica in range(plan.dp)] + [rows]
    by_replica = [
        objective.count({name: value[a:b] for name, value in batches[0].items()}) for a, b in pairwise(borders)
    ]
    weights = trainer.full_state_dict()
    trainer.close()
    return {
        "losses": [first, *losses],
        "labels": labels,
        "by_replica": by_replica,
        "gradients": gradients,
        "weights": weights,
    }


def locate_difference(question: VerifyRequest, precision: str, spoil: InjectFault | None = None) -> str:
    """Returns a line that names the first module whose output or gradients under the plan differ from those on one
    device. If there is none in the first step, the line says so. All ranks call it and get the same line. `spoil`: as
    for `_run_under_plan`."""
    trainer, batches = _build_trainer(question, precision)
    if spoil is not None:
        spoil(trainer.engine.model)
    dtype = DTYPE_BY_PRECISION[precision]
    model = build_small_model(question).to(dtype)
    if precision == "fp64":
        use_float64(model)
    one, recorder = RecordedPass(), ModuleRecorder(model)
    recorder.now = one
    reference_loss(model, _make_batches(question, model, dtype)[0], question.plan.micro_batch)[0].backward()
    recorder.end()
    if aux_loss_coefficient(model):
        # The load-balancing loss is computed in further forward passes, so the recorded gradients lack its part.
        one.gradients.clear()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    found = find_first_difference(trainer, batches[0], one, gradients, VERIFY_TOLERANCES[precision][1])
    trainer.close()
    return (
        str(found)
        if found
        else Message("no module differs in the first step: the difference comes with the update of the weights")
    )


def _broadcast_flag(world: int, said: bool) -> bool:
    """Returns rank 0's flag on every rank."""
    flag = torch.tensor(float(said))
    if world > 1:
        dist.broadcast(flag, 0)
    return bool(flag)


def reference_loss(model: nn.Module, batch: Batch, size: int) -> tuple[torch.Tensor, int]:
    """Returns torch's own cross-entropy of `batch`, as the mean over the valid labels, and the number of these labels.
    If the model has a load-balancing loss, its mean over micro-batches of `size` rows is added."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = extract_logits(model(**inputs))
    assert logits is not None
    labels = (
        F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        if LossHead(model, None, None).shift
        else batch["labels"]
    )
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX)
    if coefficient := aux_loss_coefficient(model):
        parts = [{name: value[at : at + size] for name, value in inputs.items()} for at in range(0, len(labels), size)]
        loss = loss + coefficient * torch.stack([model(**part).aux_loss for part in parts]).mean()
    return loss, int((labels != IGNORE_INDEX).sum())


def run_single_device(question: VerifyRequest, precision: str) -> dict[str, Any]:
    """Trains on one device with torch's own loss, gradient clipping and optimizer. Returns the fields of
    `_run_under_plan` except `by_replica`."""
    dtype = DTYPE_BY_PRECISION[precision]
    model = build_small_model(question)
    batches = _make_batches(question, model, dtype)
    model.to(dtype)
    if question.capacity is not None:
        drop_over_capacity(model, analyze_model(model).experts, SEQUENCE_LENGTH)
    if precision == "fp64":
        use_float64(model)
    optimizer, rule = _reference_optimizer(model, question.optimizer), question.optimizer

    def backward(batch: Batch) -> tuple[float, int]:
        optimizer.zero_grad()
        loss, labels = reference_loss(model, batch, question.plan.micro_batch)
        loss.backward()
        return loss.item(), labels

    first, labels = backward(batches[0])
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    losses = []
    for batch in batches:
        losses.append(backward(batch)[0])
        if rule.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), rule.clip)
        optimizer.step()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return {"losses": [first, *losses], "labels": labels, "gradients": gradients, "weights": weights}


def _reference_optimizer(model: nn.Module, rule: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the optimizer of `rule` over full parameters. It is built from torch's own classes, except that a user's
    optimizer, Muon and Adafactor come from `optimizer_factory`, as under the plan."""
    if rule.whole or rule.live:
        in_block = {
            name: layer.startswith("block.")
            for layer, names in params_by_layer(model, analyze_model(model))
            for name in names
        }
        for name, parameter in model.named_parameters():  # under the plan, the trainer sets these attributes
            vars(parameter).update(path=name, is_matrix=parameter.ndim > 1, in_block=in_block[name])
        return optimizer_factory(rule)([parameter for parameter in model.parameters() if parameter.requires_grad])
    decays = {True: rule.weight_decay, False: rule.weight_decay if rule.decay == "all" else 0.0}
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is kind], "weight_decay": decays[kind]}
        for kind in decays
    ]
    make = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}.get(rule.name)
    if make is not None:
        return make(groups, rule.lr, rule.betas, rule.eps, rule.weight_decay, foreach=False)
    momentum = rule.momentum if rule.name == "sgd-momentum" else 0.0
    return torch.optim.SGD(groups, rule.lr, momentum, weight_decay=rule.weight_decay, foreach=False)


def compare_results(question: VerifyRequest, precision: str, ours: dict[str, Any]) -> VerifyResult:
    """Trains on one device and compares the results with `ours`, the results under the plan. Rank 0 calls it."""
    theirs = run_single_device(question, precision)
    eps = torch.finfo(DTYPE_BY_PRECISION[precision]).eps
    whole = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in theirs["gradients"].values()))
    rounding = {
        name for name, gradient in theirs["gradients"].items() if float(gradient.double().norm()) <= 10 * eps * whole
    }
    places = [name for name in theirs["gradients"] if name not in rounding]
    gradients = {name: relative_difference(ours["gradients"].get(name), theirs["gradients"][name]) for name in places}
    weights = {
        name: relative_difference(ours["weights"].get(name), value)
        for name, value in theirs["weights"].items()
        if name not in rounding
    }
    where, weight_where = max(gradients, key=gradients.__getitem__), max(weights, key=weights.__getitem__)
    return VerifyResult(
        precision=precision,
        loss=max(abs(mine / other - 1) for mine, other in zip(ours["losses"], theirs["losses"], strict=True)),
        gradient=gradients[where],
        where=where,
        weight=weights[weight_where],
        weight_where=weight_where,
        parameters=(
            _count_elements(theirs["weights"]),
            _count_elements({name: ours["weights"].get(name) for name in theirs["weights"]}),
        ),
        labels=(theirs["labels"], ours["labels"]),
        labels_by_replica=tuple(ours["by_replica"]),
        rounding=len(rounding),
        missing=tuple(sorted(theirs["gradients"].keys() ^ ours["gradients"].keys())),
    )


def relative_difference(mine: torch.Tensor | None, other: torch.Tensor) -> float:
    """Returns the norm of `mine` - `other` divided by the norm of `other`. The result is infinite if `mine` is missing,
    has a different shape, or has elements that are not finite."""
    if mine is None or mine.shape != other.shape:
        return math.inf
    mine, other = mine.double(), other.double()
    return float((mine - other).norm() / other.norm().clamp_min(1e-300)) if bool(mine.isfinite().all()) else math.inf


def _count_elements(tensors: dict[str, Any]) -> int:
    return sum(tensor.numel() for tensor in tensors.values() if tensor is not None)
