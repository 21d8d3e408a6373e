"""The module that a launch names: a reference model from its sizes, a Hugging Face folder, or what a function returns.

Promise: the same seed gives the same weights on every rank and under every plan. Nothing is downloaded and no code of a model folder is run.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.anatomy.inputs import beyond, example_of
from meshwright.anatomy.lent import LENT, lent
from meshwright.anatomy.observed import in_eval_mode
from meshwright.anatomy.ruled import RULES
from meshwright.base.errors import InputError
from meshwright.checkpoint.weights import has_weights
from meshwright.data.dataset import Dataset, Objective
from meshwright.data.loader import Loader
from meshwright.models.registry import build
from meshwright.parallel.experts.bias import RATE
from meshwright.parallel.experts.capacity import FACTOR
from meshwright.parallel.later import built_later
from meshwright.parallel.objective import shifts, writes_beside
from meshwright.spec.launch import ModelSource
from meshwright.spec.workload import Lora, Workload
from meshwright.train.adapters import attach
from meshwright.train.live import live
from meshwright.train.start import without_memory


def build_model(
    source: ModelSource,
    seed: int,
    weights: bool = True,
    lora: Lora | None = None,
    capacity: float | None = None,
    bias_rate: float | None = None,
) -> nn.Module:
    """The whole model in float32, without memory: it is filled when it is cut, from its folder's weights (start.py) or as it is initialized
    (parallel/later.py). Without `weights` on the host, as it is initialized, whatever its folder holds. With `lora` all but its adapters is
    frozen; `capacity` and `bias_rate`: of its experts."""
    filled = weights and bool(source.folder) and has_weights(Path(source.folder))
    if source.sizes:
        make: Callable[[], nn.Module] = partial(build, source.sizes)
    else:
        make = _in_folder(Path(source.folder), filled) if source.folder else partial(_from_module, source.module)
    torch.manual_seed(seed)
    if filled:
        with without_memory():
            model = make()
    else:
        model = built_later(make, seed) if weights else make()
    if source.rules:
        setattr(model, RULES, source.rules)
    if lora is not None:
        attach(model, lora, seed)
    if capacity is not None:
        setattr(model, FACTOR, capacity)
    if bias_rate is not None:
        setattr(model, RATE, bias_rate)
    return model


def _in_folder(folder: Path, filled: bool) -> Callable[[], nn.Module]:
    """What builds the model of the folder's configuration; `filled`: its weights will be read."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise InputError(f"model folder {str(folder)!r} needs transformers: pip install 'meshwright[huggingface]'") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0][:200]
        raise InputError(f"{folder / 'config.json'}: transformers {transformers.__version__} cannot read it: {reason}") from error
    names = list(getattr(config, "architectures", None) or [])
    usual = transformers.AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else transformers.AutoModelForCausalLM
    kind: Any = getattr(transformers, names[0], None) if names else usual
    if kind is None:
        raise InputError(f"{folder / 'config.json'}: transformers {transformers.__version__} has no architecture {names[0]!r}")
    if filled and getattr(config, "quantization_config", None):
        raise InputError(f"{folder / 'config.json'}: its weights are quantized and cannot be trained: undo the quantization first")
    if not names:
        return lambda: kind.from_config(copy.deepcopy(config), dtype=torch.float32)
    return lambda: kind(copy.deepcopy(config))


def _from_module(name: str) -> nn.Module:
    model = live(name, "model")()
    if not isinstance(model, nn.Module):
        raise InputError(f"model {name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def objective_of(source: ModelSource, model: nn.Module) -> Objective:
    """What the model learns: the next token, masked tokens, a row behind another, or the kind of an image. Raises InputError where it reads something else."""
    others = beyond(example_of(model))
    if others:
        raise InputError(
            f"model {source.name!r} reads {', '.join(others)}, and the data of a job are token ids or images: train it in a loop of your own, "
            "with meshwright.parallelize and trainer.step"
        )
    kind = str(source.sizes.get("kind", ""))
    if kind == "convnet" or type(model).__name__.endswith("ForImageClassification"):
        return "images"
    if writes_beside(model):
        return "pairs"
    return "masked" if kind == "bert" or type(model).__name__.endswith("ForMaskedLM") else "causal"


def loader_of(dataset: Dataset, objective: Objective, model: nn.Module, workload: Workload) -> Loader:
    """Returns the loader of a job's batches.

    A causal loss compares the logits at position t with token t + 1. Where the model's loss does not shift the labels by one position itself, the loader does:
    otherwise the model would learn to copy its input.
    """
    return Loader(dataset, workload.batch, workload.seed, next_token=objective == "causal" and not shifts(model))


def takes_positions(model: nn.Module) -> bool:
    """Whether rows may hold several documents: positions that begin anew tell the model not to look across.

    Rule: its forward takes them, and what stands before such a place changes nothing behind it. Of a model without memory its own code says so,
    where it hands positions to a maker of masks; else it is asked with numbers that are lent, where it is not too large for that. Any other
    model gets one conversation a row.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    if not any(parameter.is_meta for parameter in model.parameters()):
        return _looks_not_across(model)
    if _masks_by_positions(type(model)):
        return True
    if sum(parameter.numel() for parameter in model.parameters()) > LENT:
        return False
    with lent(model, lambda path: True):
        return _looks_not_across(model)


def _masks_by_positions(kind: type) -> bool:
    try:
        ours = (parent.__module__ for parent in kind.__mro__ if parent.__module__.startswith("meshwright.models."))
        code = "".join(inspect.getsource(sys.modules[name]) for name in (kind.__module__, *ours))
    except (OSError, TypeError, KeyError):
        return False
    return re.search(r"(create_causal_mask\([^)]*position_ids=|\"position_ids\": |document_mask\()position_ids", code) is not None


@torch.no_grad()
def _looks_not_across(model: nn.Module) -> bool:
    """Two rows that differ in their first document alone: the second one must give the same, and the first one not."""
    device = next(model.parameters()).device
    ids = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 2, 4, 5]], device=device)
    places = torch.tensor([[0, 1, 2, 0, 1]], device=device).expand(2, -1)
    try:
        with in_eval_mode(model):
            output = model(input_ids=ids, position_ids=places)
    except Exception:
        return False
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if logits is None or logits.ndim < 3:
        return False
    return torch.allclose(logits[0, 3:], logits[1, 3:], rtol=1e-4, atol=1e-5) and not torch.allclose(logits[0, :3], logits[1, :3])


def vocabulary_of(source: ModelSource, model: nn.Module) -> int:
    """Tokens (or classes) that the model knows; 0 when it does not say."""
    sizes = source.sizes
    if sizes:
        return int(sizes.get("classes") or sizes.get("vocab") or 0)
    config = getattr(model, "config", None)
    found = getattr(config, "vocab_size", 0) or getattr(model, "vocabulary", 0)
    return int(found or 0)
