"""Models of an encoder and a decoder that are given what is read and what is to be written: the decoder reads labels
one place later, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import FAMILIES, FFN, HEADS, HIDDEN, LAYERS, VOCABULARY, roughened

from meshwright.core.errors import InputError
from meshwright.runtime.loss import LossHead
from meshwright.spec.plan import parse_plan
from meshwright.train.proof.reference_run import use_float64
from meshwright.train.trainer import parallelize

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

STACKS = {
    "d_model": HIDDEN, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": FFN, "decoder_ffn_dim": FFN, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32, "pad_token_id": 0, "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip
MODELS = {
    "t5": ("T5ForConditionalGeneration", FAMILIES["t5"][1]),
    "bart": ("BartForConditionalGeneration", STACKS),
    "blenderbot": ("BlenderbotForConditionalGeneration", STACKS),
    "marian": ("MarianMTModel", {**STACKS, "decoder_vocab_size": VOCABULARY}),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "use_cache": False},
    ),
}
INNER = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8,
    "query_pre_attn_scalar": 8, "use_cache": False,
}  # fmt: skip
"""Of each stack of T5Gemma: two tables, of which the head holds the second; fewer key-value heads than ranks."""


def build(name: str, **other: Any) -> Any:
    kind = getattr(transformers, MODELS[name][0])
    stacks = (
        {part: transformers.T5GemmaModuleConfig(**INNER) for part in ("encoder", "decoder")}
        if name == "t5gemma"
        else {}
    )
    config = kind.config_class(**{**MODELS[name][1], **stacks, **other})
    for one in (config, *stacks.values()):
        for key, value in one.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(one, key, 0.0)
    torch.manual_seed(0)
    return roughened(kind(config))


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs, labels = (torch.randint(2, VOCABULARY, (8, length), generator=generator) for length in (12, 9))
    for row in range(8):
        labels[row, 9 - row :] = -100
    return {"input_ids": inputs, "labels": labels}


def losses(name: str, plan: str) -> list[float]:
    trainer = parallelize(
        use_float64(build(name).double()), lambda given: torch.optim.AdamW(given, lr=1e-2), plan, precision="fp64"
    )
    found = [trainer.step(batch()).loss for _ in range(2)]
    trainer.close()
    return found


def alone(name: str) -> list[float]:
    """By the model's own loss of inputs and labels."""
    model = use_float64(build(name).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("t5", "pp2.mb4"),
        pytest.param("bart", "dp2.z3.mb2", marks=pytest.mark.soak),
        pytest.param("blenderbot", "tp2.mb4", marks=pytest.mark.soak),
        pytest.param("t5gemma", "tp4.mb4", marks=pytest.mark.soak),
        pytest.param("marian", "pp2.mb4", marks=pytest.mark.soak),
    ],
)
def test_inputs_and_labels_alone_train_an_encoder_and_decoder_as_its_own_loss_does(
    ranks: Any, name: str, plan: str
) -> None:
    for found in ranks.run(parse_plan(plan).world, losses, name, plan):
        assert found == pytest.approx(alone(name), rel=1e-10)


def test_without_a_token_to_start_with_the_batch_must_say_what_the_decoder_reads() -> None:
    with pytest.raises(InputError, match=r"no 'decoder_input_ids' .*set decoder_start_token_id") as said:
        LossHead(build("t5", decoder_start_token_id=None), None, None).inputs(batch())
    assert "\n" not in str(said.value)


def test_what_the_batch_says_the_decoder_reads_is_left_as_it_is() -> None:
    own = torch.full((8, 9), 7)
    assert LossHead(build("bart"), None, None).inputs({**batch(), "decoder_input_ids": own})["decoder_input_ids"] is own


def seeing() -> Any:
    """Qwen3-VL, which is named as an encoder-decoder is and writes alone."""
    text = {
        key: INNER[key]
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_key_value_heads",
            "head_dim",
        )
    }
    images = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": HIDDEN,
        "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(text_config={**text, "num_attention_heads": HEADS}, vision_config=images)
    return transformers.Qwen3VLForConditionalGeneration(config)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def first_loss(plan: str) -> float:
    """On every rank: the first loss."""
    trainer = parallelize(seeing(), lambda given: torch.optim.SGD(given, lr=0.1), plan, precision="fp64")
    return float(trainer.gradients(tokens())[0])


def test_a_model_that_sees_and_writes_alone_has_the_loss_that_it_has_on_one_device(ranks: Any) -> None:
    expected = seeing().double()(**tokens()).loss.item()
    assert ranks.run(2, first_loss, "dp2.mb1") == pytest.approx(
        [expected] * 2, rel=1e-6
    )  # its own loss rounds logits to float32


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_adapters_around_a_model_that_writes_do_not_move_its_labels() -> None:
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    wrapped = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"]))
    assert not type(wrapped).__name__.endswith("ForCausalLM")
    assert LossHead(wrapped, None, None).shift
    assert not LossHead(build("t5"), None, None).shift
