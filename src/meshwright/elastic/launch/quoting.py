"""Quotes text for the generated files of a launch: shell scripts, sbatch options, comments and YAML. Every text passes
through the function for its context.

Guarantees, for any text:
- A shell reads the result of `shell_word` as one word and executes no part of it.
- The result of `comment_line` is one comment line for a shell, for sbatch and for YAML.
- The result of `to_yaml` is one YAML document, which both YAML 1.1 and 1.2 parse to the same data.

Sources: POSIX.1-2024, Shell Command Language, 2.2 Quoting; YAML 1.2.2, chapters 5.7 (escapes) and 7.3 (double-quoted
scalars).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.printable_text import check_one_line, escape_unprintable

SBATCH_OPTION_PATTERN = re.compile(r"hetjob|--[a-z-]+(=[A-Za-z0-9_.,:@%/+-]+)?")
"""The pattern of an option that needs no quotes. Other options are refused, since sbatch has its own quoting rules."""

TOKEN_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*")
UNQUOTED_KEY_PATTERN = re.compile(r"[a-z][A-Za-z]{3,}|env|key")
"""The pattern of keys that need no quotes: YAML 1.1 and 1.2 both read them as strings, except "true", "null" and
"false"."""


def shell_word(text: str) -> str:
    """Returns `text` as one word of a shell command."""
    return shlex.quote(text)


def shell_command(words: Sequence[str]) -> str:
    """Returns `words` as one shell command."""
    return " ".join(map(shell_word, words))


def comment_line(text: str) -> str:
    """Returns `text` as one comment line. The space after the `#` prevents sbatch from reading the line as an option
    (#SBATCH)."""
    return f"# {escape_unprintable(text)}"


def sbatch_option(option: str) -> str:
    """Returns `option` as a line of a batch script. Text from the user must have passed `check_token`."""
    assert SBATCH_OPTION_PATTERN.fullmatch(option), option
    return f"#SBATCH {option}"


def check_token(option: str, text: str, example: str) -> str:
    """Returns `text`, the value of the command-line option `option`. Raises InputError if it is neither empty nor a
    word of TOKEN_PATTERN. `example`: a valid word for the error message."""
    if text and not TOKEN_PATTERN.fullmatch(text):
        raise InputError(
            Message(
                "{option} {text!r} must begin with a letter, a digit or _ and have only letters, digits and _.,:@+-; "
                "example: {example}",
                option=option,
                text=text,
                example=example,
            )
        )
    return text


def check_single_line(option: str, text: str) -> str:
    """Returns `text`, the value of the command-line option `option`. Raises InputError if it has several lines."""
    try:
        return check_one_line(text)
    except ValueError as error:
        raise InputError(Message("{option} {text!r}: {error}", option=option, text=text, error=error)) from None


def path_argument(path: str) -> str:
    """Returns `path`, with the prefix ./ if a command would read it as an option."""
    return f"./{path}" if path.startswith("-") else path


def to_yaml(data: Any) -> str:
    """Returns `data` as a YAML document without the separator `---`. `data` consists of dictionaries, lists, strings,
    integers and booleans."""
    return "\n".join(_block_lines(data, "")) + "\n"


def _block_lines(data: Any, indent: str) -> Iterator[str]:
    """Yields the YAML lines of `data`, a dictionary or list that is not empty."""
    for key, value in data.items() if isinstance(data, dict) else ((None, value) for value in data):
        head = f"{indent}-" if key is None else f"{indent}{_yaml_key(key)}:"
        if isinstance(value, dict | list) and value:
            inner = list(_block_lines(value, f"{indent}  "))
            if key is None:  # in YAML, the first line of a list item begins after its dash
                yield f"{head} {inner[0].removeprefix(f'{indent}  ')}"
                inner = inner[1:]
            else:
                yield head
            yield from inner
        elif isinstance(value, str) and "\n" in value and _is_literal_block(value):
            yield f"{head} |"
            yield from (f"{indent}  {row}" for row in value.removesuffix("\n").split("\n"))
        else:
            yield f"{head} {_yaml_scalar(value)}"


def _is_literal_block(text: str) -> bool:
    """Returns whether YAML reads a literal block (`|`) as `text`. The text must be printable ASCII, not begin with a
    space or line break, and end with exactly one line break."""
    return (
        text.endswith("\n")
        and not text.endswith("\n\n")
        and text[0] not in " \n"
        and text.replace("\n", "").isascii()
        and all(row.isprintable() for row in text.split("\n"))
    )


def _yaml_key(key: str) -> str:
    return (
        key
        if UNQUOTED_KEY_PATTERN.fullmatch(key) and key.lower() not in ("true", "null", "false")
        else _yaml_scalar(key)
    )


def _yaml_scalar(value: Any) -> str:
    """Returns `value` as JSON, which is valid YAML. Unprintable characters are escaped separately: for one beyond
    U+FFFF, JSON uses two escapes (a surrogate pair), but YAML one."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return "".join(letter if letter.isprintable() else _escape_character(letter) for letter in text)


def _escape_character(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"
