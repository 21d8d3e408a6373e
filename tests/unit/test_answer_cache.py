"""The answers of `meshwright plan` that are stored in the cache folder."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from meshwright.cli import answer_cache
from meshwright.cli.main import main
from meshwright.cli.options import search_progress
from meshwright.planner.search import ranking

ASK = ["plan", "--model", "llama-tiny", "--cluster", "1x4:a100-40gb", "--lang", "en"]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The number of searches so far, with an empty cache."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv(answer_cache.ANSWERS_ENV, "1")
    done, search = [0], ranking.search_plans

    def counted(*given: object, **named: object) -> object:
        done[0] += 1
        return search(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ranking, "search_plans", counted)
    return done


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    assert main([*ASK, *options]) == 0
    shown = capsys.readouterr()
    return shown.out, shown.err


def test_a_long_search_reports_that_it_is_in_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with search_progress("en", 0.05, 0.05):
        time.sleep(0.4)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert not said.out and len(lines) > 1
    assert all(line.startswith("searching for the best plan: ") and line.endswith(" so far") for line in lines)
    with search_progress("zh"):
        pass
    assert not capsys.readouterr().err


def test_the_same_question_is_answered_once_and_says_so(
    searches: list[int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, quiet = asked(capsys, "--save", str(tmp_path / "a.json"))
    again, said = asked(capsys, "--save", str(tmp_path / "b.json"))
    assert searches == [1] and first == again and "from the cache" in said and "from the cache" not in quiet
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize(
    "other", [["--batch", "64"], ["--top", "3"], ["--pin", "zero=1"], ["--json"], ["--trust", "measured"], ["--why"]]
)
def test_another_question_is_another_search(
    searches: list[int], capsys: pytest.CaptureFixture[str], other: list[str]
) -> None:
    asked(capsys)
    out, _ = asked(capsys, *other)
    assert searches == [2] and asked(capsys, *other)[0] == out and searches == [2]


def test_fresh_and_other_code_search_again(
    searches: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(capsys)
    asked(capsys, "--fresh")
    assert searches == [2]
    monkeypatch.setattr(answer_cache, "_code_digest", lambda: "other")
    asked(capsys)
    assert searches == [3]
    monkeypatch.setenv(answer_cache.ANSWERS_ENV, "0")
    asked(capsys)
    assert searches == [4]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"output": 3, "plan": "", "day": ""}', '{"plan": ""}'])
def test_a_damaged_answer_counts_as_none(
    searches: list[int], capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    asked(capsys)
    (file,) = (tmp_path / "answers").iterdir()
    whole = json.loads(file.read_text())
    file.write_text(text)
    assert "from the cache" not in asked(capsys)[1] and searches == [2]
    assert json.loads(file.read_text()).keys() == whole.keys()


def test_the_oldest_answers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(answer_cache, "MAX_ANSWERS", 2)
    for name in "abc":
        answer_cache.save_answer(name, name, "{}")
    assert sorted(path.stem for path in (tmp_path / "answers").iterdir()) == ["b", "c"]
