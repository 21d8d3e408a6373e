"""Models that read sound, films, images beside texts, or what only their person knows: looked at with what they say of
themselves, or with an example."""

from __future__ import annotations

from collections import UserDict
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from equality import read_once
from torch import nn

from meshwright.analysis.example_inputs import make_example
from meshwright.core.errors import InputError
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.trainer import parallelize

ROWS, CLASSES = 4, 5
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SPEECH = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
    "decoder_start_token_id": 1, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
DRY = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
}
WAVES = {
    **SIZES, **DRY, "vocab_size": 20, "final_dropout": 0.0, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
}  # fmt: skip
FILM = {**SIZES, "image_size": 16, "patch_size": 4, "num_frames": 4, "tubelet_size": 2, "num_labels": CLASSES}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Whisper": (
        "WhisperForConditionalGeneration",
        {**SPEECH, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12},
    ),
    "Wav2Vec2": ("Wav2Vec2ForCTC", WAVES),
    "AST": (
        "ASTForAudioClassification",
        {**SIZES, "patch_size": 4, "max_length": 24, "num_mel_bins": 8, "num_labels": CLASSES, **DRY},
    ),
    "VideoMAE": ("VideoMAEForVideoClassification", FILM),
}


def family(name: str) -> nn.Module:
    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes)).double()


def batch_of(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """In the form that the model is looked at with."""
    random = torch.Generator().manual_seed(step)

    def drawn(form: torch.Tensor) -> torch.Tensor:
        shape = (ROWS, *form.shape[1:])
        return (
            torch.randn(shape, generator=random).double()
            if form.is_floating_point()
            else torch.randint(2, 18, shape, generator=random)
        )

    return {name: drawn(form) for name, form in make_example(model).items()}


def loss(output: Any, batch: dict[str, Any]) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return (logits * torch.cos(torch.arange(logits[0].numel())).view(logits[0].shape)).square().flatten(1).sum(1).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def alone(model: nn.Module, batches: list[dict[str, Any]]) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model(**batch), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def trained(name: str, plan: str) -> list[float]:
    model = family(name)
    batches = [batch_of(model, step) for step in range(3)]
    trainer = parallelize(model, sgd, plan, precision="fp64", loss=loss, anatomy=read_once(name, partial(family, name)))
    return [trainer.step(batch).loss for batch in batches]


@pytest.mark.parametrize(("name", "plan"), list(product(FAMILIES, ["dp2.z3", "tp2", "pp2.mb2"])))
@pytest.mark.covering(1)
def test_sound_and_films_are_read_from_the_configuration_and_train_as_on_one_device(
    ranks: Any, name: str, plan: str
) -> None:
    expected = alone(family(name), [batch_of(family(name), step) for step in range(3)])
    for losses in ranks.run(2, trained, name, plan):
        assert losses == pytest.approx(expected, rel=1e-10)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x if beside is None else x + beside)))


class Own(nn.Module):
    """Reads two tensors of its own making; the second one goes to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(3, 16), nn.Linear(16, CLASSES)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, places: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        x, beside = self.first(places), self.second(kinds)[:, None]
        for layer in self.layers:
            x = layer(x, beside)
        return self.head(x.mean(1))


def own_batch(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return {
        "places": torch.randn(ROWS, 9, 6, generator=random).double(),
        "kinds": torch.randn(ROWS, 3, generator=random).double(),
    }


def own() -> nn.Module:
    torch.manual_seed(0)
    return Own().double()


def own_trained(plan: str, shown: str) -> list[float] | str:
    """`shown`: how the model is told what it reads."""
    model = own()
    if shown == "attribute":
        model.dummy_inputs = own_batch(7)
    example = {name: value.float() for name, value in own_batch(7).items()} if shown == "argument" else None
    try:
        trainer = parallelize(model, sgd, plan, precision="fp64", loss=loss, example=example)
        return [trainer.step(own_batch(step)).loss for step in range(3)]
    except InputError as error:
        return str(error)


SHOWN = [
    (plan, way) for plan in ("dp2.z3", "tp2", "pp2.mb2", "pp2.mb2.z3.rc-full") for way in ("argument", "attribute")
]
FEW = {("tp2", "argument"), ("pp2.mb2.z3.rc-full", "attribute")}


@pytest.mark.parametrize(
    ("plan", "shown"), [case if case in FEW else pytest.param(*case, marks=pytest.mark.soak) for case in SHOWN]
)
def test_a_module_that_reads_what_only_its_person_knows_is_looked_at_with_an_example(
    ranks: Any, plan: str, shown: str
) -> None:
    expected = alone(own(), [own_batch(step) for step in range(3)])
    for losses in ranks.run(2, own_trained, plan, shown):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_without_an_example_a_plan_that_needs_a_look_asks_for_one(ranks: Any) -> None:
    for said in ranks.run(2, own_trained, "tp2", ""):
        assert said.startswith("plan tp2: tp(2) needs") and said.endswith(
            "give parallelize an example batch, or use tp1"
        )


class Reading(Own):
    """Reads a file in its forward."""

    def forward(self, places: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        with open("no_such_folder/scales.txt") as file:
            return super().forward(places, kinds) * float(file.read())


def reading(plan: str) -> str:
    try:
        parallelize(Reading().double(), sgd, plan, precision="fp64", loss=loss, example=own_batch(7))
    except InputError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("plan", ["tp2", "pp2.mb2", "dp2.z3"])
def test_a_forward_without_its_file_is_refused_with_its_line_and_a_remedy(ranks: Any, plan: str) -> None:
    for said in ranks.run(2, reading, plan):
        assert "FileNotFoundError" in said and "no_such_folder/scales.txt" in said and "\n" not in said
        assert " in test_input_kinds.py, line " in said and "parallelize an example" not in said
        assert said.endswith("read it earlier, in __init__ or in the data loader")


class Nested(Own):
    """Takes its second tensor from a dict of the batch."""

    def forward(self, places: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(places, more["kinds"])


def nested_batch(step: int, form: str) -> dict[str, Any]:
    batch: dict[str, Any] = own_batch(step)
    kinds = {"kinds": batch.pop("kinds")}
    return {**batch, "more": {"deep": kinds} if form == "nested twice" else UserDict(kinds) if form == "own" else kinds}


def nested_trained(plan: str, form: str) -> list[float] | str:
    torch.manual_seed(0)
    try:
        trainer = parallelize(
            Nested().double(), sgd, plan, precision="fp64", loss=loss, example=nested_batch(7, "plain")
        )
        if form == "local":
            trainer.step(LocalBatch([nested_batch(step, "plain") for step in range(2)]))
        return [trainer.step(nested_batch(step, form)).loss for step in range(3)]
    except InputError as error:
        return str(error)


@pytest.mark.parametrize(
    ("plan", "form"),
    [("dp2.mb2", "plain"), ("dp2", "own"), ("pp2.mb2", "plain"), ("tp2.mb4", "nested twice"), ("dp2.mb4", "local")],
)
def test_tensors_inside_a_value_of_the_batch_are_refused_by_name(ranks: Any, plan: str, form: str) -> None:
    kind = "UserDict" if form == "own" else "dict"
    for said in ranks.run(2, nested_trained, plan, form):
        assert said == (
            f"the batch's 'more' is a {kind} with tensors, whose rows plan {plan} cannot divide or check: put each "
            "tensor into the batch under its own name"
        )


def shared_trained(plan: str) -> list[float] | str:
    """Each value of the batch holds a tensor that is the same for all rows."""
    torch.manual_seed(0)
    trainer = parallelize(Shared().double(), sgd, plan, precision="fp64", loss=loss)
    table = torch.linspace(0.5, 2, 9).double()[:, None]
    return [trainer.step({**own_batch(step), "more": {"table": table}}).loss for step in range(3)]


class Shared(Own):
    """Scales places by a table that a dict of the batch holds."""

    def forward(self, places: torch.Tensor, kinds: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(places * more["table"], kinds)


def test_a_tensor_that_all_rows_share_may_be_inside_a_value_of_the_batch(ranks: Any) -> None:
    expected = ranks.run(1, shared_trained, "dp1.mb4")[0]
    for losses in ranks.run(2, shared_trained, "dp2"):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_tensors_inside_a_value_of_the_batch_train_in_one_pass_on_one_device(ranks: Any) -> None:
    expected = alone(own(), [own_batch(step) for step in range(3)])
    for losses in ranks.run(1, nested_trained, "dp1.mb4", "plain"):
        assert losses == pytest.approx(expected, rel=1e-10)


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.head = (
            nn.Linear(6, 16),
            nn.ModuleList(Block() for _ in range(4)),
            nn.Linear(16, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def vectors(plan: str) -> float:
    torch.manual_seed(0)
    trainer = parallelize(Vectors().double(), sgd, plan, precision="fp64", loss=loss)
    return trainer.step({"x": torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)).double()}).loss


def test_a_module_that_begins_with_a_linear_layer_needs_no_example(ranks: Any) -> None:
    torch.manual_seed(0)
    model, batch = Vectors().double(), {"x": torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)).double()}
    assert ranks.run(2, vectors, "tp2") == pytest.approx(alone(model, [batch]) * 2, rel=1e-10)


class Fixed(nn.Module):
    """Gives every block what comes of weights without a gradient: a table that is read without recording, or which
    places are empty in an embedding."""

    shift_labels = False

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.words, self.places, self.masked = nn.Embedding(19, 16, padding_idx=0), nn.Embedding(8, 16), masked
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 19)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        with torch.no_grad():
            beside = self.places(torch.arange(input_ids.shape[1]))[None] * torch.ones_like(x)
        for layer in self.layers:
            x = layer(x, (x == 0).all(-1, keepdim=True) if self.masked else beside)
        return self.head(x)


def fixed(masked: bool) -> nn.Module:
    torch.manual_seed(0)
    return Fixed(masked).double()


def fixed_batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 19, (ROWS, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def fixed_trained(plan: str, masked: bool) -> list[float] | str:
    try:
        trainer = parallelize(fixed(masked), sgd, plan, precision="fp64")
        return [trainer.step(fixed_batch(step)).loss for step in range(3)]
    except InputError as error:
        return str(error)


def fixed_loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["input_ids"].flatten())


@pytest.mark.parametrize(
    "plan", ["pp4.mb2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("pp2.mb2", "dp2.z3"))]
)
def test_what_comes_of_weights_without_a_gradient_is_sent_from_stage_to_stage(ranks: Any, plan: str) -> None:
    model = fixed(False)
    optimizer, expected = sgd(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        value = fixed_loss(model(fixed_batch(step)["input_ids"]), fixed_batch(step))
        value.backward()
        optimizer.step()
        expected.append(value.item())
    for losses in ranks.run(4 if plan.startswith("pp4") else 2, fixed_trained, plan, False):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_a_mask_that_comes_of_weights_of_another_stage_is_refused_and_not_guessed(ranks: Any) -> None:
    for said in ranks.run(2, fixed_trained, "pp2.mb2", True):
        assert (
            said == "layers.0 gets a mask or integers computed from weights of another stage, but stages send only "
            "floats: use pp1, or pass them as floats"
        )
