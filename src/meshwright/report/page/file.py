"""The file: one frame, filled with a page's own body, words and script and with the data. Nothing in it leads out of it, and a policy in it
forbids that anything could."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from meshwright import __version__
from meshwright.report.page.data import compact, page_data
from meshwright.report.page.grid import Grid

FRAME, STYLE = "frame.html", "style.css"


def page_text(found: Grid, command: Sequence[str], cluster: str | None, language: str = "en") -> str:
    """The whole page of a plan. `language` is the one it opens in."""
    job = found.job
    title = f"{job.model.name}, {job.cluster.name}: meshwright plan"
    return filled("plans", title, page_data(found, command, cluster), language)


def filled(page: str, title: str, data: Mapping[str, Any], language: str) -> str:
    """The frame around `page`. What is put in stays as it is, whatever a person wrote in it."""
    places = {
        "TITLE": html.escape(title),
        "LANGUAGE": language,
        "STYLE": part(STYLE),
        "BODY": part(body(page)),
        "DATA": compact({**data, "language": language, "version": __version__}),
        "SCRIPT": "\n".join(map(part, scripts(page))),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda place: places[place[1]].rstrip("\n"), part(FRAME))


def body(page: str) -> str:
    return f"{page}.html"


def scripts(page: str) -> tuple[str, ...]:
    """What a page's script is made of, in order: its words and deeds around what every page has."""
    return f"{page}_words.js", "numbers.js", "draw.js", "frame.js", f"{page}.js"


def part(name: str) -> str:
    return (resources.files("meshwright.report.page") / name).read_text(encoding="utf-8")
