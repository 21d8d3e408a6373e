"""What a model is known to be, layer by layer: parameters, work, what is kept, what tensor ranks share and what stays whole, and why."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.base.units import show_bytes, show_count
from meshwright.report.plans import label
from meshwright.report.text import columns, folded
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.precision import RECIPES
from meshwright.words.lines import translated
from meshwright.words.say import Sentence, say, tell

HEADS = ("layer", "times", "parameters", "FLOPs", "attention", "kept", "by tp", "more in backward")


def layers_text(model: ModelSpec, precision: str, sequence: int, language: str = "en") -> str:
    """A table with a line for each run of equal layers, the weights of each, and what was found.

    FLOPs are of a forward pass and a token, attention over `sequence` tokens; kept bytes are those of a token at `precision`, a share of which
    tensor ranks divide.
    """
    size = RECIPES[precision].size
    rows: list[tuple[str, ...]] = [tuple(label(head, language) for head in HEADS)]
    rows += [_row(layer, size, sequence) for layer in model.layers]
    values = {"model": model.name, "parameters": model.parameters, "blocks": model.blocks, "hidden": model.hidden}
    said = [say(tell("question.model", **values), language)]
    said += [
        say(tell("layers.token", sequence=sequence, precision=precision, divisible=_divisible(model)), language),
        "",
        columns(rows),
        "",
    ]
    said += [folded(say(line, language)) for layer in model.layers for line in _weights(layer)]
    if model.notes:
        said += ["", say(tell("layers.found"), language), *(folded(f"- {translated(note, language)}") for note in model.notes)]
    return "\n".join(said)


def _row(layer: Layer, size: int, sequence: int) -> tuple[str, ...]:
    split = layer.saved_split * size + layer.fixed_split + layer.core_context * sequence
    kept = split + layer.saved_whole * size + layer.fixed_whole
    attention = layer.attention_flops * sequence
    return (
        layer.name,
        str(layer.repeat),
        show_count(layer.numel),
        show_count(layer.flops) if layer.flops else "-",
        show_count(attention) if attention else "-",
        show_bytes(kept),
        f"{split / kept:.0%}" if kept else "-",
        show_bytes(layer.transient * size),
    )


def _weights(layer: Layer) -> Iterator[Sentence]:
    """The names of a layer's weights that are shared among tensor ranks, with the dimension, and of those that are whole."""
    shared = [f"{parameter.name}[{parameter.split}]" for parameter in layer.parameters if parameter.split is not None]
    whole = [parameter.name for parameter in layer.parameters if parameter.split is None]
    for key, names in (("layers.shared", shared), ("layers.whole", whole)):
        if names:
            yield tell(key, layer=layer.name, names=", ".join(names))
    if layer.tied and layer.parameters:
        yield tell("layers.tied", layer=layer.name, to=layer.tied, name=layer.parameters[0].name)


def _divisible(model: ModelSpec) -> Sentence | str:
    if not model.tensor_parallel:
        return tell("layers.indivisible")
    return ", ".join(f"{what} {number}" for what, number in model.divisible.items()) or tell("layers.any")
