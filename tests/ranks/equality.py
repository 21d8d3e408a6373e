"""The promise as a function: a model under a plan on real ranks, and the same model on one device.

`train(model, plan, precision, steps)` runs on every rank; `alone` runs the plain model with the plain loss and a plain
optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from moe_models import MIXTURES, build_mixture
from torch import nn
from torch.nn import functional as F
from world_group import between_hosts

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.graph import ModelGraph
from meshwright.models.registry import build_reference_model
from meshwright.runtime.loss import Batch
from meshwright.spec.workload import LoraConfig
from meshwright.train.model import attach_lora
from meshwright.train.proof.reference_run import use_float64
from meshwright.train.trainer import Trainer, parallelize

ROWS, SEQUENCE, VOCABULARY = 8, 16, 96
SIZES = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": VOCABULARY, "seq": 32}
MODELS = ("llama", "llama-tied", "gpt2", "bert", "convnet", "hf-llama", "hf-gpt2")
TOLERANCE = {"fp64": (1e-10, 1e-10), "fp32": (1e-6, 1e-5)}
"""Largest relative difference of losses and of first gradients, by precision."""


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in MIXTURES:
        return build_mixture(name)
    if name.startswith("hf-"):
        return _hugging_face(name)
    if name == "convnet":
        return build_reference_model({"kind": "convnet", "layers": 4, "hidden": 16, "classes": 10})
    kind, _, tied = name.partition("-")
    return build_reference_model({**SIZES, "kind": kind, "tied": bool(tied) or kind != "llama"})


def _hugging_face(name: str) -> nn.Module:
    import transformers

    if name == "hf-llama":
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=VOCABULARY, max_position_embeddings=32, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=4,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=32,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def made(name: str, precision: str) -> nn.Module:
    """The model; in float64 those that round to float32 inside (those of transformers) compute in float64 throughout:
    what is rounded on shares now and then falls to the other side, and a device rounds in another order than a CPU."""
    model, rounds = make_model(name), name.startswith("hf-") or MIXTURES.get(name, ("",))[0]
    return use_float64(model.double()) if precision == "fp64" and rounds else model


def make_batch(name: str, step: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Rows hold unequal numbers of valid labels: a mean of means is wrong here."""
    generator = torch.Generator().manual_seed(1000 + step)
    if name == "convnet":
        return {
            "images": torch.randn(rows, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 10, (rows,), generator=generator),
        }
    ids = torch.randint(0, VOCABULARY, (rows, SEQUENCE), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : (row * 5 + step) % SEQUENCE] = -100
    return {"input_ids": ids, "labels": labels}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def adapted(model: nn.Module, lora: LoraConfig) -> nn.Module:
    """With adapters whose B is not zero, so that every gradient says something."""
    attach_lora(model, lora, seed=5)
    random = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) / 10)
    return model


KNOWN: dict[str, ModelGraph] = {}


def read_once(key: str, make: Callable[[], nn.Module]) -> ModelGraph:
    """What a model is made of, read by one rank for all and once: it takes longer than the steps."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    has: list[bool] = [key in KNOWN] * world
    if world > 1:
        dist.all_gather_object(has, key in KNOWN)
    if not all(has):
        source = has.index(True) if True in has else 0
        found = [KNOWN.get(key)]
        if found[0] is None and (world == 1 or dist.get_rank() == source):
            with torch.random.fork_rng(devices=()):
                found = [analyze_model(make(), use_random_weights=True)]
        if world > 1:
            dist.broadcast_object_list(found, source)
        assert found[0] is not None
        KNOWN[key] = found[0]
    return KNOWN[key]


def anatomy_of(name: str) -> ModelGraph:
    return read_once(name, functools.partial(make_model, name))


def train(name: str, plan: str, precision: str, steps: int, clip: float | None = 1.0) -> dict[str, Any]:
    """On every rank: losses and norms of `steps` steps, the first full gradients and the last weights (rank 0)."""
    return measured(
        parallelize(
            made(name, precision), make_optimizer, plan, precision=precision, clip=clip, anatomy=anatomy_of(name)
        ),
        name,
        steps,
    )


def train_between_hosts(name: str, plan: str, precision: str, steps: int) -> dict[str, Any]:
    """The same where no memory is shared."""
    with between_hosts():
        return train(name, plan, precision, steps)


def measured(trainer: Trainer, name: str, steps: int, save: str = "") -> dict[str, Any]:
    """What `train` returns, of a trainer that is there; saved after the steps where `save` names a folder."""
    return measured_on(trainer, [make_batch(name, step) for step in range(steps)], make_batch(name, 99), save)


def measured_on(trainer: Trainer, batches: Sequence[Batch], held_out: Batch, save: str = "") -> dict[str, Any]:
    """The gradients of the first batch, then what a step of each batch and an evaluation of `held_out` return."""
    loss, tokens, gradients = trainer.gradients(batches[0])
    records = [trainer.step(batch) for batch in batches]
    if save:
        trainer.save(save)
    return {
        "first": loss,
        "tokens": tokens,
        "gradients": gradients,
        "losses": [record.loss for record in records],
        "norms": [record.gradient_norm for record in records],
        "weights": trainer.full_state_dict(),
        "evaluated": trainer.evaluate(held_out),
        "bytes": trainer.bytes(),
    }


def loss_of(model: nn.Module, name: str, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Mean over valid labels with torch's own loss, and their number."""
    output = model(**{key: value for key, value in batch.items() if key != "labels"})
    logits, labels = output.logits, batch["labels"]
    if name not in ("bert", "convnet"):
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100), int((labels != -100).sum())


@functools.cache
def alone(name: str, precision: str, steps: int, clip: float | None = 1.0) -> dict[str, Any]:
    """What one device computes, with nothing of ours but the model. Of equal arguments once."""
    kind = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    model = made(name, precision).to(kind)
    optimizer = make_optimizer(model.parameters())

    def cast(step: int) -> dict[str, torch.Tensor]:
        return {
            key: value.to(kind) if value.is_floating_point() else value for key, value in make_batch(name, step).items()
        }

    loss, tokens = loss_of(model, name, cast(0))
    loss.backward()
    result: dict[str, Any] = {"first": loss.item(), "tokens": tokens, "losses": [], "norms": []}
    result["gradients"] = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    for step in range(steps):
        optimizer.zero_grad()
        loss, _ = loss_of(model, name, cast(step))
        loss.backward()
        result["losses"].append(loss.item())
        limit = float("inf") if clip is None else clip
        result["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    result["weights"] = {key: value.detach() for key, value in model.named_parameters()}
    with torch.no_grad():
        result["evaluated"] = loss_of(model, name, cast(99))[0].item()
    return result


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative: norm of the difference over the norm."""
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def check(expected: dict[str, Any], results: list[dict[str, Any]], precision: str) -> tuple[float, float]:
    """The largest relative difference of a loss and of a first gradient. AssertionError with the first one beyond the
    tolerance, and where."""
    loss_limit, gradient_limit = TOLERANCE[precision]
    ours = results[0]
    assert ours["tokens"] == expected["tokens"]
    for result in results:
        assert result["losses"] == ours["losses"], "ranks disagree on the loss"
    pairs = [("first", ours["first"], expected["first"]), ("evaluated", ours["evaluated"], expected["evaluated"])]
    pairs += [(f"step {k}", a, b) for k, (a, b) in enumerate(zip(ours["losses"], expected["losses"], strict=True))]
    for place, a, b in pairs:
        assert abs(a / b - 1) <= loss_limit, f"loss at {place}: {a} against {b}"
    for a, b in zip(ours["norms"], expected["norms"], strict=True):
        assert abs(a / b - 1) <= 10 * gradient_limit, f"gradient norm {a} against {b}"
    assert ours["gradients"].keys() == expected["gradients"].keys(), (
        ours["gradients"].keys() ^ expected["gradients"].keys()
    )
    worst = 0.0
    for name, gradient in expected["gradients"].items():
        if gradient.norm() < 1e-7:
            continue
        off = difference(ours["gradients"][name], gradient)
        assert off <= gradient_limit, f"gradient of {name} differs by {off:.1e}"
        worst = max(worst, off)
    for name, weight in expected["weights"].items():
        gradient = expected["gradients"].get(name)  # None: no loss reaches it, and nothing moves it
        if gradient is not None and gradient.norm() < 1e-7:
            continue  # a key bias moves no score: its gradient is rounding, of which AdamW makes whole steps
        off = difference(ours["weights"][name], weight)
        assert off <= (1e-3 if precision == "fp32" else 1e-8), f"weight {name} differs by {off:.1e}"
    return max(abs(a / b - 1) for _, a, b in pairs), worst
