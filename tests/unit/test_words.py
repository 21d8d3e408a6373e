"""What is said: both languages say the same things, numbers carry their units, lines fold by what a terminal shows."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.base.errors import InputError
from meshwright.report.text import columns, columns_of, folded, whole_parts
from meshwright.words.say import TABLES, language_of, name, say, table, tell


def places(text: str) -> set[tuple[str, str]]:
    """Names and kinds of the places of a text; the noun of a count is the language's own."""
    return {(field, (kind or "").split(" ")[0]) for _, field, kind, _ in string.Formatter().parse(text) if field is not None}


def test_both_languages_have_the_same_keys_and_places() -> None:
    english, chinese = table("en"), table("zh")
    assert english.keys() == chinese.keys()
    assert [key for key in english if places(english[key]) != places(chinese[key])] == []


@pytest.mark.parametrize("language", TABLES)
def test_every_kind_of_place_is_one_that_can_be_shown(language: str) -> None:
    for key, text in table(language).items():
        values = {field: 1.5 for _, field, _, _ in string.Formatter().parse(text) if field is not None}
        assert "{" not in say(tell(key, **values), language)


def test_numbers_carry_their_unit_and_nouns_their_plural() -> None:
    values = {"plan": "dp1", "seconds": 0.25, "nodes": 1, "devices": 8}
    assert say(tell("near.nodes", **values)) == "1 node (8 devices) would fit (dp1, 250.0 ms a step)"
    assert say(tell("near.nodes", **values), "zh") == "1 个节点（8 个设备）就放得下（dp1，每步 250.0 ms）"


def test_a_sentence_inside_a_sentence_is_said_in_the_same_language() -> None:
    said = tell("why.slower", families=(tell("why.family.even", family=name("family", "data"), share=0.1, plan="dp2"),))
    assert (say(said), say(said, "zh")) == ("slower: data by 10% (dp2)", "较慢：数据 慢 10%（dp2）")


def test_a_word_that_no_table_knows_is_said_as_it_is() -> None:
    assert say(name("reason", "tp does not divide ffn 3"), "zh") == "tp does not divide ffn 3"


def test_the_language_is_the_asked_one_or_that_of_the_locale() -> None:
    assert language_of(None, {"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}) == "en"
    assert language_of(None, {"LC_ALL": "", "LC_MESSAGES": "zh_TW"}) == "zh"
    with pytest.raises(InputError, match="--lang 'zn' is not one of en, zh"):
        language_of("zn", {})


def test_columns_of_chinese_cells_line_up() -> None:
    lines = columns([["方案", "每步"], ["dp2.tp2", "1.00 s"]]).splitlines()
    assert [columns_of(line) for line in lines] == [len("dp2.tp2  1.00 s")] * 2


@given(st.text(alphabet="ab 时间，（）1%", max_size=80), st.integers(8, 30))
def test_folding_keeps_every_character_and_the_width(text: str, width: int) -> None:
    lines = folded(text, width, "  ").splitlines() or [""]
    assert "".join(text.split()) == "".join("".join(lines).split())
    longest = max(map(columns_of, text.replace("时", " ").replace("间", " ").split()), default=0)
    assert all(columns_of(line) <= max(width, longest + 8) for line in lines)


@given(st.lists(st.floats(-50, 50), max_size=9))
def test_whole_parts_sum_to_the_rounded_sum_and_none_is_off_by_a_step(values: list[float]) -> None:
    parts = whole_parts(values, 0.01)
    assert sum(parts) == round(sum(values) / 0.01) or abs(sum(parts) - sum(values) / 0.01) <= 0.5 + 1e-6
    assert all(abs(part - value / 0.01) < 1 + 1e-6 for part, value in zip(parts, values, strict=True))
