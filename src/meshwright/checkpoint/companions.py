"""What stands beside the weights in a Hugging Face folder: tokenizer, chat template, how to generate.

Rule: a tokenizer that came from a folder goes out as it came, file by file; one that was trained here goes out in the same form, with the
settings that `AutoTokenizer` needs. Nothing in these files is run.
"""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.base.codec import parse, read_text

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
GENERATION = "generation_config.json"
SETTINGS = "tokenizer_config.json"
START = "decoder_start_token_id"


def companions(tokenizer: Path | None, model: Path | None, end_of_text: str, mask: str) -> dict[str, bytes]:
    """The files beside the weights, by name. `tokenizer`, `model`: the folders that the run's tokenizer and its model came from, where they did.

    `end_of_text`, `mask`: the special tokens of a tokenizer that was trained here.
    """
    found = {name: (tokenizer / name).read_bytes() for name in TOKENIZER if tokenizer and (tokenizer / name).is_file()}
    if model is not None and (model / GENERATION).is_file():
        found[GENERATION] = (model / GENERATION).read_bytes()
    elif (
        model is not None and (start := _starts_with(model)) is not None
    ):  # transformers asks a file that is there, and then no configuration
        found[GENERATION] = json.dumps({START: start}, indent=2).encode()
    if tokenizer is not None and found.keys() & set(TOKENIZER) == {"tokenizer.json"}:
        known = {entry["content"]: entry["id"] for entry in parse(read_text(tokenizer / "tokenizer.json"), str(tokenizer))["added_tokens"]}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        special = {"eos_token": end_of_text, "pad_token": end_of_text, "mask_token": mask}
        found[SETTINGS] = json.dumps({**settings, **{key: word for key, word in special.items() if word in known}}, indent=2).encode()
        if end_of_text in known:
            ends = {"eos_token_id": known[end_of_text], "pad_token_id": known[end_of_text]}
            found[GENERATION] = json.dumps({**json.loads(found.get(GENERATION, b"{}")), **ends}, indent=2).encode()
    return found


def _starts_with(model: Path) -> int | None:
    """What the decoder of an encoder-decoder model begins with, where the folder's configuration says it."""
    config = model / "config.json"
    found = parse(read_text(config), str(config)).get(START) if config.is_file() else None
    return found if isinstance(found, int) else None
