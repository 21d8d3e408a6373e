"""The systems by name."""

from __future__ import annotations

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.interop.accelerate import ACCELERATE
from meshwright.interop.automodel import AUTOMODEL
from meshwright.interop.deepspeed import DEEPSPEED
from meshwright.interop.fsdp2 import FSDP2
from meshwright.interop.megatron import MEGATRON
from meshwright.interop.megatron_bridge import MEGATRON_BRIDGE
from meshwright.interop.nanotron import NANOTRON
from meshwright.interop.system import System
from meshwright.interop.torchtitan import TORCHTITAN
from meshwright.interop.transformers import TRANSFORMERS

SYSTEMS = {
    system.name: system
    for system in (
        MEGATRON,
        MEGATRON_BRIDGE,
        TORCHTITAN,
        DEEPSPEED,
        FSDP2,
        ACCELERATE,
        TRANSFORMERS,
        NANOTRON,
        AUTOMODEL,
    )
}


def find_system(name: str) -> System:
    """Returns the system `name`.

    Raises: InputError if there is none; the message lists the known ones.
    """
    key = name.lower().replace("-", "_").removesuffix("_lm")
    if key not in SYSTEMS:
        raise InputError(
            Message(
                "no system {name!r}{hint} systems are {known}",
                name=name,
                hint=did_you_mean(key, SYSTEMS) or ";",
                known=", ".join(SYSTEMS),
            )
        )
    return SYSTEMS[key]
