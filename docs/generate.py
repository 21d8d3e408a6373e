"""Writes the generated references: of the command line (`cli.md`, from `--help`), of the Python API (`api.md`, from
docstrings), of the flags of other systems (`coming-from/`, flag_tables.py), of the keys of files (`keys.md`,
key_tables.py), and the diagrams of the strategies (`pictures/`, diagrams.py).

    python docs/generate.py            # after a command, an option, a public docstring or a flag has changed

A test runs it and compares.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import runpy
from pathlib import Path
from typing import Any

import meshwright
from meshwright.cli.application import build_application, command_lines
from meshwright.cli.help_text import translate_help
from meshwright.cli.main import main

DOCS = Path(__file__).parent
WORDS = {
    "en": {
        "title": "# The command line",
        "made": "*Made from `--help` by `docs/generate.py`; a test keeps it true.*",
        "intro": (
            "Each command does one thing. Results go to standard output, progress and remarks to standard error; "
            "`--json` prints one JSON object and nothing else. `NO_COLOR` is respected. `--debug` shows the traceback "
            "of an error."
        ),
        "codes": "## Exit codes",
        "head": "| code | meaning |\n|---|---|",
        0: "done",
        1: "the job failed",
        2: "bad input: one line states the error, its location and the remedy",
        3: "no plan fits",
        4: "verification failed: the run does not compute what one device computes",
        75: "preempted or interrupted; the same command resumes",
    },
    "zh": {
        "title": "# 命令行",
        "made": "*由 `docs/generate.py` 根据 `--help` 生成；有测试保证其与程序一致。*",
        "intro": (
            "一条命令做一件事。结果写到标准输出，进度和提示写到标准错误；`--json` 只输出一个 JSON 对象。"
            "遵守 `NO_COLOR`。`--debug` 显示错误的调用栈。"
        ),
        "codes": "## 退出码",
        "head": "| 退出码 | 含义 |\n|---|---|",
        0: "完成",
        1: "任务失败",
        2: "输入有误：一行说明错在哪里、如何改正",
        3: "没有放得下的方案",
        4: "验证失败：运行结果与单设备不一致",
        75: "被抢占或被中断；重复同一命令即可继续",
    },
}
CODES = (0, 1, 2, 3, 4, 75)


def help_of(language: str, *tokens: str) -> str:
    """What the command prints, as lines without trailing blanks."""
    caught = io.StringIO()
    with contextlib.redirect_stdout(caught):
        main([*tokens, "--help", "--lang", language])
    return "\n".join(line.rstrip() for line in caught.getvalue().strip().splitlines())


def summary(language: str, line: str) -> str:
    """The overview line of a command as a sentence."""
    return translate_help(line) + "。" if language == "zh" else line[:1].upper() + line[1:] + "."


def page(language: str) -> str:
    words = WORDS[language]
    parts = [words["title"], words["made"], words["intro"], f"```text\n{help_of(language)}\n```", words["codes"]]
    parts.append("\n".join([words["head"], *(f"| {code} | {words[code]} |" for code in CODES)]))
    for name, line in command_lines().items():
        parts += [
            f"## {name}",
            summary(language, line),
            f"```text\n{help_of(language, name)}\n```",
        ]
        inside = [word for word in build_application([name])[name] if not word.startswith("-")]
        for word in inside:
            parts += [f"### {name} {word}", f"```text\n{help_of(language, name, word)}\n```"]
    return "\n\n".join(parts) + "\n"


API_WORDS = {
    "en": "# The Python API\n\n*Made from the docstrings by `docs/generate.py`; a test keeps it true.*\n\n"
    "`import meshwright as mw` imports no torch. What a name needs is imported when it is first used.",
    "zh": "# Python API\n\n*由 `docs/generate.py` 根据文档字符串生成；有测试保证其与程序一致。*\n\n"
    "`import meshwright as mw` 不导入 torch；每个名字在首次使用时才导入所需内容。说明保持英文，与代码一致。",
}


def signature_of(name: str, value: Any) -> str:
    """The signature as it stands in the source, without the types' modules."""
    try:
        return f"{name}{inspect.signature(value)}".replace("'", "")
    except (TypeError, ValueError):
        return name


def api_page(language: str) -> str:
    """One section for each public name; classes of the runtime with their public methods."""
    parts = [API_WORDS[language]]
    for name in sorted(set(meshwright.__all__) - {"__version__"}, key=lambda name: (name.lower(), name)):
        value = getattr(meshwright, name)
        fields = getattr(value, "model_fields", None)
        header = None if fields else f"```text\n{signature_of(f'mw.{name}', value)}\n```"
        parts += [f"## {name}", header, described(value), fields and field_table(fields)]
    from meshwright.train.trainer import Trainer

    parts += ["## Trainer", described(Trainer)]
    for name, value in inspect.getmembers(Trainer):
        if not name.startswith("_") and inspect.isfunction(value):
            parts += [
                f"### trainer.{name}",
                f"```text\n{signature_of(f'trainer.{name}', value)}\n```",
                described(value),
            ]
    return "\n\n".join(part for part in parts if part) + "\n"


def field_table(fields: dict[str, Any]) -> str:
    """The fields of a spec with their defaults."""
    rows = [
        f"| `{name}` | {'required' if field.is_required() else default_of(field)} |" for name, field in fields.items()
    ]
    return "\n".join(["| field | default |", "|---|---|", *rows])


def default_of(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    plain = value is None or isinstance(value, (str, int, float, bool, tuple))
    return (
        f"`{value!s}`" if plain and str(value) else ("empty" if plain or not value else f"`{type(value).__name__}()`")
    )


def described(value: Any) -> str:
    """The docstring as Markdown: its examples and tables as blocks."""
    lines, out, fenced = (inspect.getdoc(value) or "").splitlines(), [], False
    for line in [*lines, ""]:
        code = line.startswith((">>> ", "... ", "    "))
        if code and not fenced:
            out.append("```text")
        elif fenced and not line.strip():
            out.append("```")
        fenced = (code or fenced) and bool(line.strip())
        out.append(line)
    return "\n".join(out).strip()


def write(folder: Path = DOCS) -> None:
    for language in WORDS:
        (folder / language).mkdir(parents=True, exist_ok=True)
        (folder / language / "cli.md").write_text(page(language), encoding="utf-8")
        (folder / language / "api.md").write_text(api_page(language), encoding="utf-8")
    for name in ("flag_tables.py", "key_tables.py", "diagrams.py"):
        runpy.run_path(str(DOCS / name))["write"](folder)


if __name__ == "__main__":
    write()
