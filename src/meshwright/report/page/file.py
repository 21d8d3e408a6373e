"""The file: template, style and script put together around the data. Nothing in it leads out of it, and a policy in it forbids that anything could."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from meshwright import __version__
from meshwright.report.page.data import compact, page_data
from meshwright.report.page.grid import Grid

PARTS = ("style.css", "words.js", "numbers.js", "draw.js", "page.js")


def page_text(found: Grid, command: Sequence[str], cluster: str | None, language: str = "en") -> str:
    """The whole page of a plan. `language` is the one it opens in."""
    job = found.job
    title = f"{job.model.name}, {job.cluster.name}: meshwright plan"
    return filled("template.html", PARTS, title, page_data(found, command, cluster), language)


def filled(template: str, parts: Sequence[str], title: str, data: Mapping[str, Any], language: str) -> str:
    """`template` with its parts and the data in their places."""
    text = part(template)
    told = compact({**data, "language": language, "version": __version__})
    for place, filling in {"TITLE": html.escape(title), "LANGUAGE": language, **{name: part(name) for name in parts}, "DATA": told}.items():
        text = text.replace(f"{{{{{place}}}}}", filling, 1)
    return text


def part(name: str) -> str:
    return (resources.files("meshwright.report.page") / name).read_text(encoding="utf-8")
