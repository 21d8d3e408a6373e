"""Facts about the runtime that runs a plan, beyond what the plan says. The default is this project's own; `validation` states those of others.

They are bytes, kernels and orders, never efficiencies: what a device reaches is a fact of the device.
"""

from __future__ import annotations

from typing import NamedTuple


class Practice(NamedTuple):
    """`0` or an empty word: as the precision recipe says."""

    master: int = -1
    """Bytes of a master weight beside the compute type; -1: the recipe's."""
    gradient: int = 0
    """Bytes of a held gradient."""
    bucketed: int = 0
    """Bytes of a second copy of the gradients at ZeRO 0, in buckets of their own."""
    reduced: int = 0
    """Bytes of a gradient element on its way between ranks."""
    products: str = ""
    """Precision of the blocks' matrix products."""
    attention: float = 1.0
    """Rate of the attention kernel over that of FlashAttention-2, where the device knows a faster one."""
    repeated_products: float = 0.0
    """Part of a block's forward products that backward makes again although the plan keeps the block."""
    repeated_rest: float = 0.0
    """The same of its other operations."""
    reduce_hidden: bool = True
    """Gradients are summed beside the last backward."""
    gather_hidden: bool = False
    """Weights of ZeRO 1 and 2 are gathered beside the next forward."""
    tensor_hidden: float = 0.0
    """Part of the tensor ranks' traffic that is cut into pieces and runs beside the products."""
    launch: float = 1.0
    """Host seconds a kernel over those of eager PyTorch: less where graphs or one compiled call launch many."""
    gathered: bool = False
    """Sequence parallelism keeps what it gathered for backward; else it gathers again."""


OURS = Practice()
