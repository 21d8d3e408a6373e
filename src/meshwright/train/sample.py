"""Generates a text sample from the trained model at the end of a training run. Rank 0 gathers the full weights and runs
the unsharded model without a key-value cache, so a sample is possible under every plan.

At temperature 0 the most likely token is chosen. Otherwise REPETITION_PENALTY first makes the last
PENALTY_WINDOW_TOKENS tokens less likely, since small models repeat themselves (Keskar et al., CTRL, arXiv 1909.05858).
Then a token is drawn from softmax(logits / temperature) over the `top` most likely tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from meshwright.analysis.example_inputs import bind_inputs
from meshwright.core.messages import Message
from meshwright.core.units import show_bytes, show_count
from meshwright.data.dataset import DataObjective, Dataset
from meshwright.data.instructions import IGNORED_LABEL
from meshwright.data.preferences import ANSWERS
from meshwright.data.tokens import Tokenizer
from meshwright.runtime.error_propagation import describe_error
from meshwright.runtime.loss import extract_logits
from meshwright.spec.job import LaunchSpec
from meshwright.train.model import build_model
from meshwright.train.trainer import Trainer

CODE_PROMPT, SAMPLE_TOKENS = "\n\ndef", 160
PROMPT_TOKENS = 8
"""The number of tokens of a row of text with which a sample begins."""

REPETITION_PENALTY = 1.1
PENALTY_WINDOW_TOKENS = 64
MAX_GATHERED_WEIGHT_BYTES = 4 * 2**30  # if the float32 weights of the model are larger, there is no sample


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    prompt: list[int],
    count: int,
    *,
    temperature: float = 0.5,
    top: int = 40,
    seed: int = 1,
    context: int = 0,
) -> list[int]:
    """Returns `prompt` followed by `count` new token ids. `context`: the model's largest number of input tokens, or 0
    if there is no limit. `top`: the number of most likely tokens from which a token is drawn."""
    random = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(count):
        seen = torch.tensor([ids[-context:] if context else ids])
        logits = extract_logits(model(**bind_inputs(model, {"input_ids": seen})))
        assert logits is not None
        last = logits[0, -1].float()
        if temperature == 0:
            ids.append(int(last.argmax()))
            continue
        recent = torch.tensor(ids[-PENALTY_WINDOW_TOKENS:]).unique()
        last[recent] = torch.where(
            last[recent] > 0, last[recent] / REPETITION_PENALTY, last[recent] * REPETITION_PENALTY
        )
        values, places = last.topk(min(top, last.numel()))
        chosen = torch.multinomial(torch.softmax(values / temperature, -1), 1, generator=random)
        ids.append(int(places[chosen]))
    return ids


def sample_text(
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    prompt: list[int],
    count: int,
    context: int,
    seed: int,
) -> str:
    """Loads `weights` into `model` and returns the tokens `prompt` with up to `count` generated tokens, as text.

    `model` is an unsharded module with the architecture of the trained model. `weights` needs a tied weight under
    only one of its names. `context`: as for `generate_tokens`. The text ends before the first generated end-of-text
    token.
    """
    missing, unexpected = model.load_state_dict(weights, strict=False)
    own = {name for name, _ in model.named_parameters()}
    assert not unexpected and not set(missing) & own, f"weights do not fit the model: {missing}, {unexpected}"
    model.eval()
    new = generate_tokens(model, prompt, count, context=context, seed=seed)[len(prompt) :]
    if tokenizer.end_of_text in new:
        new = new[: new.index(tokenizer.end_of_text)]
    return tokenizer.decode([*prompt, *new])


def sample_prompt(dataset: Dataset, tokenizer: Tokenizer, is_code: bool) -> list[int]:
    """Returns the tokens with which the sample begins, from a row of the data set, a validation row if there is one.

    A conversation or a preference pair gives the tokens before its first learned token, so that the model answers the
    user. Text gives PROMPT_TOKENS tokens. `is_code`: whether the data are the sources of Python's library, which get
    CODE_PROMPT.
    """
    if is_code:
        return [tokenizer.end_of_text, *map(int, tokenizer.encode([CODE_PROMPT])[0])]
    first = np.zeros(1, np.int64)
    row = dataset.validation(first) if dataset.validation_rows else dataset.training(first, first, 0)
    labels = row["labels"] if "labels" in row else row[f"{ANSWERS[0]}_labels"]
    begin = int((labels[0] != IGNORED_LABEL).int().argmax())
    return [int(each) for each in row["input_ids"][0, : begin or PROMPT_TOKENS]]


def sample_of_run(
    trainer: Trainer, launch: LaunchSpec, objective: DataObjective, dataset: Dataset, parameters: int
) -> dict[str, str] | None:
    """Returns the fields of the message `sample`: the generated text, or the reason (`why`) for its absence.

    All ranks call it, since it gathers the weights. If a sample is possible, ranks other than 0 return None.
    `parameters`: the number of parameters of the model.
    """
    tokenizer = dataset.tokenizer
    why = no_sample_reason(objective, tokenizer, 4.0 * parameters)
    if why:
        return {"why": why}
    weights = trainer.full_state_dict()
    if weights is None:
        return None
    if not all(bool(torch.isfinite(weight).all()) for weight in weights.values()):
        return {"why": Message("weights are not finite: the model cannot generate text")}
    assert tokenizer is not None
    work = launch.workload
    try:
        prompt = sample_prompt(dataset, tokenizer, launch.data.sources == ("stdlib",))
        model = build_model(launch.model, work.seed, weights=False, lora=work.lora)
        text = sample_text(model, weights, tokenizer, prompt, SAMPLE_TOKENS, work.sequence, work.seed)
    except Exception as error:  # the run is complete and saved, such as when its data have been deleted
        kind, line = describe_error(error)
        return {
            "why": Message(
                "{error}; the weights are saved: `meshwright checkpoint export RUN --to FOLDER` writes them for "
                "transformers, which generates text",
                error=f"{kind}: {line}" if kind else line,
            )
        }
    return {"text": text.strip("\n"), "parameters": show_count(parameters)}


def no_sample_reason(objective: DataObjective, tokenizer: Tokenizer | None, bytes_of_weights: float) -> str:
    """Returns why no sample is possible, as a line for the user, or ''."""
    if objective == "pairs":
        return Message(
            "samples of encoder-decoder models are not supported: export the checkpoint and generate with transformers"
        )
    if objective != "causal":
        return Message("the model's objective is {objective}, so it does not generate text", objective=objective)
    if tokenizer is None:
        return Message("the data are token arrays and no tokenizer is named: set data.tokenizer")
    if bytes_of_weights > MAX_GATHERED_WEIGHT_BYTES:
        return Message(
            "the weights ({bytes_of_weights}) are too large to gather on one rank; export the checkpoint instead",
            bytes_of_weights=show_bytes(bytes_of_weights),
        )
    return ""
