"""Validates names, addresses and paths as one line of text, and escapes other text for a terminal. Parsing of input and
all output to a terminal use it.

Names appear on terminals, in comments of generated scripts and in YAML files. There, a line break or a control
character could end a comment or a quoted value. So names with such characters are rejected on input.

Names in files, messages of ranks and generated text may contain characters that control a terminal. These characters
are escaped before display.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata

from meshwright.core.messages import Message

MAX_LINE_CHARACTERS = 4096
"""Maximum number of characters of a name: the length of the longest path that Linux accepts."""

FORBIDDEN_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories that a name may not contain: control characters, lone surrogates, line and paragraph
separators.
"""

BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the display order of text on a terminal."""


def check_one_line(text: str) -> str:
    r"""Returns `text` if it is one line without control characters.

    Raises: ValueError if the text is too long or has such a character. The message names the character.

    >>> check_one_line("runs/a b's")
    "runs/a b's"
    >>> check_one_line("name\nrm -rf /")
    Traceback (most recent call last):
    ValueError: holds the character U+000A at place 4; write one line without control characters
    """
    if len(text) > MAX_LINE_CHARACTERS:
        raise ValueError(
            Message(
                "has {count:,} characters; write at most {max_line_characters:,}",
                count=len(text),
                max_line_characters=MAX_LINE_CHARACTERS,
            )
        )
    for place, letter in enumerate(text):
        if unicodedata.category(letter) in FORBIDDEN_CATEGORIES or letter in BIDI_CONTROLS:
            raise ValueError(
                Message(
                    "holds the character {character} at place {place}; write one line without control characters",
                    character=f"U+{ord(letter):04X}",
                    place=place,
                )
            )
    return text


def reason_of(error: Exception, longest: int = 200) -> str:
    """Returns the class of `error` and the first sentence of its message, on one line. If this is longer than `longest`
    characters, it is cut after a word and ends in dots.

    >>> (reason_of(ValueError("a size is wrong: 3. Hint: look")), reason_of(KeyError()),
    ...     reason_of(ValueError("one two three"), 20))
    ('ValueError: a size is wrong: 3', 'KeyError', 'ValueError: one ...')
    """
    said = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
    return textwrap.shorten(f"{type(error).__name__}{': ' * bool(said)}{said}", longest, placeholder=" ...")


def escape_unprintable(text: str) -> str:
    r"""Returns `text` on one line, with every unprintable character written as an escape.

    >>> escape_unprintable("a\n#SBATCH\u2028é")
    'a\\n#SBATCH\\u2028é'
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


TERMINAL_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Matches control characters of both sets except tabs and line ends, characters that change the direction of text, and
lone surrogates."""


def escape_terminal_controls(text: str) -> str:
    """Returns `text` with every character that controls a terminal replaced by an escape.

    >>> escape_terminal_controls("a\\x9b31m\\u202eb\\n")
    'a\\\\x9b31m\\\\u202eb\\n'
    """
    return TERMINAL_CONTROLS.sub(
        lambda found: (
            found[0].encode("ascii", "backslashreplace").decode() if found[0] >= "\x80" else repr(found[0])[1:-1]
        ),
        text,
    )
