"""Reads the command that a shell script starts: its launcher, its script and its arguments.

Nothing is executed. Assignments, arrays, `${NAME:-default}` and integer arithmetic `$((A * B))` are evaluated, because
scripts write degrees and batch sizes with them. A word with `$(command)`, or with a variable that the script does not
set, stays as it is written. `if`, `case`, `&&` and `||` are evaluated (shell_conditions.py). A condition without a
value, such as that of a file or of a variable that the script does not set, is read both ways, and the options that
depend on it are returned.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from meshwright.interop.shell_conditions import Blocks, Command, condition_value

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


class Conditional(NamedTuple):
    """An option that depends on a condition without a value, at `line` of the script."""

    line: int
    condition: str
    option: str


class ShellCommand(NamedTuple):
    """A launch command: the arguments of the launcher, the script (a path, a module, or ''), and its arguments.
    `conditional`: the options that depend on conditions without a value."""

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    conditional: tuple[Conditional, ...] = ()


def read_command(text: str) -> ShellCommand:
    """Returns the launch command of a script: the last command that runs a Python script or module with arguments. A
    text without such a command is an argument list.

    >>> read_command('N=2\\nA=(--tp $N)\\ntorchrun --nnodes $((N*4)) train.py "${A[@]}" --lr 1e-4')[:3]
    (('--nnodes', '8'), 'train.py', ('--tp', '2', '--lr', '1e-4'))
    """
    commands = tuple(_commands(text))
    readings = [each for default in (True, False) for each in _readings(commands, default)]
    launches = [(each, command) for each in readings if (command := each.launch()) is not None]
    if not launches:
        words = _unquoted(_expanded(" ".join(each.text for each in commands), readings[0].variables)).split()
        at = next((at for at, word in enumerate(words) if word[:2] == "--"), 0)
        return ShellCommand((), "", tuple(words[at:]))
    chosen = launches[0][1]
    conditional: dict[str, Conditional] = {}
    for reading, command in sorted(launches[1:], key=lambda each: not each[0].choices):
        for option in _differences(chosen, command):
            condition = next(reversed(reading.choices or reading.unknown))
            conditional.setdefault(option, Conditional(reading.unknown[condition], condition, option))
    return chosen._replace(conditional=tuple(conditional.values()))


def _differences(first: ShellCommand, second: ShellCommand) -> Iterator[str]:
    """Yields the options that are not equal in two commands."""
    for words, others in ((first.launcher, second.launcher), (first.arguments, second.arguments)):
        ours, theirs = argument_values(words), argument_values(others)
        yield from (name for name in ours | theirs if ours.get(name) != theirs.get(name))


def _readings(commands: tuple[Command, ...], default: bool) -> list[_Reading]:
    """Reads a script with `default` for each condition without a value, then with one of them different at a time."""
    waiting: list[dict[str, bool]] = [{}]
    seen: set[str] = set()
    found = []
    while waiting:
        reading = _Reading(waiting.pop(0), default)
        for command in commands:
            reading.read(command)
        found.append(reading)
        new = [name for name in reading.unknown if name not in seen]
        seen |= set(new)
        waiting += [reading.choices | {name: not default} for name in new]
    return found


class _Reading:
    """One reading of a script. `choices` are values of conditions without a value, `default` that of the others.
    `unknown` are these conditions, each with its line."""

    def __init__(self, choices: dict[str, bool], default: bool) -> None:
        self.choices, self.default = choices, default
        self.variables: dict[str, str] = {}
        self.unknown: dict[str, int] = {}
        self._found: list[ShellCommand] = []
        self._blocks = Blocks(self._evaluate)

    def launch(self) -> ShellCommand | None:
        """Returns the last launch command, one with options if there is one."""
        found = self._found + [
            each for value in self.variables.values() if (each := _launch_command(value.split())) is not None
        ]
        found = [each for each in found if any(word.startswith("--") for word in each.arguments)] or found
        return found[-1] if found else None

    def _evaluate(self, text: str, line: int) -> bool:
        """Returns whether a condition holds."""
        value = condition_value(text, lambda word: _expanded(word, self.variables))
        if value is None:
            self.unknown.setdefault(text, line)
            return self.choices.get(text, self.default)
        return value

    def read(self, command: Command) -> None:
        """Reads the next command."""
        line = self._blocks.enter(command)
        if not line:
            return
        assigned = _ASSIGNMENT.fullmatch(line)
        if assigned is not None and " " not in _without_quoted(assigned["value"]):
            before = self.variables.get(assigned["name"], "") + " " if assigned["adds"] else ""
            self.variables[assigned["name"]] = before + _unquoted(_expanded(assigned["value"], self.variables))
            self._blocks.status = True
            return
        launch = _launch_command(_unquoted(_expanded(line, self.variables)).split())
        if launch is not None:
            self._found.append(launch)
            self._blocks.status = True


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
    end = next((at for at, word in enumerate(words) if at > script and re.match(r"[0-9&]*[<>]", word)), None)
    return ShellCommand(tuple(word for word in launcher if word != "-m"), words[script], tuple(words[script + 1 : end]))


def _commands(text: str) -> Iterator[Command]:
    """Yields the commands of a script without comments. Newlines inside quotes, parentheses and `[[` do not end a
    command."""
    text = text.replace("\r\n", "\n")
    word, quote, joined, at, line, start = "", "", "", 0, 1, 1
    nested: list[str] = []
    while at < len(text):
        char, pair = text[at], text[at : at + 2]
        start = start if word.strip() else line
        line += char == "\n" or pair == "\\\n"
        if pair == "\\\n":
            word, at = word + " ", at + 2
            continue
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
        elif char == "[" and word.split()[-1:] == ["["]:
            nested.append("]")
        elif nested and char == nested[-1] and (char != "]" or word.endswith("]")):
            nested.pop()
        elif char in ";\n&|" and not nested:
            separator = pair if pair in ("&&", "||", ";;") else ""
            if word.strip():
                yield Command(start, joined, word.strip())
                joined = separator
            joined = separator or joined
            word, at = "", at + max(len(separator), 1)
            continue
        word, at = word + char, at + 1
    if word.strip():
        yield Command(start, joined, word.strip())


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
