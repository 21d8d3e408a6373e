"""Builds the HTML page of the comparison of a recording with one device, for `verify --recording --page`.

Guarantees: the page shows the data of `verify --recording --json` and computes nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.core.messages import LANGUAGES
from meshwright.report.page.plan_page import fill_frame, localized_lines, localized_names


def recording_page_text(data: Mapping[str, Any], lines: Iterable[str], folder: str, language: str = "en") -> str:
    """Returns the HTML page. `data`: the comparison as JSON data. `lines`: its findings and notes as messages, whose
    translations the page shows. `language`: the language in which the page opens."""
    page = {
        **data,
        "folder": folder,
        "words": {each: localized_names(each, (), ()) for each in LANGUAGES},
        "lines": localized_lines(lines),
    }
    title = f"{data['model']} · {data['engine']} · meshwright recording"
    return fill_frame("recording", title, page, language)
