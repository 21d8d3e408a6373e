"""Evaluates the conditions of a shell script: which commands of `if`, `case`, `&&`, `||` and `{ }` run.

Evaluated are `[ ]`, `[[ ]]`, `test` and `(( ))` that compare strings or integers, `-z`, `-n`, `true` and `false`. Any
other condition, and one with a variable that the script does not set, has no value. The bodies of loops and functions
are read once.
"""

from __future__ import annotations

import fnmatch
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

_INTEGERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_ARITHMETIC = {"==": "-eq", "!=": "-ne", "<": "-lt", "<=": "-le", ">": "-gt", ">=": "-ge"}
_KEYWORDS = ("if", "then", "elif", "else", "fi", "do", "done", "while", "until", "{", "}", "esac")
_BRACKETS = {"[": "]", "[[": "]]", "test": ""}


class Command(NamedTuple):
    """A command that begins at `line` of a script. `joined` is what separates it from the command before it: `&&`,
    `||`, `;;`, or an empty string for anything else."""

    line: int
    joined: str
    text: str


class _Block:
    """An open `if`, `case` or `{`. `outer`: whether the commands around it run. `active`: whether those of the current
    branch run. `taken`: whether an earlier branch has run. `word`: what a `case` compares."""

    def __init__(self, kind: str, active: bool, word: str = "") -> None:
        self.kind, self.outer, self.active, self.taken, self.word = kind, active, active, False, word
        self.patterns: list[str] | None = [] if kind == "case" else None

    def begin(self, runs: bool) -> None:
        """Begins a branch, which runs if its condition holds and no earlier branch has run."""
        self.active = self.outer and not self.taken and runs
        self.taken |= self.active


class Blocks:
    """The open blocks of a script. `evaluate` returns whether a condition holds. `status` is that of the last command,
    None as long as nobody has asked for it."""

    def __init__(self, evaluate: Callable[[str, int], bool]) -> None:
        self.status: bool | None = True
        self._evaluate = evaluate
        self._open: list[_Block] = []
        self._last = Command(0, "", "")

    def enter(self, command: Command) -> str:
        """Returns the text of a command without the words of blocks, or '' if it does not run."""
        line, joined, text = command
        runs = self._joins(joined)
        text = self._pattern(joined, text, line)
        while text and (head := text.split(None, 1)[0]) in (*_KEYWORDS, "case"):
            text, joined, runs = self._keyword(head, text, runs), "", True
            text = self._pattern("", text, line)
        if not text or not runs or not self._active():
            return ""
        self.status, self._last = None, Command(line, joined, text)
        return text

    def _active(self) -> bool:
        return not self._open or self._open[-1].active

    def _joins(self, joined: str) -> bool:
        """Returns whether a command after `joined` runs."""
        return joined not in ("&&", "||") or not self._active() or self._succeeded() == (joined == "&&")

    def _succeeded(self) -> bool:
        if self.status is None:
            self.status = self._evaluate(self._last.text, self._last.line)
        return self.status

    def _pattern(self, joined: str, text: str, line: int) -> str:
        """Reads the pattern of a branch of `case`, and returns the rest of the command."""
        if not text or not self._open or self._open[-1].kind != "case" or text.split(None, 1)[0] == "esac":
            return text
        block = self._open[-1]
        if joined == ";;":
            block.patterns = []
        if block.patterns is None:
            return text
        pattern, closing, rest = text.partition(")")
        block.patterns.append(pattern.strip(" (\"'"))
        if not closing:
            return ""
        names = [each.strip(" \"'") for pattern in block.patterns for each in pattern.split("|")]
        block.patterns = None
        test = " || ".join(f"{block.word} == {name or chr(34) * 2}" for name in names)
        block.begin(block.outer and not block.taken and ("*" in names or self._evaluate(f"[[ {test} ]]", line)))
        return rest.strip()

    def _keyword(self, head: str, text: str, runs: bool) -> str:
        """Opens, continues or closes a block, and returns the rest of the command."""
        rest = text[len(head) :].strip()
        block = self._open[-1] if self._open else None
        if head == "case":
            word, _, rest = rest.partition(" in")
            self._open.append(_Block("case", self._active() and runs, word.strip()))
            return rest.strip()
        if head in ("if", "{"):
            self._open.append(_Block(head, self._active() and runs))
        elif head in ("fi", "}", "esac"):
            if block is not None and block.kind == {"fi": "if", "}": "{", "esac": "case"}[head]:
                self._open.pop()
                self.status = True
        elif block is not None and block.kind == "if":
            if head == "elif":
                block.active = block.outer and not block.taken
            elif head == "then":
                block.begin(block.active and self._succeeded())
            elif head == "else":
                block.begin(True)
        return rest


def condition_value(text: str, expanded: Callable[[str], str]) -> bool | None:
    """Returns whether a condition holds, or None if it has no value. `expanded` replaces the known variables.

    >>> condition_value('[[ "$D" == "fp8" || 2 -gt 1 ]]', lambda word: word.replace("$D", "bf16"))
    True
    """
    if text in ("true", ":", "false"):
        return text != "false"
    arithmetic = re.fullmatch(r"\(\((.+?)(==|!=|<=|>=|<|>)(.+)\)\)", text)
    if arithmetic is not None:
        first, second = (expanded(f"$(({side.strip()}))") for side in arithmetic.group(1, 3))
        return _compared(first, _ARITHMETIC[arithmetic[2]], second, patterns=False)
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    if words[:1] == ["!"]:
        inner = condition_value(text.strip()[1:].strip(), expanded)
        return None if inner is None else not inner
    closing = _BRACKETS.get(words[0]) if words else None
    if closing is None or "`" in text or (closing and words[-1] != closing):
        return None
    return _tested([expanded(word) for word in words[1 : -1 if closing else None]], words[0] == "[[")


def _tested(words: list[str], patterns: bool) -> bool | None:
    """Returns the value of the words of a test. `patterns`: the right side of a comparison is a pattern."""
    for names, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
        at = next((at for at, word in enumerate(words) if word in names), None)
        if at is not None:
            sides = _tested(words[:at], patterns), _tested(words[at + 1 :], patterns)
            return decisive if decisive in sides else None if None in sides else not decisive
    if words[:1] == ["!"]:
        inner = _tested(words[1:], patterns)
        return None if inner is None else not inner
    if any("$" in word for word in words):
        return None
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2:
        return {"-z": not words[1], "-n": bool(words[1])}.get(words[0])
    return _compared(words[0], words[1], words[2], patterns) if len(words) == 3 else None


def _compared(first: str, name: str, second: str, patterns: bool) -> bool | None:
    if name in _INTEGERS:
        try:
            return _INTEGERS[name](int(first), int(second))
        except ValueError:
            return None
    if name not in ("=", "==", "!="):
        return None
    equal = fnmatch.fnmatchcase(first, second) if patterns else first == second
    return equal == (name != "!=")
