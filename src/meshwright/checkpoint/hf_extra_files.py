"""Makes the files that accompany the weights in a Hugging Face folder: tokenizer, chat template, generation settings,
configuration.

A tokenizer from a folder is copied file by file. A tokenizer that was trained here is written in the same format, with
the settings that `AutoTokenizer` needs. Nothing in these files is executed.

`hf_template` translates the sizes of a reference model into a Hugging Face config.json. A Llama with biases only on
query, key and value becomes a Qwen2. Hugging Face's GPT-2 stores its projections as (in, out), so these matrices are
transposed. BERT and the convolutional network differ from Hugging Face's models in more than names, so they have no
config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.core import storage
from meshwright.core.codec import parse_text, read_text_file

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
DECODER_START_KEY = "decoder_start_token_id"


def read_extra_files(tokenizer: Path | None, model: Path | None, end_of_text: str, mask: str) -> dict[str, bytes]:
    """Returns the files that accompany the weights, by name.

    `tokenizer` and `model` are the folders of the run's tokenizer and model, or None if there is no such folder.
    `end_of_text` and `mask` are the special tokens of a tokenizer that was trained here.
    """
    found = {
        name: storage.read_file(tokenizer / name, links=True)
        for name in TOKENIZER_FILES
        if tokenizer and storage.is_file(tokenizer / name)
    }
    if model is not None and (model / GENERATION_CONFIG_FILE).is_file():
        found[GENERATION_CONFIG_FILE] = (model / GENERATION_CONFIG_FILE).read_bytes()
    # transformers prefers this file, if it exists, to the generation settings in config.json.
    elif model is not None and (start := _decoder_start_token(model)) is not None:
        found[GENERATION_CONFIG_FILE] = json.dumps({DECODER_START_KEY: start}, indent=2).encode()
    if tokenizer is not None and found.keys() & set(TOKENIZER_FILES) == {"tokenizer.json"}:
        known = {
            entry["content"]: entry["id"]
            for entry in parse_text(found["tokenizer.json"].decode(), str(tokenizer))["added_tokens"]
        }
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        special = {"eos_token": end_of_text, "pad_token": end_of_text, "mask_token": mask}
        found[TOKENIZER_CONFIG_FILE] = json.dumps(
            {**settings, **{key: word for key, word in special.items() if word in known}}, indent=2
        ).encode()
        if end_of_text in known:
            ends = {"eos_token_id": known[end_of_text], "pad_token_id": known[end_of_text]}
            found[GENERATION_CONFIG_FILE] = json.dumps(
                {**json.loads(found.get(GENERATION_CONFIG_FILE, b"{}")), **ends}, indent=2
            ).encode()
    return found


def _decoder_start_token(model: Path) -> int | None:
    """Returns the first decoder token of an encoder-decoder model, or None if the configuration does not define it."""
    config = model / "config.json"
    found = parse_text(read_text_file(config), str(config)).get(DECODER_START_KEY) if config.is_file() else None
    return found if isinstance(found, int) else None


class HfTemplate(NamedTuple):
    """The config.json of a model, and the name suffixes of the matrices to transpose."""

    config: dict[str, Any]
    transposed: tuple[str, ...] = ()


def hf_template(sizes: Mapping[str, Any]) -> HfTemplate | None:
    """Returns the Hugging Face form of a reference model, or None if transformers has no such model.

    `sizes` has the keys of `models.registry`.
    """
    given = {name: value for name, value in sizes.items() if value not in ("", None)}
    kind = given.get("kind") or ("gpt2" if given.get("pos") == "learned" else "llama")
    if kind == "llama":
        return HfTemplate(_llama_config(given))
    if kind == "gpt2":
        return HfTemplate(_gpt2_config(given), ("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return None


def _llama_config(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, base, biased = (
        int(given["heads"]),
        float(given.get("rope_base", 10_000.0)),
        bool(int(given.get("qkv_bias", 0))),
    )
    return {
        "architectures": ["Qwen2ForCausalLM" if biased else "LlamaForCausalLM"],
        "model_type": "qwen2" if biased else "llama",
        "hidden_size": int(given["hidden"]),
        "intermediate_size": int(given["ffn"]),
        "num_hidden_layers": int(given["layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(given.get("kv_heads", heads)),
        "head_dim": int(float(given.get("head_dim", 0))) or int(given["hidden"]) // heads,
        "vocab_size": int(given["vocab"]),
        "max_position_embeddings": int(given["seq"]),
        "rms_norm_eps": 1e-5,
        "rope_theta": base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "hidden_act": "silu",
        "tie_word_embeddings": _has_tied_embeddings(given, False),
    }


def _gpt2_config(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": int(given["hidden"]),
        "n_inner": int(given["ffn"]),
        "n_layer": int(given["layers"]),
        "n_head": int(given["heads"]),
        "vocab_size": int(given["vocab"]),
        "n_positions": int(float(given.get("pos_rows", given["seq"]))),
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": _has_tied_embeddings(given, True),
    }


def _has_tied_embeddings(given: Mapping[str, Any], otherwise: bool) -> bool:
    return bool(int(given.get("tied", given.get("tied_embeddings", otherwise))))
