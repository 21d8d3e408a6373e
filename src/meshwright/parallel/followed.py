"""Parameters that begin later (later.py) are followed inside one block of code; what is done to them behind it would be lost without a word.

Rule: a parameter that was written to behind the block, as its version says, or that has another storage without notes since (a conversion),
is refused in one line. Parameters that someone put in their place are not meant: they wait for values like any other without memory.
"""

from __future__ import annotations

from torch import nn

from meshwright.base.errors import InputError
from meshwright.parallel.later import Later


def check_followed(model: nn.Module, later: Later) -> None:
    """Raises InputError where a parameter of `model` is no longer what `later` has notes of."""
    ended, origin = later.notes.ended, later.notes.origin
    for name, parameter in model.named_parameters() if ended else ():
        _, version = ended.get(id(parameter), (parameter, parameter._version))
        lost = parameter.is_meta and id(parameter) in ended and origin(parameter) is None
        if lost or parameter._version != version:
            what = f"became {str(parameter.dtype).removeprefix('torch.')}" if lost else "was written to"
            raise InputError(
                f"{name} {what} behind `with initialized_later()`, where nothing is followed any more: do that inside the block "
                "(model.double() too), or leave it to parallelize, whose `precision` says the type"
            )
