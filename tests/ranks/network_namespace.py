"""A second node's place: a network namespace of its own, joined to this machine by a link that can be cut, or made
slow."""

import os
import subprocess
from collections.abc import Iterator

import pytest

FIRST, SECOND = (f"10.231.{os.getpid() % 250}.{number}" for number in (1, 2))
"""Of the two nodes; of another run of tests beside this one they are others."""


def ip(*words: str, command: str = "ip") -> bool:
    return subprocess.run([command, *words], check=False, capture_output=True).returncode == 0


def joined() -> Iterator[str]:
    """The name of the namespace; the ends of the link are called after it, a here and b there."""
    name = f"mw{os.getpid()}"
    for what, left in (("link", f"{name}a"), ("netns", name)):  # by a process of this number that was killed
        ip(what, "del", left)
    if not ip("netns", "add", name):
        pytest.skip("this needs the right to make network namespaces")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{FIRST}/24", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"{SECOND}/24", "dev", f"{name}b")
        assert ip("-n", name, "link", "set", f"{name}b", "up")
        yield name
    finally:
        ip("link", "del", f"{name}a")
        ip("netns", "del", name)
