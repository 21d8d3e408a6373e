"""The command line: `meshwright COMMAND`. Each command is a file in this package, imported only when it runs.

Guarantees: results go to standard output, everything else to standard error. An error in the user's input is one line;
`--debug` shows the traceback. The exit code is the error's own (core/errors.py): 0 done, 1 failed, 2 bad input, 3
nothing fits, 4 verification failed, 75 interrupted.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Sequence

from cyclopts import CycloptsError, UnknownCommandError

from meshwright.cli.application import build_application, command_lines, requested_language
from meshwright.cli.options import join_negative_values, print_note
from meshwright.cli.slow_disk import report_slow_disk
from meshwright.cli.usage_errors import usage_error
from meshwright.core.errors import InputError, MeshwrightError, did_you_mean, translate_system_error
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate
from meshwright.core.printable_text import escape_terminal_controls
from meshwright.core.signals import raise_keyboard_interrupt, stop_signal_handler

COMMANDS_WITHOUT_GC = (["plan"], ["estimate"], ["simulate"], ["fit"], ["catalog"], ["schema"])
CLOSED_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    ours = tokens.index("--") if "--" in tokens else len(tokens)  # the words after `--` belong to another command
    debug = "--debug" in tokens[:ours]
    try:
        with stop_signal_handler(raise_keyboard_interrupt), report_slow_disk(print_note):
            return run_command([token for at, token in enumerate(tokens) if token != "--debug" or at > ours])
    except (KeyboardInterrupt, MeshwrightError, Exception) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in CLOSED_OUTPUT_ERRORS:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards output that is still buffered
        if isinstance(error, BrokenPipeError):
            return 0
        if debug:
            raise
        found = translate_system_error(error, tokens)
        fault = (
            f"{type(error).__name__}: {' '.join(str(error).split())}; this is a fault of meshwright, --debug shows "
            "where"
        )
        line = _localized_error(str(found), tokens[:ours]) if isinstance(found, MeshwrightError) else fault
        print(escape_terminal_controls(Message("meshwright: {line}", line=line)), file=sys.stderr)
        return found.exit_code if isinstance(found, MeshwrightError) else 1


def _localized_error(line: str, tokens: list[str]) -> str:
    """Returns an error line in the language of --lang or the locale."""

    try:
        return translate(line, choose_language(requested_language(tokens), os.environ))
    except InputError:
        return line


def run_command(tokens: list[str]) -> int:
    """Runs one command and turns a usage error of cyclopts into an InputError.

    COMMANDS_WITHOUT_GC are short: garbage collection would take an eighth of their time and find no garbage.
    """
    app, tokens = build_application(tokens), [*join_negative_values(tokens)]
    try:
        if tokens[:1] in COMMANDS_WITHOUT_GC:
            gc.disable()
        code = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        names = list(command_lines())
        if tokens[0].startswith("-"):
            raise InputError(
                Message("option {option} stands before the command: write it after the command", option=tokens[0])
            ) from None
        if isinstance(error, UnknownCommandError) and tokens[0] not in names:
            raise InputError(
                Message(
                    "no command {tokens!r}{hint} commands are {names}",
                    tokens=tokens[0],
                    hint=did_you_mean(tokens[0], names) or ";",
                    names=", ".join(names),
                )
            ) from None
        raise usage_error(tokens[0], error) from None
    finally:
        gc.enable()
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
