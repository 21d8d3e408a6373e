"""What a model is known to be, layer by layer: parameters, work, what is kept, what tensor ranks share and what stays whole, and why."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.base.units import show_bytes, show_count
from meshwright.report.text import columns, folded
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.precision import RECIPES


def layers_text(model: ModelSpec, precision: str, sequence: int) -> str:
    """A table with a line for each run of equal layers, the weights of each, and what was found.

    FLOPs are of a forward pass and a token, attention over `sequence` tokens; kept bytes are those of a token at `precision`, a share of which
    tensor ranks divide.
    """
    size = RECIPES[precision].size
    rows: list[tuple[str, ...]] = [("layer", "times", "parameters", "FLOPs", "attention", "kept", "by tp", "more in backward")]
    rows += [_row(layer, size, sequence) for layer in model.layers]
    said = [f"model    {model.name}: {show_count(model.parameters)} parameters, {model.blocks} blocks, hidden {model.hidden}"]
    said += [f"a token  of {sequence}, in {precision}; divisible by tp: {_divisible(model)}", "", columns(rows), ""]
    said += [folded(line) for layer in model.layers for line in _weights(layer)]
    if model.notes:
        said += ["", "found by running it without memory:", *(folded(f"- {note}") for note in model.notes)]
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


def _weights(layer: Layer) -> Iterator[str]:
    """The names of a layer's weights that are shared among tensor ranks, with the dimension, and of those that are whole."""
    tied = layer.parameters[:1] if layer.tied else ()
    shared = [f"{parameter.name}[{parameter.split}]" for parameter in layer.parameters if parameter.split is not None]
    whole = [parameter.name for parameter in layer.parameters if parameter.split is None]
    for what, names in (("shared by tp", shared), ("whole", whole)):
        if names:
            yield f"{layer.name}, {what}: {', '.join(names)}"
    if tied:
        yield f"{layer.name}, tied to {layer.tied}: {tied[0].name}"


def _divisible(model: ModelSpec) -> str:
    if not model.tensor_parallel:
        return "nothing, no layer is shared among tensor ranks"
    return ", ".join(f"{what} {number}" for what, number in model.divisible.items()) or "any"
