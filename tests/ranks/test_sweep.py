"""Sweeps themselves: covers are complete, parts make one table, what differs is said and fails."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import sweep


def test_a_cover_holds_every_three_choices_that_any_candidate_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    legal = [
        (each, ("model", "-".join(each)))
        for each in itertools.product("abc", "de", "fgh", "ij")
        if "a" not in each or "f" not in each
    ]
    monkeypatch.delenv("MESHWRIGHT_SOAK", raising=False)
    taken = {plan for _, plan in sweep.covering(legal, 3)}

    def threes(some: list[tuple[str, ...]]) -> set[tuple[tuple[int, str], ...]]:
        return {three for each in some for three in itertools.combinations(enumerate(each), 3)}

    assert threes([each for each, (_, plan) in legal if plan in taken]) == threes([each for each, _ in legal])
    assert len(taken) < len(legal)
    monkeypatch.setenv("MESHWRIGHT_SOAK", "whole 1/7")
    assert sorted(sweep.covering(legal, 3)) == sorted(pair for _, pair in legal)


def test_parts_of_a_sweep_make_one_table_that_says_what_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pairs = [("llama", "dp2.z1"), ("llama", "tp2"), ("llama", "pp2"), ("bert", "tp2"), ("bert", "tp4")]

    def judge(model: str, plan: str) -> tuple[float, float] | str:
        assert (model, plan) != ("bert", "tp4"), "loss at first: 1 against 2"
        return "pp: this one has no blocks" if plan == "pp2" else (1e-16, 3e-15)

    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    monkeypatch.setenv("MESHWRIGHT_SOAK", "2/2")
    sweep.run("small", "Small", pairs, judge)
    monkeypatch.setenv("MESHWRIGHT_SOAK", "1/2")
    with pytest.raises(AssertionError, match="bert tp4: differs: loss at first: 1 against 2"):
        sweep.run("small", "Small", pairs, judge)
    said = (tmp_path / "small.md").read_text()
    assert "5 of 5 pairs of model and plan ran: 3 equal to one device, 1 refused in one line, 1 differ." in said
    assert "| tp | 3e-15 (1) | 3e-15 (1), [2] |" in said
    assert "1. pp: this one has no blocks\n2. differs: loss at first: 1 against 2\n" in said
