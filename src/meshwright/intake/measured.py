"""The cluster that `probe` or trials measured on this machine, kept in the user's cache: `local` is that one from then on.

A file per machine and number of ranks; the machine is its processors, their number, its memory and its cards, so that a cache that several
machines share holds each of them. MESHWRIGHT_MEASURED=0 leaves it unread: then `local` is what the catalog says.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path

from meshwright.base.codec import parse, read_text
from meshwright.base.errors import InputError
from meshwright.base.files import write_whole
from meshwright.base.places import cache_folder
from meshwright.spec.cluster import Cluster

SWITCH = "MESHWRIGHT_MEASURED"


def kept_path(ranks: int, machine: tuple[object, ...]) -> Path:
    """Of the measurement of `ranks` ranks of a machine of this kind."""
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        processor += next((line for line in lines if line.startswith("model name")), "")
    digest = hashlib.sha256(repr((processor, *machine)).encode()).hexdigest()[:12]
    return cache_folder() / "clusters" / f"{digest}-{ranks}.json"


def kept_cluster(ranks: int, machine: tuple[object, ...]) -> Cluster | None:
    """The measured cluster; None where there is none, or none that this version reads."""
    if os.environ.get(SWITCH) == "0" or not (path := kept_path(ranks, machine)).is_file():
        return None
    with contextlib.suppress(InputError, ValueError):
        found = Cluster.model_validate(parse(read_text(path, "measured cluster"), str(path)))
        return found if found.devices == ranks else None
    return None


def keep(cluster: Cluster, machine: tuple[object, ...]) -> Path | None:
    """Write it whole or not at all; None where the cache cannot be written."""
    path = kept_path(cluster.devices, machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, cluster.to_json() + "\n")
    except OSError:
        return None
    return path
