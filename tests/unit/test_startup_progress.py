"""What a person is told before the first step, and what becomes of a run whose terminal is gone."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

from meshwright.core.ipc import RankPhase
from meshwright.elastic.hang_detector import PROGRESS_SECONDS, StartupProgress
from meshwright.elastic.shared_files import SharedFileStore


def test_a_long_start_says_again_and_again_what_the_last_rank_does() -> None:
    now, said, holdings = [0.0], list[str](), SharedFileStore(2)
    starting = StartupProgress(said.append, lambda: now[0])

    def passes(seconds: float) -> None:
        for _ in range(int(4 * seconds)):
            now[0] += 0.25
            starting(holdings)

    passes(PROGRESS_SECONDS - 1)
    assert said == []
    passes(2)
    assert said == ["starting, 10.0 s: processes start and load torch"]
    holdings.pulse(0).at(RankPhase.restore)
    holdings.pulse(1).at(RankPhase.build)
    passes(PROGRESS_SECONDS)
    assert said[1:] == ["starting, 20.0 s: rank 1 builds the model and opens its data"]
    now[0] += 100 * PROGRESS_SECONDS  # it trained, and starts again
    passes(PROGRESS_SECONDS - 1)
    assert len(said) == 2
    holdings.close()


HEARS = """
import os, signal, sys
from meshwright.core.signals import stop_signal_handler
asked = []
with stop_signal_handler(lambda number, frame: asked.append(signal.Signals(number).name)):
    os.kill(os.getpid(), signal.SIGHUP)
    print("nobody reads this", flush=True)
    os.write(3, " ".join(asked).encode())
"""


def test_the_end_of_a_terminal_is_a_request_to_stop_and_what_is_said_then_no_error() -> None:
    """Ignored by nohup, it stays so."""
    for ignored, heard in ((False, b"SIGHUP"), (True, b"")):
        master, screen = pty.openpty()
        told, tell = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", HEARS.replace("os.write(3", f"os.write({tell}")],
            stdin=screen, stdout=screen, stderr=screen, pass_fds=(tell,),
            preexec_fn=lambda ignored=ignored: signal.signal(  # type: ignore[misc]
                signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL
            ),
        )  # fmt: skip
        for handle in (tell, screen):
            os.close(handle)
        with os.fdopen(told, "rb") as answer:
            assert answer.read() == heard
        assert process.wait(300) == 0
        os.close(master)
