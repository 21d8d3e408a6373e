"""Finds the C++ compiler with which torch.compile builds code for CPUs. The planner offers compiled blocks on a CPU
only if the machine has one, and the runtime refuses them otherwise."""

from __future__ import annotations

import os
import shutil


def has_cpp_compiler() -> bool:
    """Returns whether a C++ compiler is installed: the one that CXX names, g++ or clang++."""
    return any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++")))
