"""The file: template, style and script put together around the data. Nothing in it leads out of it, and a policy in it forbids that anything could."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources

from meshwright import __version__
from meshwright.report.page.data import compact, page_data
from meshwright.report.page.grid import Grid

PARTS = ("style.css", "words.js", "numbers.js", "draw.js", "page.js")


def page_text(found: Grid, command: Sequence[str], cluster: str | None, language: str = "en") -> str:
    """The whole page. `language` is the one it opens in."""
    data = {**page_data(found, command, cluster), "language": language, "version": __version__}
    text = part("template.html")
    job = found.job
    title = html.escape(f"{job.model.name}, {job.cluster.name}: meshwright plan")
    for place, filling in {"TITLE": title, "LANGUAGE": language, **{name: part(name) for name in PARTS}, "DATA": compact(data)}.items():
        text = text.replace(f"{{{{{place}}}}}", filling, 1)
    return text


def part(name: str) -> str:
    return (resources.files("meshwright.report.page") / name).read_text(encoding="utf-8")
