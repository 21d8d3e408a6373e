"""Builds the model, the dataset and the batch loader of a job on every rank. The training loop, trials, verification
and text samples use it.

The model comes from one of three sources: the sizes of a reference model, a Hugging Face folder, or a user's function.
The function is named `package.module:function`. It is imported from the current folder or from an installed package.

LoRA fine-tuning: peft wraps the target layers. Only the low-rank matrices A and B are trained. All other parameters are
frozen: they have no gradient and no optimizer state, and no reduction includes them (runtime/zero/param_group.py). For
the sharding of adapters see analysis/lora.py.

Guarantees:
- With the same seed, the initial weights are equal on every rank and under every plan.
- Nothing is downloaded, and code in a model folder is never run.
- The initial adapters depend only on the seed and the order of layers, even if the model is on the meta device.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.analysis.block_lists import find_block_lists
from meshwright.analysis.declared_regions import USER_RULES_ATTRIBUTE
from meshwright.analysis.dry_run import in_eval_mode
from meshwright.analysis.example_inputs import extra_inputs, make_example
from meshwright.analysis.lora import lora_layers
from meshwright.analysis.nf4 import nf4_layers, quantize_base
from meshwright.analysis.run_conditions import MAX_RANDOM_PARAMS, random_weights
from meshwright.checkpoint.hf_weights import has_weights
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.data.dataset import DataObjective, Dataset
from meshwright.data.loader import BatchLoader
from meshwright.data.mixture import open_mixture
from meshwright.models.registry import build_from_config, build_reference_model, transformers_class
from meshwright.runtime.deferred_init import build_deferred
from meshwright.runtime.expert_parallel.load_balancing import BIAS_RATE_ATTRIBUTE, CAPACITY_ATTRIBUTE
from meshwright.runtime.loss import is_encoder_decoder, predicts_next_token
from meshwright.runtime.preference_loss import PreferenceLoss
from meshwright.spec.job import LaunchSpec, ModelSource
from meshwright.spec.workload import LoraConfig, Workload
from meshwright.train.meta_init import init_on_meta


def load_user_function(name: str, what: str) -> Callable[..., Any]:
    """Imports and returns the user's function `name` (`package.module:function` or `FILE.py:function`).

    `what` says in error messages what the function is for, such as "model". Raises InputError if the module, the file
    or the function does not exist.
    """
    module_name, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = _import_file(name, what) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise InputError(
            Message(
                "{what} {name!r}: module {error!r} is neither in the current folder nor installed",
                what=what,
                name=name,
                error=error.name,
            )
        ) from None
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None:
        raise InputError(
            Message(
                "{what} {name!r}: module {module_name!r} has no {function!r}{hint}",
                what=what,
                name=name,
                module_name=module_name,
                function=function,
                hint=did_you_mean(function, vars(module)),
            )
        )
    return found


def _import_file(name: str, what: str) -> ModuleType:
    """Runs the file of `FILE.py:function` as a module, which finds other modules in its own folder."""
    path = Path(name.partition(":")[0])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        if error.filename is None or Path(error.filename) != path.absolute():  # the user's code reads another file
            raise
        raise InputError(Message("{what} {name!r}: no file {file}", what=what, name=name, file=str(path))) from None
    finally:
        sys.path.pop(0)
    return module


def attach_lora(model: nn.Module, lora: LoraConfig, seed: int) -> None:
    """Wraps the layers `lora.target` of `model` (default: all linear layers) with LoRA adapters, and freezes all other
    parameters. With `lora.base`, linear layers of the blocks are stored in 4 bits. `seed`: the seed of the initial
    adapters. Raises InputError if peft is not installed, if a target does
    not exist, or if peft refuses the configuration."""
    try:
        import peft
    except ImportError:
        raise InputError(Message("LoRA needs peft: pip install 'meshwright[peft]'")) from None
    if lora.base is not None and not nf4_layers(model):
        quantize_base(model)
    layers = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    known = {path.rpartition(".")[2] for path in layers}
    for target in lora.target:
        if target.rpartition(".")[2] not in known:
            raise InputError(
                Message(
                    "lora.target {target!r} is not a linear layer of this model{hint}; its linear layers are {known}",
                    target=target,
                    hint=did_you_mean(target, known),
                    known=", ".join(sorted(known)),
                )
            )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.target)
        or (_linear_targets(model, layers) if _has_stacked_experts(model) or not _names_head(model) else "all-linear"),
        lora_dropout=0.0,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about transposed weights (Conv1D), although it supports them
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise InputError(Message("lora: {error}", error=str(error).partition(chr(10))[0][:200])) from error
    random = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        for one in ("lora_A", "lora_B"):
            for adapter in layer.get_submodule(one).children():
                adapter.to_empty(device="cpu")
                with torch.no_grad():
                    weight = adapter.get_parameter("weight")
                    drawn = torch.zeros(weight.shape)  # float32: the values must not depend on the weight's dtype
                    weight.copy_(
                        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=random) if one == "lora_A" else drawn
                    )


def _has_stacked_experts(model: nn.Module) -> bool:
    """Returns whether the model stores the weights of its experts in three-dimensional parameters. For such models,
    peft's "all-linear" would nest one wrapper inside another."""
    return any(parameter.ndim == 3 for parameter in model.parameters()) and any(
        "expert" in name.lower() for name, _ in model.named_modules()
    )


def _names_head(model: nn.Module) -> bool:
    """Returns whether the model has the method of transformers that returns its output head."""
    return callable(getattr(model, "get_output_embeddings", None))


def _linear_targets(model: nn.Module, layers: list[str]) -> list[str]:
    """Returns the layers that peft's "all-linear" denotes: every linear layer except the output head. A model without
    the method of transformers does not name its head; then these are the linear layers of its blocks."""
    if _names_head(model):
        head = model.get_output_embeddings()  # type: ignore[operator]
        return [path for path in layers if model.get_submodule(path) is not head]
    blocks = tuple(f"{path}." for path in find_block_lists(model))
    return [path for path in layers if path.startswith(blocks)] if blocks else layers


def build_model(
    source: ModelSource,
    seed: int,
    weights: bool = True,
    lora: LoraConfig | None = None,
    capacity: float | None = None,
    bias_rate: float | None = None,
) -> nn.Module:
    """Builds the unsharded model in float32. A user's function may choose other dtypes.

    If `weights` is true, parameters are on the meta device, and each rank later materializes its shards: from the
    weights in the model folder (meta_init.py), or with the model's own initialization code (runtime/deferred_init.py).
    If there is no weight file and this code cannot be recorded, the model is built in host memory. If `weights` is
    false, the model is built in host memory and initialized by its own code, even if its folder has weights.

    With `lora`, all parameters except the adapters are frozen. `capacity` is the capacity factor of the experts and
    `bias_rate` the update rate of the router bias (runtime/expert_parallel/load_balancing.py); None leaves the model's
    setting.
    """
    filled = weights and bool(source.folder) and has_weights(Path(source.folder))
    if source.sizes:
        make: Callable[[], nn.Module] = partial(build_reference_model, source.sizes)
    else:
        make = _hf_model_builder(Path(source.folder), filled) if source.folder else partial(_user_model, source.module)
    if lora is not None and lora.base is not None:
        make = partial(_with_quantized_base, make)
    torch.manual_seed(seed)
    if filled:
        with init_on_meta():
            model = make()
    else:
        model = build_deferred(make, seed) if weights else make()
    if source.rules:
        setattr(model, USER_RULES_ATTRIBUTE, source.rules)
    if lora is not None:
        attach_lora(model, lora, seed)
    if capacity is not None:
        setattr(model, CAPACITY_ATTRIBUTE, capacity)
    if bias_rate is not None:
        setattr(model, BIAS_RATE_ATTRIBUTE, bias_rate)
    return model


def _with_quantized_base(make: Callable[[], nn.Module]) -> nn.Module:
    return quantize_base(make())


def _hf_model_builder(folder: Path, filled: bool) -> Callable[[], nn.Module]:
    """Returns a function that builds the model from the configuration in `folder`. `filled`: whether weights will be
    loaded into the model; quantized weights are then an InputError."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise InputError(
            Message(
                "model folder {folder!r} needs transformers: pip install 'meshwright[huggingface]'", folder=str(folder)
            )
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0][:200]
        raise InputError(
            Message(
                "{folder}: transformers {version} cannot read it: {reason}",
                folder=folder / "config.json",
                version=transformers.__version__,
                reason=reason,
            )
        ) from error
    transformers_class(config)  # refuses an unknown architecture now, not when the model is built
    if filled and getattr(config, "quantization_config", None):
        raise InputError(
            Message(
                "{folder}: its weights are quantized and cannot be trained: dequantize them first",
                folder=folder / "config.json",
            )
        )
    return partial(build_from_config, config)


def _user_model(name: str) -> nn.Module:
    model = load_user_function(name, "model")()
    if not isinstance(model, nn.Module):
        raise InputError(
            Message("model {name!r} returned a {type}, not a torch.nn.Module", name=name, type=type(model).__name__)
        )
    return model


def model_objective(source: ModelSource, model: nn.Module) -> DataObjective:
    """Returns what the model learns to predict: the next token ("causal"), masked tokens ("masked"), a target sequence
    ("pairs"), or image classes ("images"). Raises InputError if the model needs inputs other than token ids or images.
    """
    others = extra_inputs(make_example(model))
    if others:
        raise InputError(
            Message(
                "model {source!r} reads {others}, but the data of a job are token ids or images: train it in your "
                "own loop, with meshwright.parallelize and trainer.step",
                source=source.name,
                others=", ".join(others),
            )
        )
    kind = str(source.sizes.get("kind", ""))
    if kind == "convnet" or type(model).__name__.endswith("ForImageClassification"):
        return "images"
    if is_encoder_decoder(model):
        return "pairs"
    return "masked" if kind == "bert" or type(model).__name__.endswith("ForMaskedLM") else "causal"


def open_training_data(
    launch: LaunchSpec,
    model: nn.Module,
    objective: DataObjective,
    note: Callable[[str], None],
    report_corruption: Callable[[str], None],
) -> Dataset:
    """Opens the dataset of a launch. Calls `note` with lines for the user, and `report_corruption` with lines about
    damaged data. Raises InputError if the model cannot use the dataset."""
    positions = accepts_packed_documents(model)
    if launch.data.documents == "apart" and not positions:
        raise InputError(
            Message(
                "data.documents=apart: {type} does not use position_ids to keep its attention inside a document",
                type=type(model).__name__,
            )
        )
    if launch.workload.preference is not None:
        _check_preference(launch, model, objective, positions)
        objective = "preference"
    vocabulary = vocabulary_size(launch.model, model) or launch.vocabulary
    return open_mixture(
        launch.data, launch.workload.sequence, vocabulary, objective, note, positions, report_corruption
    )


def _check_preference(launch: LaunchSpec, model: nn.Module, objective: DataObjective, positions: bool) -> None:
    """Raises InputError if the model cannot be trained on preference pairs. `positions`: the result of
    `accepts_packed_documents`."""
    loss = launch.workload.preference.loss if launch.workload.preference else ""
    if objective != "causal" or not positions:
        why = (
            Message("its objective is {objective}, not to predict the next token", objective=objective)
            if objective != "causal"
            else Message("it does not use position_ids to keep the attention of the two answers of a row apart")
        )
        raise InputError(Message("{loss} cannot train {type}: {why}", loss=loss, type=type(model).__name__, why=why))
    if launch.data.weights:
        raise InputError(Message("{loss} reads one source: leave data.weights out", loss=loss))


def preference_loss(workload: Workload) -> PreferenceLoss | None:
    """Returns the loss of a workload that trains on preference pairs, otherwise None."""
    chosen = workload.preference
    return None if chosen is None else PreferenceLoss(chosen.loss, chosen.beta)


def build_loader(dataset: Dataset, objective: DataObjective, model: nn.Module, workload: Workload) -> BatchLoader:
    """Returns the loader of a job's batches. A causal loss must compare the logits at position t with token t + 1. If
    the model's loss does not shift the labels by one position, the loader does."""
    shifts = objective == "causal" and workload.preference is None and not predicts_next_token(model)
    return BatchLoader(dataset, workload.batch, workload.seed, next_token=shifts)


def accepts_packed_documents(model: nn.Module) -> bool:
    """Returns whether a row of a batch may contain several documents. In such a row, position ids restart at 0 at each
    document, and attention must not cross the boundary between documents.

    The model must meet two conditions:
    1. Its forward has the argument `position_ids`.
    2. Tokens before a restart do not affect tokens after the restart.

    A model with real weights is run to test condition 2. A model on the meta device counts as meeting it if its code
    passes position ids to a mask function. Any other model on the meta device is run with temporary random weights, but
    not if it has more than MAX_RANDOM_PARAMS parameters; the result is then False.

    If the result is False, each row of conversation data has one conversation, and separate documents in a row
    (data.documents) are refused.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    if not any(parameter.is_meta for parameter in model.parameters()):
        return _isolates_documents(model)
    if _masks_by_positions(type(model)):
        return True
    if sum(parameter.numel() for parameter in model.parameters()) > MAX_RANDOM_PARAMS:
        return False
    with random_weights(model, lambda path: True):
        return _isolates_documents(model)


def _masks_by_positions(kind: type) -> bool:
    try:
        ours = (parent.__module__ for parent in kind.__mro__ if parent.__module__.startswith("meshwright.models."))
        code = "".join(inspect.getsource(sys.modules[name]) for name in (kind.__module__, *ours))
    except (OSError, TypeError, KeyError):
        return False
    return (
        re.search(r"(create_causal_mask\([^)]*position_ids=|\"position_ids\": |= attention_mask\()position_ids", code)
        is not None
    )


@torch.no_grad()
def _isolates_documents(model: nn.Module) -> bool:
    """Returns whether documents in a row do not affect each other. The model runs on two rows of two documents each;
    the rows differ only in their first document. The logits of the first document must then differ between the rows,
    and the logits of the second document must be equal."""
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
    return torch.allclose(logits[0, 3:], logits[1, 3:], rtol=1e-4, atol=1e-5) and not torch.allclose(
        logits[0, :3], logits[1, :3]
    )


def vocabulary_size(source: ModelSource, model: nn.Module) -> int:
    """Returns the size of the model's vocabulary (or its number of image classes), or 0 if it is unknown."""
    sizes = source.sizes
    if sizes:
        return int(sizes.get("classes") or sizes.get("vocab") or 0)
    config = getattr(model, "config", None)
    found = getattr(config, "vocab_size", 0) or getattr(model, "vocabulary", 0)
    return int(found or 0)
