"""Fine-tuning by low-rank adapters: peft wraps the layers, only A and B are trained, everything else is frozen.

Promise: the adapters are a pure function of (seed, order of layers), also on a model that was built without memory. What is frozen has no
gradient, no optimizer state, and takes no part in any reduction (parallel/zero/flat.py); how ranks share it is said by anatomy/adapters.py.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import nn

from meshwright.anatomy.adapters import wrapped_layers
from meshwright.base.errors import InputError, did_you_mean
from meshwright.spec.workload import Lora


def attach(model: nn.Module, lora: Lora, seed: int) -> None:
    """Wrap the target layers of `model` and freeze all else. InputError when peft is missing or a target is not there."""
    try:
        import peft
    except ImportError:
        raise InputError("LoRA needs peft: pip install 'meshwright[peft]'") from None
    layers = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"]
    known = {path.rpartition(".")[2] for path in layers}
    for target in lora.target:
        if target.rpartition(".")[2] not in known:
            raise InputError(
                f"lora.target {target!r} is no layer of this model{did_you_mean(target, known)}; it has {', '.join(sorted(known))}"
            )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.target) or (_linear(model, layers) if _stacks(model) else "all-linear"),
        lora_dropout=0.0,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which way round a layer keeps its weight, peft finds out by itself and says so
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise InputError(f"lora: {str(error).partition(chr(10))[0][:200]}") from error
    random = torch.Generator().manual_seed(seed)
    for layer in wrapped_layers(model).values():
        for one in ("lora_A", "lora_B"):
            for adapter in layer.get_submodule(one).children():
                adapter.to_empty(device="cpu")
                with torch.no_grad():
                    weight = adapter.get_parameter("weight")
                    drawn = torch.zeros(weight.shape)  # in float32, whatever the type: the same numbers
                    weight.copy_(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=random) if one == "lora_A" else drawn)


def _stacks(model: nn.Module) -> bool:
    """Whether a module holds matrices in stacks, as experts do: peft would take these for linear layers too, and each is wrapped around the last."""
    return any(parameter.ndim == 3 for parameter in model.parameters()) and any(
        "expert" in name.lower() for name, _ in model.named_modules()
    )


def _linear(model: nn.Module, layers: list[str]) -> list[str]:
    """What "all-linear" means: all but the vocabulary head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [path for path in layers if model.get_submodule(path) is not head]
