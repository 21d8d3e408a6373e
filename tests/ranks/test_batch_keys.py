"""A batch with keys that the example lacked: the plan is made anew on an isolated copy, or refused in one line before
the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.spec.record import ProofMode
from meshwright.train.trainer import parallelize

ROWS, LENGTH, WORDS = 4, 8, 40
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": WORDS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {**SIZES, "num_key_value_heads": 4},
    "Qwen2": {**SIZES, "num_key_value_heads": 4},
    "GPTNeoX": SIZES,
    "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": WORDS, "n_positions": 16, "resid_pdrop": 0,
        "embd_pdrop": 0, "attn_pdrop": 0},
}  # fmt: skip
CLASSES = {"GPT2": "GPT2LMHeadModel"}


def family(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name], bos_token_id=1, eos_token_id=2, use_cache=False)
    return getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).double()


def batch_of(step: int, *keys: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    more = {
        "position_ids": torch.arange(LENGTH).flip(0).expand(ROWS, -1).clone(),
        "attention_mask": mask,
        "gain": torch.linspace(0.5, 2, ROWS).double(),
    }
    return {"input_ids": ids, "labels": torch.where(mask > 0, ids, -100), **{key: more[key] for key in keys}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Own(nn.Module):
    """Scales rows where a batch says by how much."""

    shift_labels = False
    whole: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = (
            nn.Embedding(WORDS, 16),
            nn.ModuleList(Block() for _ in range(4)),
            nn.Linear(16, WORDS),
        )

    def forward(self, input_ids: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(input_ids)
        if gain is not None:
            x = x * gain[:, None, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Outside(Own):
    """Reads its own table by its class: a copy of it does not run by itself."""

    def forward(self, input_ids: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids, gain) + Outside.whole.words(input_ids).mean()


def own(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = (Outside if kind == "outside" else Own)().double()
    Outside.whole = model
    if kind == "replaced":
        last = model.layers[3]
        model.layers[3].forward = lambda x: 2 * x + last.down(torch.tanh(last.up(x)))
    if kind == "wrapped":
        inner = model.forward
        model.forward = lambda input_ids, gain=None: inner(input_ids, gain)
    return model


def made(kind: str) -> nn.Module:
    return family(kind) if kind in FAMILIES else own(kind)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def alone(kind: str, keys: tuple[tuple[str, ...], ...]) -> list[float]:
    model, losses = made(kind), []
    optimizer, shift = sgd(model.parameters()), int(kind in FAMILIES)
    for step, each in enumerate(keys):
        batch = batch_of(step, *each)
        labels = batch.pop("labels")
        optimizer.zero_grad()
        output = model(**batch)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        loss = F.cross_entropy(logits[:, : LENGTH - shift].flatten(0, 1), labels[:, shift:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(
    kind: str, plan: str, keys: tuple[tuple[str, ...], ...], prove: ProofMode, shown: tuple[str, ...] = ()
) -> list[Any]:
    """Losses, and the line of a step that was refused. `shown`: keys of the example besides `input_ids`; without any
    none is given."""
    example = {name: value for name, value in batch_of(9, *shown).items() if name != "labels"} if shown else None
    found: list[Any] = []
    try:
        trainer = parallelize(made(kind), sgd, plan, precision="fp64", prove=prove, example=example)
        for step, each in enumerate(keys):
            found.append(trainer.step(batch_of(step, *each)).loss)
    except InputError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("plan", ["pp2.mb2", pytest.param("dp2.z3.mb2", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "kind", ["Llama", *(pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES if name != "Llama")]
)
def test_usual_models_run_with_positions_and_masks_that_no_example_had(ranks: Any, kind: str, plan: str) -> None:
    keys = (("position_ids",), ("attention_mask", "position_ids"), ())
    for losses in ranks.run(2, trained, kind, plan, keys, "never"):
        assert losses == pytest.approx(alone(kind, keys), rel=1e-10)


@pytest.mark.parametrize("plan", [pytest.param("pp2.mb2", marks=pytest.mark.soak), "dp2.z3.mb2"])
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.soak), "replaced", "wrapped"])
def test_copies_of_models_with_replaced_forwards_are_analysed_with_a_new_key(ranks: Any, kind: str, plan: str) -> None:
    keys = ((), ("gain",), ())
    for losses in ranks.run(2, trained, kind, plan, keys, "never"):
        assert losses == pytest.approx(alone(kind, keys), rel=1e-10)


@pytest.mark.parametrize(
    "keys",
    [pytest.param((("gain",),), id="first", marks=pytest.mark.soak), pytest.param(((), ("gain",)), id="later")],
)
def test_without_a_copy_that_runs_by_itself_a_new_key_is_refused_before_the_step(ranks: Any, keys: Any) -> None:
    for found in ranks.run(2, trained, "outside", "dp2.z3.mb2", keys, "never"):
        *losses, line = found
        assert losses == pytest.approx(alone("outside", keys[:-1]), rel=1e-10)
        assert "no copy of it can run" in line and "example=" in line and "\n" not in line, line


def test_without_a_copy_that_runs_by_itself_an_example_with_the_key_lets_it_run(ranks: Any) -> None:
    keys = (("gain",), ("gain",))
    for losses in ranks.run(2, trained, "outside", "dp2.z3.mb2", keys, "never", ("gain",)):
        assert losses == pytest.approx(alone("outside", keys), rel=1e-10)
