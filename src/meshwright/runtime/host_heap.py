"""What was freed and the C library keeps goes back to the system: after what happens once and leaves holes behind.

A model that is cut into flat buffers, and states that an optimizer makes in its first step and that are then laid
together, leave the heap
full of holes between small things that stay. A 110 M model in bfloat16 with its states in files: 1,013 MiB resident
after the first step
without this, 789 with it.

[Note: scratch] MKL keeps what its products work in, 5 MiB each time that one is longer than all before: what a look at
the model before the first
step needed stays beside what steps need.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import torch

TORCH_CPU_LIBRARY = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")


def malloc_trim() -> None:
    """No product may be under way. Where the C library has no malloc_trim, or torch no MKL, nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(TORCH_CPU_LIBRARY).mkl_serv_free_buffers()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
