"""The site of the documentation and the pages made for it: nothing is missing in the navigation, in the reference of
keys, in a diagram or in a notebook."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("en", "zh")
CHINESE = re.compile("[\u4e00-\u9fff]")
MAX_WORDS = 35
"""The most words of a sentence."""


def script(name: str) -> Any:
    """A file of `docs/` as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


refresh, build_site, key_tables = script("refresh"), script("build_site"), script("key_tables")
SETTINGS = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
KEYS = [
    (section.path, name, field)
    for section in key_tables.sections()
    for name, field in section.spec.model_fields.items()
    if name not in key_tables.NOT_WRITTEN
]


def pages_of(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    inner = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for each in inner for page in pages_of(each)]


def titles_of(navigation: Any) -> set[str]:
    if isinstance(navigation, str):
        return set()
    own = set(navigation) if isinstance(navigation, dict) else set()
    inner = navigation.values() if isinstance(navigation, dict) else navigation
    return own.union(*map(titles_of, inner))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_page_is_in_the_navigation_once(language: str) -> None:
    folder = DOCS / language
    pages = [path.relative_to(folder).as_posix() for path in folder.rglob("*.md")]
    pages += [path.relative_to(folder).with_suffix(".md").as_posix() for path in folder.rglob("*.ipynb")]
    only = pages_of(SETTINGS["extra"]["chinese_pages"]) if language == "zh" else []
    assert sorted(pages_of(SETTINGS["nav"]) + only) == sorted(pages)


def test_every_word_of_the_menu_has_a_chinese_translation() -> None:
    assert titles_of(SETTINGS["nav"]) | {"dark", "light"} == SETTINGS["extra"]["chinese"].keys()


def test_the_site_loads_no_font_and_no_script_from_elsewhere() -> None:
    assert SETTINGS["theme"]["font"] is False and SETTINGS["strict"] is True
    assert not re.search(r"https?://", (DOCS / "mkdocs.yml").read_text(encoding="utf-8"))


def test_every_key_has_a_meaning_in_both_languages() -> None:
    assert len(KEYS) > 150
    silent = [f"{path}.{name}" for path, name, field in KEYS if not field.description]
    assert not silent
    untranslated = {field.description for _, _, field in KEYS} - {
        text for (_, text), said in key_tables.chinese().entries.items() if CHINESE.search(said)
    }
    assert not untranslated, "add these meanings to docs/keys_zh_CN.po"


def test_no_translation_of_a_meaning_is_left_over() -> None:
    texts = {text for _, text in key_tables.chinese().entries if text}
    assert texts == {field.description for _, _, field in KEYS}


def test_every_number_among_the_keys_has_a_unit_or_none_on_purpose() -> None:
    numbers = [
        (path, name) for path, name, field in KEYS if "number" in key_tables.kinds_of(field.annotation, field.metadata)
    ]
    assert [each for each in numbers if not key_tables.unit_of(each[1]) and each[1] != "prove"] == []
    units = [name for names in key_tables.UNITS.values() for name in names]
    assert len(units) == len(set(units)) and set(units) <= {name for _, name, _ in KEYS}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_of_keys_has_a_row_for_every_key(language: str) -> None:
    page = (DOCS / language / "keys.md").read_text(encoding="utf-8")
    for section in key_tables.sections():
        assert key_tables.table(section, language) in page, section.path


def test_the_pictures_of_the_documentation_show_the_page_of_today() -> None:
    page_check = script("page_check")
    known = json.loads(page_check.PICTURED_FILE.read_text(encoding="utf-8"))
    message = "run make docs where a browser is installed, and look at docs/pictures"
    assert page_check.pictured()["page"] == known["page"], message


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_diagram_is_on_a_page(language: str) -> None:
    shown = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / language).rglob("*.md"))
    pictures = [path.name for path in (DOCS / "pictures").glob(f"*-{language}.*")]
    assert len(pictures) >= 9
    assert not [name for name in pictures if f"pictures/{name}" not in shown]


def test_a_public_address_makes_an_address_for_each_language_and_none_invents_none(tmp_path: Path) -> None:
    for address in ("https://docs.example.org/m", "https://docs.example.org/m/"):
        found = [build_site.language_settings(tmp_path, each, address)["site_url"] for each in LANGUAGES]
        assert found == ["https://docs.example.org/m/en/", "https://docs.example.org/m/zh/"]
    assert "site_url" not in build_site.language_settings(tmp_path, "en", "") and "site_url" not in SETTINGS


def test_links_of_a_page_lead_to_where_the_files_are_in_the_site() -> None:
    folder = DOCS / "en"
    found = build_site.linked_files(folder)
    assert found["repository/decisions/007-tight-plans.md"] == ROOT / "decisions" / "007-tight-plans.md"
    assert not [path for path, file in found.items() if file.is_relative_to(folder) or not file.is_file()]


def test_the_check_of_the_site_sees_a_broken_link_and_a_foreign_script(tmp_path: Path) -> None:
    good, other = (
        '<h2 id="there"></h2><a href="other.html#here">x</a>',
        '<p id="here"></p><a href="page.html#there">x</a>',
    )
    (tmp_path / "page.html").write_text(good, encoding="utf-8")
    (tmp_path / "other.html").write_text(other, encoding="utf-8")
    assert build_site.faults_of(tmp_path) == []
    bad = '<a href="gone.html">x</a><a href="page.html#gone">x</a><script src="https://example.org/a.js"></script>'
    (tmp_path / "other.html").write_text(bad, encoding="utf-8")
    faults = [fault.partition(": ")[2] for fault in build_site.faults_of(tmp_path)]
    assert sorted(faults) == [
        "gone.html leads nowhere",
        "loads https://example.org/a.js",
        "other.html#here has no such anchor",
        "page.html#gone has no such anchor",
    ]


def notebook(language: str) -> dict[str, Any]:
    return dict(json.loads((DOCS / language / "notebook.ipynb").read_text(encoding="utf-8")))


def test_both_notebooks_have_the_same_code_and_outputs() -> None:
    first, second = (
        [(cell["source"], cell["outputs"]) for cell in refresh.code_cells(notebook(each))] for each in LANGUAGES
    )
    assert first == second and len(first) > 5


def test_the_notebook_prints_what_it_shows() -> None:
    printed = refresh.run_notebook(notebook("en"))
    shown = ["".join(output["text"]) for cell in refresh.code_cells(notebook("en")) for output in cell["outputs"]]
    assert [text for text in printed if text] == shown, "run: python docs/refresh.py docs/*/notebook.ipynb"


# --- prose
# ------------------------------------------------------------------------------------------------------------------


def sentences(page: Path) -> list[str]:
    """The sentences of a page without code, each cell of a table for itself. A list of names counts as one word."""
    found = []
    for part in re.split(
        r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|\||#))", refresh.BLOCK.sub("\n\n", page.read_text(encoding="utf-8"))
    ):
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", part))
        plain = re.sub(r"(code, )+code", "code", plain)
        for cell in plain.split("|") if plain.lstrip().startswith("|") else [plain]:
            found += re.split(r"(?<=[.!?:;])[\"')*]*\s+", " ".join(cell.split()))
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((DOCS / "en").rglob("*.md"))], ids=lambda page: page.name)
def test_no_sentence_has_more_than_35_words(page: Path) -> None:
    long = [each for each in sentences(page) if len(each.split()) > MAX_WORDS]
    assert not long


def test_the_counter_of_words_sees_a_long_sentence(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\n- Short. {'word ' * 36}end.\n", encoding="utf-8")
    assert [len(each.split()) for each in sentences(tmp_path / "page.md")] == [2, 2, 37]
