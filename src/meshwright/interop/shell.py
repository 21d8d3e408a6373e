"""Reads the command that a shell script starts: its launcher, its script and its arguments.

Nothing is executed. Assignments, arrays, `${NAME:-default}` and integer arithmetic `$((A * B))` are evaluated, because
scripts write degrees and batch sizes with them. A word with `$(command)`, or with a variable that the script does not
set, stays as it is written. Of `if` ... `else` ... `fi` only the first branch is read, because conditions are not
evaluated.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_ASSIGNMENT = re.compile(r"(?:export |declare |local )?(?P<name>\w+)(?P<adds>\+?)=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>[^{}]*))?\}|(?P<plain>\w+))")
_ARITHMETIC = re.compile(r"\$\(\((?P<expression>[^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_CLOSING = {"(": ")", "{": "}"}
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "torch.distributed.run", "torch.distributed.launch", "srun")
MAX_EXPANSIONS = 20
"""Maximum number of nested variables of a word. More are a variable that contains itself."""


class ShellCommand(NamedTuple):
    """A launch command: the arguments of the launcher, the script (a path, a module, or ''), and its arguments.
    `skipped`: the number of branches of the shell script (`else`, `elif`) that were not read."""

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    skipped: int = 0


def read_command(text: str) -> ShellCommand:
    """Returns the launch command of a script: the last command that runs a Python script or module with arguments. A
    text without such a command is an argument list.

    >>> read_command('N=2\\nA=(--tp $N)\\ntorchrun --nnodes $((N*4)) train.py "${A[@]}" --lr 1e-4')
    ShellCommand(launcher=('--nnodes', '8'), script='train.py', arguments=('--tp', '2', '--lr', '1e-4'), skipped=0)
    """
    variables: dict[str, str] = {}
    found: list[ShellCommand] = []
    skipped = depth = 0
    for line in _commands(text):
        head = line.split(None, 1)[0] if line.strip() else ""
        if depth:  # inside a branch that is not read, at this depth of nested conditions
            skipped += depth == 1 and head in ("else", "elif")
            depth += (head == "if") - (head == "fi")
            continue
        if head in ("else", "elif"):
            skipped, depth = skipped + 1, 1
        if depth or not head:
            continue
        line = re.sub(r"^(?:then|do|if|else|fi)\s+", "", line.strip())
        assigned = _ASSIGNMENT.fullmatch(line)
        if assigned is not None and " " not in _without_quoted(assigned["value"]):
            before = variables.get(assigned["name"], "") + " " if assigned["adds"] else ""
            variables[assigned["name"]] = before + _unquoted(_expanded(assigned["value"], variables))
            continue
        words = _unquoted(_expanded(line, variables)).split()
        command = _launch_command(words)
        if command is not None:
            found.append(command)
    found += [each for value in variables.values() if (each := _launch_command(value.split())) is not None]
    found = [each for each in found if any(word.startswith("--") for word in each.arguments)] or found
    if found:
        return found[-1]._replace(skipped=skipped)
    words = _unquoted(_expanded(" ".join(_commands(text)), variables)).split()
    return ShellCommand((), "", tuple(words[next((at for at, word in enumerate(words) if word[:2] == "--"), 0) :]))


def _launch_command(words: list[str]) -> ShellCommand | None:
    """Returns the launch command in `words`, or None if they run no Python script and have no launcher."""
    start = max((at + 1 for at, word in enumerate(words) if word.rpartition("/")[2] in LAUNCHERS), default=-1)
    start += 1 if words[start - 1 : start + 1] == ["accelerate", "launch"] else 0
    script = next((at for at, word in enumerate(words) if at >= max(start, 0) and word.endswith(".py")), None)
    if script is None and start > 0:
        script = next((at + 1 for at, word in enumerate(words[:-1]) if at >= start and word == "-m"), None)
    if script is None:
        if start <= 0:
            return None
        return ShellCommand(tuple(words[start:]), "", ())
    launcher = words[start:script] if start > 0 else []
    return ShellCommand(tuple(word for word in launcher if word != "-m"), words[script], tuple(words[script + 1 :]))


def _commands(text: str) -> Iterator[str]:
    """Yields the commands of a script without comments. Newlines inside quotes and parentheses do not end a
    command."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    word, quote, at = "", "", 0
    nested: list[str] = []
    while at < len(text):
        char = text[at]
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (not word or word[-1].isspace()):
            at = text.find("\n", at)
            if at < 0:
                break
            continue
        elif char in "({" and (char == "(" or word.endswith("$")):
            nested.append(_CLOSING[char])
        elif nested and char == nested[-1]:
            nested.pop()
        elif char in ";\n&|" and not nested:
            yield word
            word, at = "", at + 1
            continue
        word, at = word + char, at + 1
    yield word


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Returns `text` with the known variables and the integer arithmetic replaced by their values."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        return variables.get(name, match["default"] if match["default"] is not None else match[0])

    def number(match: re.Match[str]) -> str:
        expression = re.sub(r"\b[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match["expression"])
        result = _integer(expression)
        return match[0] if result is None else str(result)

    for _ in range(MAX_EXPANSIONS):
        before, text = text, _ARITHMETIC.sub(number, _VARIABLE.sub(value, text))
        if text == before:
            break
    return text


def _integer(expression: str) -> int | None:
    """Returns the value of an integer expression with + - * / %, or None for any other expression."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(expression)

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _without_quoted(text: str) -> str:
    """Returns `text` without quoted parts and without parts in parentheses or braces."""
    text = re.sub(r"\"[^\"]*\"|'[^']*'", "", text)
    while (inner := re.sub(r"\$?\([^()]*\)|\$?\{[^{}]*\}", "", text)) != text:
        text = inner
    return text.strip()


def _unquoted(text: str) -> str:
    """Returns `text` without quotation marks, and without the parentheses of an array."""
    text = text.strip()
    text = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    return text.replace('"', "").replace("'", "").replace("\\", " ").strip()


def parse_value(text: str) -> Any:
    """Returns a word as a bool, a number or a string.

    >>> [parse_value(text) for text in ("8", "1e-4", "true", "bf16")]
    [8, 0.0001, True, 'bf16']
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def argument_values(words: tuple[str, ...]) -> dict[str, Any]:
    """Returns the options of a command line by name: True for an option without a value, a tuple for several values.
    Words before the first option are left out.

    >>> argument_values(("--tp", "2", "--bf16", "--betas", "0.9", "0.95", "--lr=1e-4"))
    {'--tp': 2, '--bf16': True, '--betas': (0.9, 0.95), '--lr': 0.0001}
    """
    found: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            found[name] = [parse_value(value)] if equals else []
        elif name:
            found[name].append(parse_value(word))
    return {
        name: True if not values else values[0] if len(values) == 1 else tuple(values) for name, values in found.items()
    }
