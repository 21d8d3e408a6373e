"""What is said: both languages say the same things, numbers carry their units, lines fold by what a terminal shows."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.base.errors import InputError
from meshwright.cli.main import main
from meshwright.report.text import columns, columns_of, folded, whole_parts
from meshwright.words.lines import translated
from meshwright.words.lines_zh import LINES
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
    assert (say(said), say(said, "zh")) == ("slower: data by 10% (dp2)", "较慢：数据慢 10%（dp2）")


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


def said_by(path: Path) -> set[str]:
    """The lines of rules and errors in a file, with {} for what differs."""

    def skeletons(node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return ["".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)]
        if isinstance(node, ast.BinOp):
            return [first + second for first in skeletons(node.left) for second in skeletons(node.right)]
        return [*skeletons(node.body), *skeletons(node.orelse)] if isinstance(node, ast.IfExp) else ["{}"]

    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    lines = [call.args[-1] for call in calls if call.func.id in ("Fault", "InputError", "ValueError", "NothingFits") and call.args]
    return {text for line in lines for text in skeletons(line) if re.search("[a-z]{4}", text)}


@pytest.mark.parametrize("place", ["spec/plan.py", "spec/rules.py", "search/*.py", "intake/*.py", "cli/plan.py", "cli/fit.py"])
def test_every_line_of_rules_and_errors_of_planning_is_known_in_chinese(place: str) -> None:
    said = {text for path in (Path(__file__).parents[2] / "src/meshwright").glob(place) for text in said_by(path)}
    assert said, place
    assert said - LINES.keys() == set()


def test_a_line_in_chinese_has_every_value_of_the_english_one() -> None:
    for line, text in LINES.items():
        count = line.replace("{name: llama-tiny}", "").count("{}")
        values = [f"V{at}" for at in range(count)]
        assert sorted(re.findall(r"V\d", text.format(*values))) == values, line


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("pins tp(3) = 3 but the cluster has 8 devices, which 3 does not divide", "固定项 tp(3) = 3，而集群有 8 个设备，3 除不尽"),
        (
            "no plan is legal: dp4.ep2: ep(2): the model has no experts; use ep 1 (3 plans); tp8: tp(8) does not divide heads(4) (1 plan)",
            "没有合法的方案：dp4.ep2：ep(2)：模型没有专家；用 ep 1（3 个方案）；tp8：tp(8) 除不尽 heads(4)（1 个方案）",
        ),
        (
            "$.workload: Workload has no field 'sequenc'; did you mean 'sequence'?",
            "$.workload：Workload 没有字段 'sequenc'；是不是 'sequence'？",
        ),
        ("a line that nobody wrote", "a line that nobody wrote"),
    ],
)
def test_a_line_is_read_by_its_fixed_words_and_a_line_in_it_too(line: str, wanted: str) -> None:
    assert translated(line, "zh") == wanted
    assert translated(line, "en") == line


def test_an_error_is_said_in_the_language_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster", "1x8:a100-80gb", "--model", "llama2-7b", "--pin", "tp=3", "--lang", "zh"]) == 2
    assert capsys.readouterr().err == "meshwright: 固定项 tp(3) = 3，而集群有 8 个设备，3 除不尽\n"
