"""Where things of this user are kept between runs: $MESHWRIGHT_CACHE, else $XDG_CACHE_HOME/meshwright, else ~/.cache/meshwright (XDG 0.8)."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's cache is; it need not exist yet."""
    if chosen := os.environ.get("MESHWRIGHT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"
