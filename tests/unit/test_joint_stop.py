"""Another launcher has started the ranks. They get a stop signal one after another. All ranks end with the same exit
code, and only rank 0 prints the reason."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

RANK = """
import sys, time
from meshwright.cli.joint_stop import stop_together
from meshwright.core.errors import Interrupted

rank, how = int(sys.argv[1]), sys.argv[2]
try:
    with stop_together(rank, "before all was measured"):
        print("ready", flush=True)
        if how == "loses its peer":
            raise RuntimeError("Connection closed by peer")
        time.sleep(600)
except Interrupted as why:
    print(why, flush=True)
    raise SystemExit(why.exit_code)
"""


def started(rank: int, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", RANK, str(rank), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", ["waits", "loses its peer"])
def test_ranks_that_are_asked_one_after_another_end_alike_and_the_first_says_why(how: str) -> None:
    """A rank that loses the connection to its peer before its own signal arrives waits for the signal. It prints no
    error."""
    ranks = [started(rank, how) for rank in (0, 1)]
    for process in ranks:
        process.send_signal(signal.SIGINT)
    said = [process.communicate(timeout=600)[0] for process in ranks]
    assert said == ["stopped by SIGINT before all was measured; the same command starts again\n", ""]
    assert [process.returncode for process in ranks] == [75, 75]
