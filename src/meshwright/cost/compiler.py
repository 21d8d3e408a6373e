"""What torch.compile takes before the first step of a launch ends: each kind of block that a rank holds, once; blocks of one kind share their code.

    seconds of the first step besides = kinds of blocks on the rank with most of them x seconds of one kind

It is no part of a step. Plans are ranked by their step and, of this, the part of one of the run's steps: nothing in a long run, all of it in a
short one. What compiled blocks gain is not assumed: on processors 0 to 4 % were measured.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array, Box, lift
from meshwright.cost.setting import Setting


def first_step(setting: Setting, box: Box, layers: Array) -> Array:
    """Seconds over AXES; `layers` (r, o, entry)."""
    if not box.compile:
        return lift(0.0, "")
    shapes = [tuple((each.shape, each.split) for each in entry.layer.parameters) if entry.is_block else None for entry in setting.entries]
    kinds = np.array([[shape == kind for kind in dict.fromkeys(shapes) if kind is not None] for shape in shapes], dtype=float)
    held = ((layers @ kinds) > 0).sum(axis=2).max(axis=0)
    return lift(held * (constants.COMPILER_HOST if setting.on_host else constants.COMPILER), "o")
