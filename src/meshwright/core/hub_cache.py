"""Finds models and data sets of the Hugging Face hub in the local cache, by their names `owner/name`. Nothing is
downloaded.

Source: the layout that huggingface_hub documents ("Understand caching"): models--OWNER--NAME/refs/main has the name of
a folder in models--OWNER--NAME/snapshots.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"(?:models|datasets)--(.+)")


def is_hub_name(name: str) -> bool:
    """Returns whether `name` has the form owner/name, and `owner` is no folder here."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).parent.is_dir()


def hub_snapshot(name: str, kind: Literal["models", "datasets"]) -> Path | None:
    """Returns the folder of the newest downloaded snapshot of `name`, or None if it was not downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    folder = cache / f"{kind}--{name.replace('/', '--')}"
    head = folder / "refs" / "main"
    if head.is_file():
        snapshot = folder / "snapshots" / head.read_text(encoding="utf-8").strip()
        return snapshot if snapshot.is_dir() else None
    return max((path for path in (folder / "snapshots").glob("*") if path.is_dir()), default=None)


def snapshot_name(path: str) -> str:
    """Returns the name owner/name of the snapshot folder `path`, or `path` for any other path.

    >>> snapshot_name("/cache/hub/models--org--net/snapshots/0f1e"), snapshot_name("runs/net")
    ('org/net', 'runs/net')
    """
    place = Path(path)
    match = _SNAPSHOT.fullmatch(place.parent.parent.name) if place.parent.name == "snapshots" else None
    return match[1].replace("--", "/", 1) if match else path
