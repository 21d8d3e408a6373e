"""Finds and kills the process that forks the ranks of a run, and starts commands whose ranks behave otherwise."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable

import psutil


def fork_server(process: subprocess.Popen, but: set[int]) -> psutil.Process | None:
    """The one that forks ranks now, other than those in `but`; it has its name before it loads anything. None once the
    run has ended."""
    while process.poll() is None:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if (
                    child.pid not in but
                    and child.name() == "mesh-forkserver"
                    and child.status() != psutil.STATUS_ZOMBIE
                ):
                    return child
        time.sleep(0.01)
    return None


def kill(process: subprocess.Popen, times: int) -> set[int]:
    """So many one after the other, each as soon as it is there."""
    killed: set[int] = set()
    for _ in range(times):
        found = fork_server(process, killed)
        if found is None:
            break
        killed.add(found.pid)
        found.kill()
    return killed


def run_command(module: str, patch: Callable[[], None]) -> None:
    """The main program of test module `module`: the command line of meshwright, whose fork server is this module again.
    The fork server calls `patch` before it forks ranks."""
    if sys.argv[1].isdigit():
        from meshwright.train import forkserver

        patch()
        forkserver.main()
    from meshwright.cli.main import main
    from meshwright.elastic import local_agent

    local_agent.FORK_SERVER_MODULE = module
    sys.exit(main())
