"""Chooses the language of the output for every command of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import LANGUAGES, Message


def choose_language(requested: str | None, environment: Mapping[str, str]) -> str:
    """Returns the language `requested`, which may have a region, such as zh-CN. If `requested` is None, returns the
    language of the locale in `environment`, or 'en' if there are no translations to that language.

    Raises: InputError if `requested` is not one of LANGUAGES.

    >>> choose_language(None, {"LANG": "zh_CN.UTF-8"}), choose_language("en", {"LANG": "zh_CN.UTF-8"})
    ('zh', 'en')
    >>> choose_language(None, {}), choose_language("zh-CN", {}), choose_language("en_GB.UTF-8", {})
    ('en', 'zh', 'en')
    """
    if requested is not None:
        language = re.split("[-_.]", requested.lower())[0]
        if language not in LANGUAGES:
            raise InputError(
                Message(
                    "--lang {requested!r} is not one of {languages}{hint}",
                    requested=requested,
                    languages=", ".join(LANGUAGES),
                    hint=did_you_mean(requested, LANGUAGES),
                )
            )
        return language
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "")
    return locale[:2] if locale[:2] in LANGUAGES else "en"
