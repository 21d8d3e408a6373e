"""Shows `--help` in another language than English. The texts are in the catalogue core/i18n/help_zh_CN.po: the help of
each option, and each paragraph of the description of a command."""

from __future__ import annotations

from typing import Any

from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel, InlineText

from meshwright.core.i18n.catalogue import read_catalogue

_TITLES = {"Parameters": "选项", "Arguments": "参数", "Commands": "命令"}
_USAGE = {"[OPTIONS]": "[选项]", "[ARGS]": "[参数]", "COMMAND": "命令"}
_PREFIXES = {"Try:": "示例：", "Or:": "或："}


def translate_help(text: str) -> str:
    """Returns the Chinese text of a help text in English, paragraph by paragraph. A paragraph without a translation,
    such as an example, stays as it is."""
    catalogue, found = read_catalogue("zh help"), []
    for paragraph in text.strip().split("\n\n"):
        plain = " ".join(paragraph.split())
        for english, chinese in _PREFIXES.items():
            plain = plain.replace(f"{english} ", chinese)
        found.append(catalogue.gettext(plain))
    return "\n\n".join(found)


def facts_of_entry(entry: HelpEntry) -> str:
    """Returns the choices, the default and whether an option is required, in brackets. A flag is off by default."""
    facts = [f"可选值：{'、'.join(entry.choices)}"] if entry.choices else []
    facts += [f"默认：{entry.default}"] if entry.default and entry.default not in ('""', "False") else []
    facts += ["必填"] if entry.required else []
    return f" [{'；'.join(facts)}]" if facts else ""


class ChineseFormatter(DefaultFormatter):
    """Formats the help of a command in Chinese."""

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        """Prints one panel with translated title and texts."""
        from rich.text import Text

        entries = []
        for entry in panel.entries:
            given = facts_of_entry(entry)
            if isinstance(entry.description, InlineText) and isinstance(entry.description.primary_renderable, Text):
                entry.description.primary_renderable = Text(
                    translate_help(entry.description.primary_renderable.plain) + given
                )
                entry = entry.copy(choices=None, default=None, required=False)
            entries.append(entry)
        title = panel.title.plain if isinstance(panel.title, Text) else str(panel.title)
        super().__call__(console, options, panel.copy(title=_TITLES.get(title, title), entries=entries))

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        """Prints the line of usage."""
        from rich.text import Text

        line = usage.plain if isinstance(usage, Text) else str(usage)
        for english, chinese in _USAGE.items():
            line = line.replace(english, chinese)
        console.print(Text(f"用法：{line.removeprefix('Usage:').strip()}\n"))

    def render_description(self, console: Any, options: Any, description: Any) -> None:
        """Prints the description of the command."""
        from rich.text import Text

        plain = description.primary_renderable if isinstance(description, InlineText) else description
        console.print(Text(f"{translate_help(plain.plain)}\n") if isinstance(plain, Text) else description)
