"""Lines that rules and errors say, in another language: a rule writes its own English line, and this table knows the
line by its fixed words.

Of each English line the table has the words with `{}` for what differs from case to case, and the same in Chinese with
those places numbered. A
place can hold a line of the table itself. What the table does not know stays as it is; a test takes every line out of
the code of the rules
and finds it here.

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
    """`line` in `language`, as far as its table knows it; a report of several lines line by line."""
    if language not in LINE_PATTERN_TABLES:
        return line
    rows = [(row, row.lstrip()) for row in line.split("\n")]
    return "\n".join(row.removesuffix(words) + _translate_piece(words, language) for row, words in rows)


@cache
def _translate_piece(line: str, language: str) -> str:
    """The reading that leaves least of the line as it was: as a whole, as several joined by '; ', or behind the place
    that it is about, such as
    '$.workload: ' or a plan's name."""
    known = [
        (pattern, text)
        for pieces, pattern, text in _compiled_patterns(language)
        if all(piece in line for piece in pieces)
    ]
    if not known:
        return line  # nor is any part of it: what a rank says can be long, and has many parts
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
    """Of each line its fixed words, the pattern, and what it reads like."""
    lines: Mapping[str, str] = import_module(LINE_PATTERN_TABLES[language]).LINES
    return tuple(
        (tuple(filter(None, line.split("{}"))), re.compile(_regex_of_line(line), re.DOTALL), text)
        for line, text in lines.items()
    )


def _regex_of_line(line: str) -> str:
    """Of the second of two places side by side, which is the hint at a word that was meant, or nothing."""
    hint = r"(.+?)((?:; did you mean .*\?)?)"
    return hint.join("(.+?)".join(map(re.escape, part.split("{}"))) for part in line.split("{}{}"))
