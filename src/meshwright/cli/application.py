"""Builds the cyclopts application that `cli/main.py` runs. A file of this package is a command if its module docstring
begins with the name of the command.

A new command is one new file NAME.py with a function NAME. The first line of the module docstring is `meshwright NAME`,
a colon, and the description for the overview of commands.

Guarantees: no command file is imported before the command runs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from keyword import iskeyword
from pathlib import Path

from cyclopts import App

from meshwright.core.language import choose_language
from meshwright.core.version import __version__

HELP_TEXT = """Any PyTorch model, any cluster: plan it, prove it, run it, keep it running.

"meshwright train" alone trains a small model on this machine. "meshwright COMMAND --help" shows options and an example.
Every command takes --debug, which shows the traceback of an error."""
HELP_WIDTH = 100
FIRST_LINE = re.compile(r'"""`meshwright (?P<name>[a-z]+)`: (?P<line>.+?)\.?(""")?$')


def command_lines() -> dict[str, str]:
    """Returns the overview line of each command, in alphabetical order."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {_command_name(file): line for file in files if (line := _command_line(file)) is not None}


def _command_name(file: Path) -> str:
    """Returns the name of the command in `file`. The name of a command that is a keyword of Python, such as import, has
    an underscore after it in the name of the file and of the function."""
    return file.stem.removesuffix("_")


def _module_name(command: str) -> str:
    return f"{command}_" if iskeyword(command) else command


def _command_line(file: Path) -> str | None:
    """Returns the overview line of the command in `file`, or None if the file is not a command."""
    with file.open(encoding="utf-8") as text:
        found = FIRST_LINE.match(text.readline().rstrip())
    return found["line"] if found is not None and found["name"] == _command_name(file) else None


def is_command(name: str) -> bool:
    """Returns whether `name` is a command."""
    file = Path(__file__).with_name(f"{_module_name(name)}.py") if name.isidentifier() else None
    return file is not None and file.exists() and _command_line(file) is not None


def requested_language(tokens: Sequence[str]) -> str | None:
    """Returns the value of --lang in `tokens`, None if there is none.

    >>> requested_language(["plan", "--lang=zh"]), requested_language(["plan", "--lang", "en"]), requested_language([])
    ('zh', 'en', None)
    """
    words = [word for token in tokens for word in token.split("=", 1)]
    return next((word for before, word in pairwise(words) if before == "--lang"), None)


def build_application(tokens: Sequence[str]) -> App:
    """Builds the application. It has only the command `tokens[0]` if that is a command, otherwise all commands. No
    command file is imported."""
    console = formatter = None
    if not tokens or "--help" in tokens or "-h" in tokens:
        from rich.console import Console

        console = Console(width=min(Console().width, HELP_WIDTH) if sys.stdout.isatty() else HELP_WIDTH)
        if choose_language(requested_language(tokens), os.environ) == "zh":
            from meshwright.cli.help_text import ChineseFormatter

            formatter = ChineseFormatter()
    app = App(
        "meshwright",
        help=HELP_TEXT,
        help_format="plaintext",
        version=__version__,
        console=console,
        help_formatter=formatter,
        suppress_keyboard_interrupt=False,
    )
    if tokens and is_command(tokens[0]):
        module = _module_name(tokens[0])
        app.command(f"meshwright.cli.{module}:{module}", name=tokens[0])
    else:
        for name, line in command_lines().items():
            module = _module_name(name)
            app.command(f"meshwright.cli.{module}:{module}", name=name, help=line, sort_key=1)
    return app
