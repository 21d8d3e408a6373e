"""`--model 200b`: a model of a size and no name. The catalog's GPT of the nearest size, scaled.

Rule: of the GPT-3 and Megatron rows the one nearest in parameters P0; hidden is that row's times (P / P0)^(1/3), in whole multiples of STEPS, so
that usual tensor degrees divide the heads, which are 64 or 128 wide; then as many layers as come nearest to P with 12 hidden^2 each (Narayanan
et al., arXiv 2104.04473, equation 2); where the vocabulary is most of a small model, a smaller hidden. A catalog name stands before this rule.

>>> sizes = generic_sizes(200e9)
>>> sizes.layers, sizes.hidden, sizes.heads
(110, 12288, 96)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from meshwright.base.codec import build
from meshwright.base.errors import InputError
from meshwright.base.units import show_count
from meshwright.catalog import read as catalog
from meshwright.intake.sizes import Sizes, catalog_sizes

_SIZE = re.compile(r"(?:gpt-)?(\d+(?:\.\d+)?)([mbt])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
FAMILIES = ("GPT-3", "MT-NLG", "Megatron")
STEPS = ((8192, 2048), (4096, 1024), (1024, 512), (0, 64))
"""Hidden sizes from the first on are whole multiples of the second."""
SMALLEST, LARGEST = 4e6, 1e15
"""Parameters: below, the vocabulary alone is larger."""
POSITIONS = 8192
"""Learned positions of a model without a name: more than its pattern has, so that the usual sequences can be asked for."""


def size_of(name: str) -> float | None:
    """Parameters that `name` says; None when it is no size.

    >>> size_of("200b"), size_of("gpt-1.3B"), size_of("gpt2"), size_of("0b")
    (200000000000.0, 1300000000.0, None, None)
    """
    match = _SIZE.fullmatch(name.strip())
    return float(match[1]) * _UNITS[match[2].lower()] or None if match else None


Patterns = Mapping[str, Sizes]
"""The rows that can be scaled, by name."""


def patterns() -> Patterns:
    return {name: catalog_sizes(row) for name, row in catalog.models().items() if row["family"] in FAMILIES}


def nearest(parameters: float, known: Patterns) -> str:
    """Which of them is scaled: the nearest in size."""
    return min(known, key=lambda name: abs(math.log(weights(known[name]) / parameters)))


def weights(sizes: Sizes) -> float:
    """Parameters of a GPT without its biases and norms, which are a thousandth."""
    return 12.0 * sizes.layers * sizes.hidden**2 + (sizes.vocab + sizes.pos_rows) * sizes.hidden


def generic_sizes(parameters: float, known: Patterns | None = None) -> Sizes:
    """The sizes of a GPT-shaped model of that many parameters, as near as whole layers come."""
    if not SMALLEST <= parameters <= LARGEST:
        raise InputError(
            f"a model of {show_count(parameters)} parameters: a size lies between {show_count(SMALLEST)} and {show_count(LARGEST)}"
        )
    known = known or patterns()
    like = known[nearest(parameters, known)]
    wanted = like.hidden * (parameters / weights(like)) ** (1 / 3)
    step = next(step for least, step in STEPS if wanted >= least)
    hidden = max(round(wanted / step), 1) * step
    while hidden > step and parameters < (like.vocab + POSITIONS) * hidden + 6.0 * like.layers * hidden**2:
        hidden -= step
    layers = max(round((parameters - (like.vocab + POSITIONS) * hidden) / (12.0 * hidden**2)), 1)
    changes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": hidden // (128 if hidden >= 1536 else 64),
        "kv_heads": hidden // (128 if hidden >= 1536 else 64),
        "head_dim": 0.0,
        "ffn": 4 * hidden,
        "seq": POSITIONS,
        "pos_rows": POSITIONS,
    }
    return build(Sizes, {**like.model_dump(), **changes}, "$.model")


def title(name: str) -> str:
    """The name that is shown: of a size, with the model that was scaled to it.

    >>> title("200b"), title("gpt3")
    ('gpt-200b (gpt3-175b scaled)', 'gpt3')
    """
    parameters = size_of(name)
    if parameters is None or not SMALLEST <= parameters <= LARGEST or catalog.find(catalog.models(), name):
        return name
    return f"gpt-{name.strip().lower().removeprefix('gpt-')} ({nearest(parameters, patterns())} scaled)"
