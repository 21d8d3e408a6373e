"""Translates the lines of rules and errors. A rule writes its own English line, and this table recognizes the line by
its fixed words.

For each English line the table has the words with `{}` for the variable parts, and the same line in Chinese with
numbered placeholders. A placeholder can contain another line of the table. Unknown lines stay unchanged. A test finds
every line of the rules' code in this table.

>>> translate_line("dp2.tp3: tp(3) does not divide heads(32)", "zh")
'dp2.tp3：tp(3) 除不尽 heads(32)'
>>> translate_line("tp(3) does not divide heads(32)", "en"), translate_line("something else", "zh")
('tp(3) does not divide heads(32)', 'something else')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module

LINE_PATTERN_TABLES = {"zh": "meshwright.core.i18n.line_patterns_zh"}


def translate_line(line: str, language: str) -> str:
    """Returns `line` in `language` where the table knows it. A report of several lines is translated line by line."""
    if language not in LINE_PATTERN_TABLES:
        return line
    rows = [(row, row.lstrip()) for row in line.split("\n")]
    return "\n".join(row.removesuffix(words) + _translate_piece(words, language) for row, words in rows)


@cache
def _translate_piece(line: str, language: str) -> str:
    """Returns the translation that leaves the least of the line unchanged. The line is tried as a whole, as several
    lines joined by '; ', and after the location in front of it, such as '$.workload: ' or a plan's name."""
    known = [
        (pattern, text)
        for pieces, pattern, text in _compiled_patterns(language)
        if all(piece in line for piece in pieces)
    ]
    if not known:
        return line  # No part of it is known either; a message of a rank can be long, and has many parts.
    found = [line]
    for pattern, text in known:
        match = pattern.fullmatch(line)
        if match:
            found.append(text.format(*(_translate_piece(value, language) for value in match.groups())))
    for between, other in (("; ", "；"), (": ", "：")):
        for at in (match.start() for match in re.finditer(between, line)):
            first, rest = line[:at], line[at + 2 :]
            first, rest = (
                first if between == ": " else _translate_piece(first, language),
                _translate_piece(rest, language),
            )
            found.append(first + (other if (first, rest) != (line[:at], line[at + 2 :]) else between) + rest)
    return min(found, key=lambda said: sum(letter.isascii() and letter.isalpha() for letter in said))


@cache
def _compiled_patterns(language: str) -> tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...]:
    """Returns for each line its fixed words, the pattern, and the translation."""
    lines: Mapping[str, str] = import_module(LINE_PATTERN_TABLES[language]).LINES
    return tuple(
        (tuple(filter(None, line.split("{}"))), re.compile(_regex_of_line(line), re.DOTALL), text)
        for line, text in lines.items()
    )


def _regex_of_line(line: str) -> str:
    """Returns the pattern of a line. The second of two adjacent placeholders is the optional hint at a similar word."""
    hint = r"(.+?)((?:; did you mean .*\?)?)"
    return hint.join("(.+?)".join(map(re.escape, part.split("{}"))) for part in line.split("{}{}"))
