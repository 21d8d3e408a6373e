"""One Chinese term per concept: the table of docs/zh/terms.md names the words that no screen and no page uses."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from meshwright.core.i18n.catalogue import read_catalogue

ROOT = Path(__file__).parents[2]
TERMS_PAGE = ROOT / "docs" / "zh" / "terms.md"
PATTERNS = {
    "设备": r"(?<![网显])卡(?![住死])",
    "激活值": r"(?<!门控)激活(?!值|函数|环境)",
    "微批": r"微批次|micro-batch(?=[\u4e00-\u9fff]| [\u4e00-\u9fff])",
    "批次": r"整个批(?!次)|全局批(?!次)|批量",
    "每步时间": r"(?<![每\d])(?<!\d )步时间",
    "阶段": r"(?:[各每前后]|其他|别的|虚拟|流水线?)级(?!别)",
    "token": r"\d 个(?:词元|标记)",
    "显存": r"(?<!主机)内存(?=预算|余量|滑块|时间线|上限（|带宽)",
}
"""Words that are refused by what precedes and follows them."""
ALLOWED = ("异构作业", "由作业与步骤", "作业编号", "没有调度会卡死", "权重算作")
"""Places where a refused word is another concept."""


@cache
def refused() -> re.Pattern[str]:
    """Matches the words of the third column of the table, and the patterns."""
    rows = re.findall(r"^\| (?!概念|-)([^|]+) \| ([^|]+) \| ([^|]+) \|", TERMS_PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 30
    return re.compile("|".join([*(re.escape(word) for row in rows for word in row[2].split("、")), *PATTERNS.values()]))


def variants(text: str) -> list[str]:
    """The refused words in `text` with what surrounds them."""
    for place in ALLOWED:
        text = text.replace(place, "")
    return [text[max(0, each.start() - 12) : each.end() + 12] for each in refused().finditer(text)]


def chinese_files() -> list[Path]:
    pages = [path for kind in ("*.md", "*.ipynb") for path in sorted((ROOT / "docs" / "zh").rglob(kind))]
    words = sorted((ROOT / "src" / "meshwright" / "report" / "page").glob("*_words.js"))
    tables = [ROOT / "docs" / name for name in ("diagrams.py", "flag_tables.py", "generate.py", "key_tables.py")]
    others = [ROOT / "README.zh-CN.md", ROOT / "docs" / "mkdocs.yml", ROOT / "src/meshwright/cli/help_text.py"]
    return [path for path in pages if path != TERMS_PAGE] + words + tables + others


@pytest.mark.parametrize("path", chinese_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_chinese_text_uses_one_term_per_concept(path: Path) -> None:
    chinese = [line for line in path.read_text(encoding="utf-8").splitlines() if re.search("[\u4e00-\u9fff]", line)]
    assert [found for line in chinese for found in variants(line)] == []


@pytest.mark.parametrize("catalogue", ["zh", "zh help"])
def test_a_chinese_message_uses_one_term_per_concept(catalogue: str) -> None:
    entries = read_catalogue(catalogue).entries
    assert {msgid: variants(text) for (_, msgid), text in entries.items() if variants(text)} == {}


@pytest.mark.parametrize("catalogue", ["zh", "zh help"])
def test_the_word_for_catalog_is_not_used_for_a_folder(catalogue: str) -> None:
    entries = read_catalogue(catalogue).entries.items()
    assert {msgid: text for (_, msgid), text in entries if "目录" in text and "catalog" not in msgid} == {}


def test_refused_terms_are_found() -> None:
    refused_texts = (
        "与单卡比较",
        "重算它",
        "3 个词元",
        "两个微批次",
        "卸载激活",
        "放进运行目录",
        "前一个流水线级",
        "这个批量",
    )
    assert [text for text in refused_texts if not variants(text)] == []
    assert variants("声明网卡的单设备用重计算和激活值") == []
