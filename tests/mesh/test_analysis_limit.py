"""A forward that waits or loops ends the analysis in one line, after a limit that the user may set."""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.dataflow_recorder import record_dataflow
from meshwright.analysis.dry_run import TIME_LIMIT_VARIABLE, analysis_time_limit
from meshwright.core.errors import InputError


class Waiting(nn.Module):
    """Its forward waits in `way`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        self.wait()
        return x

    def wait(self) -> None:
        if self.way == "network":
            one, other = socket.socketpair()
            with one, other:
                one.recv(1)
        if self.way == "loop after a collection":
            gc.collect()
        if self.way == "loop after an import":
            exec("import slow_to_import")
        while self.way.startswith("loop"):
            torch.ones(2).sum()
        while self.way == "catching loop":
            try:
                time.sleep(1e-3)
            except BaseException:
                self.way = "network"
                self.wait()


@pytest.mark.parametrize(
    "way",
    [
        "network",
        pytest.param("loop", marks=pytest.mark.soak),
        "catching loop",
        "loop after a collection",
        "loop after an import",
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an alarm inside a callback of Python
def test_an_analysis_that_takes_too_long_is_one_line(way: str, monkeypatch: Any, request: Any, tmp_path: Path) -> None:
    analyze_model(Waiting("not at all"))  # what this imports is not counted
    monkeypatch.setenv(TIME_LIMIT_VARIABLE, "0.5")
    monkeypatch.setattr("meshwright.analysis.dry_run.INTERRUPT_INTERVAL_SECONDS", 0.5)
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.6)\n")
    monkeypatch.syspath_prepend(tmp_path)
    once = iter([0.6, 0.6])
    slow = lambda phase, _: (
        time.sleep(next(once, 0.0)) if phase == "stop" and way == "loop after a collection" else None
    )
    gc.callbacks.append(slow)  # what is raised inside is printed and forgotten
    request.addfinalizer(lambda: gc.callbacks.remove(slow))
    before = signal.getsignal(signal.SIGALRM)
    for run in (lambda model: analyze_model(model), lambda model: record_dataflow(model, ("layers.0", "layers.1"))):
        sys.modules.pop("slow_to_import", None)
        with pytest.raises(
            InputError, match=r"the analysis of the model was stopped after 0.5 s in test_analysis_limit.py, line \d+: "
        ) as found:
            run(Waiting(way))
        assert way != "loop after an import" or "slow_to_import" in sys.modules
        assert "\n" not in str(found.value) and TIME_LIMIT_VARIABLE in str(found.value)
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("said", ["soon", "-1", "0", "inf", "nan"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(said: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(TIME_LIMIT_VARIABLE, said)
    with pytest.raises(InputError, match=f"{TIME_LIMIT_VARIABLE}='{said}' is not a number of seconds above 0"):
        analysis_time_limit()


def test_who_has_a_timer_keeps_it() -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        assert analyze_model(Waiting("not at all")).count == 2
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
        assert 0.0 < left <= 60.0 and not rang
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
