"""Parses `--lora rank=8,alpha=16,target=q_proj+v_proj` to the section `workload.lora` of a job, and adds LoRA adapters
to a model spec."""

from __future__ import annotations

from typing import Any

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.spec.model import LayerSpec, ModelSpec, ParameterSpec
from meshwright.spec.workload import LoraConfig

LORA_KEYS = ("rank", "alpha", "target")


def parse_lora(text: str) -> dict[str, Any]:
    """Parses the value of `--lora`.

    >>> parse_lora("rank=4,target=q_proj+v_proj")
    {'rank': 4, 'target': ['q_proj', 'v_proj']}
    """
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name not in LORA_KEYS:
            raise InputError(
                Message(
                    "--lora {part!r} is not one of rank=8, alpha=16, target=q_proj+v_proj{hint}",
                    part=part,
                    hint=did_you_mean(name, LORA_KEYS),
                )
            )
        try:
            found[name] = (
                [each for each in value.split("+") if each]
                if name == "target"
                else int(value)
                if name == "rank"
                else float(value)
            )
        except ValueError:
            raise InputError(Message("--lora {name}={value!r} is not a number", name=name, value=value)) from None
    return found


def add_lora(model: ModelSpec, lora: LoraConfig) -> ModelSpec:
    """Returns `model` with LoRA matrices A and B for each target matrix of its blocks; all other weights are frozen.

    The memory traffic increases: A reads the layer's input again, the output of B is read, and the layer's output is
    read and written for the sum.
    """
    layers = tuple(_add_lora_to_layer(layer, lora) for layer in model.layers)
    found = model.but(layers=layers)
    if found.parameters == model.parameters:
        known = sorted(
            {
                _short_module_name(parameter.name)
                for layer in model.layers
                if layer.name == "block"
                for parameter in _weight_matrices(layer)
            }
        )
        raise InputError(
            Message(
                "lora.target {target} is no layer of {model}; its blocks have {known}",
                target=", ".join(lora.target),
                model=model.name,
                known=", ".join(known) or "none",
            )
        )
    return found


def _add_lora_to_layer(layer: LayerSpec, lora: LoraConfig) -> LayerSpec:
    more: list[ParameterSpec] = []
    for parameter in _weight_matrices(layer) if layer.name == "block" else ():
        if not lora.target or _short_module_name(parameter.name) in {
            target.rpartition(".")[2] for target in lora.target
        }:
            path, (out, into) = parameter.name.removesuffix(".weight"), parameter.shape
            more.append(
                ParameterSpec(
                    name=f"{path}.lora_A.default.weight",
                    shape=(lora.rank, into),
                    split=1 if parameter.split == 1 else None,
                )
            )
            parts = parameter.parts if parameter.split == 0 else ()
            split = 0 if parameter.split == 0 else None
            more.append(
                ParameterSpec(
                    name=f"{path}.lora_B.default.weight",
                    shape=(out, lora.rank),
                    split=split,
                    parts=parts,
                    ways=parameter.ways if split == 0 else (),
                )
            )
    moved = sum(each.shape[1] if ".lora_A." in each.name else 3 * each.shape[0] for each in more)
    return layer.but(
        parameters=(*(parameter.but(frozen=True) for parameter in layer.parameters), *more), moved=layer.moved + moved
    )


def _weight_matrices(layer: LayerSpec) -> list[ParameterSpec]:
    return [
        parameter for parameter in layer.parameters if len(parameter.shape) == 2 and parameter.name.endswith(".weight")
    ]


def _short_module_name(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
