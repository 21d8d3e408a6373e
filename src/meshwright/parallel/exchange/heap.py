"""What was freed and the C library keeps goes back to the system: after what happens once and leaves holes behind.

A model that is cut into flat buffers, and states that an optimizer makes in its first step and that are then laid together, leave the heap
full of holes between small things that stay. A 110 M model in bfloat16 with its states in files: 1,013 MiB resident after the first step
without this, 789 with it.
"""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Where the C library has no malloc_trim nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)
