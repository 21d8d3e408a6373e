"""A model whose states are three times the memory limit trains, its optimizer in files, to the numbers that it has
without a limit."""

from __future__ import annotations

from typing import Any

import memory_limit
import pytest


@pytest.mark.soak
@pytest.mark.skipif(memory_limit.place() is None, reason="no control group can be made here: needs root")
def test_states_three_times_the_memory_limit_train_to_the_same_numbers(tmp_path: Any) -> None:
    free = memory_limit.train("dp1", str(tmp_path), 0)
    assert isinstance(free, dict), free.stderr[-2000:]
    limit = free["parameters"] * memory_limit.STATES // memory_limit.TIMES
    assert not isinstance(memory_limit.train("dp1", str(tmp_path), limit), dict), "the limit limits nothing"
    away = memory_limit.train("dp1.off-optimizer-disk", str(tmp_path), limit)
    assert isinstance(away, dict), away.stderr[-2000:]
    assert (away["losses"], away["weights"]) == (free["losses"], free["weights"])
    assert away["bytes"]["offloaded"] == free["bytes"]["optimizer"] > 2 * limit
