"""Precision recipes as values: what is stored, computed and reduced in which type, and the bytes that follow.

| recipe | weights | gradients | optimizer with AdamW | total |
|---|---|---|---|---|
| fp64 | 8 | 8 | 16 | 32 |
| fp32 | 4 | 4 | 8 | 16 |
| bf16, fp16 | 2 | 2 | 4 (master) + 8 | 16 |

Source: Rajbhandari et al., ZeRO, section 3.1 (2 + 2 + 12 bytes per parameter).

>>> RECIPES["bf16"].bytes_per_parameter(states=2)
16
"""

from __future__ import annotations

from meshwright.base.codec import Noun
from meshwright.base.errors import InputError, did_you_mean
from meshwright.spec.compression import Compression


class Recipe(Noun):
    """How numbers are held. `compute` is torch's name of the type of weights, activations and gradients."""

    name: str
    compute: str
    size: int
    master: int = 0
    loss_scaling: bool = False
    exact: bool = False
    """Gradients are added as integers: the same bits for any number of data-parallel ranks."""
    compression: Compression | None = None
    """Of gradients between hosts."""

    @property
    def state_size(self) -> int:
        """Bytes of one element of an optimizer state: the master type, or the weights' own."""
        return self.master or self.size

    def bytes_per_parameter(self, states: int) -> int:
        return self.size + self.size + self.master + states * self.state_size


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fp64", compute="float64", size=8),
        Recipe(name="fp32", compute="float32", size=4),
        Recipe(name="bf16", compute="bfloat16", size=2, master=4),
        Recipe(name="fp16", compute="float16", size=2, master=4, loss_scaling=True),
    )
}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise InputError(f"precision {name!r} is not one of {', '.join(RECIPES)}{did_you_mean(name, RECIPES)}")
    return RECIPES[name]
