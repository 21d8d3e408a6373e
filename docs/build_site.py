"""Builds the site of the documentation from the pages in `en/` and `zh/`, with settings and navigation of `mkdocs.yml`:

    make site                    # into build/site, strict: a warning is an error
    make site SITE_URL=https://docs.example.org/meshwright    # for this public address
    python -m http.server -d build/site

MkDocs runs once for each language, so that menus, search and page language agree. The pages are those that are read
in the repository; nothing is copied. The functions `on_*` are hooks, which MkDocs calls: files of the repository that a
page links to (decisions, the log, results) become pages too, and diagrams are written into the page, so that they
follow its colours. The site needs no network. After the build, every link and every anchor of the site is checked.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LANGUAGES = {"en": "English", "zh": "中文"}
TITLES = {"en": "Meshwright: plan, prove and run parallel training", "zh": "Meshwright：规划、证明并运行并行训练"}
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
BAR = r"\|"
CODE_WITH_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code in a cell of a table with a bar, which MkDocs would show with its backslash."""
REPOSITORY = "repository"
"""The folder of the site with the pages made from files outside of the language's folder."""
MAX_FILE_BYTES = 200_000
STYLE = """
.diagram { overflow-x: auto; margin: 1em 0 }
.diagram svg { width: 100%; min-width: 34rem; height: auto }
.md-typeset table:not([class]) { font-size: .68rem }
.md-typeset table:not([class]) td, .md-typeset table:not([class]) th { padding: .6em .8em; min-width: 3rem }
.md-typeset td:first-child code { word-break: normal }
"""


def slug(heading: str, separator: str = "-") -> str:
    """Returns the anchor of a heading as the usual readers of repositories make it, so that links work in both."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", separator)


def links_of(text: str) -> list[str]:
    """Returns the targets of the relative links of a page, code left out."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    return [found[3] for found in LINK.finditer(prose) if "://" not in found[3] and not found[3].startswith("#")]


def linked_files(folder: Path) -> dict[str, Path]:
    """Returns the files outside of `folder` that its pages show or link to, and those that these link to, by their
    path in the site."""
    waiting = sorted(folder.rglob("*.md"))
    found: dict[str, Path] = {}
    while waiting:
        page = waiting.pop()
        for target in links_of(page.read_text(encoding="utf-8")):
            file = (page.parent / unquote(target.partition("#")[0])).resolve()
            if not is_shown(file) or file.is_relative_to(folder) or file in found.values():
                continue
            found[site_path(file)] = file
            waiting += [file] if file.suffix == ".md" else []
    return found


def is_shown(file: Path) -> bool:
    """Returns whether a file of the repository can be a page of the site. Pages of the other language are not: they
    have a site of their own."""
    other = any(file.is_relative_to(DOCS / language) for language in LANGUAGES)
    return file.is_relative_to(ROOT) and file.is_file() and not other and file.stat().st_size < MAX_FILE_BYTES


def site_path(file: Path) -> str:
    """Returns the path of a file of the repository in the site."""
    inner = file.relative_to(ROOT).as_posix()
    shown = file.suffix in (".md", ".png", ".svg")
    return f"{REPOSITORY}/{inner}" if shown else f"{REPOSITORY}/{inner}.md"


def on_config(config: Any) -> Any:
    """Uses the anchors of repositories and the language of the site in the navigation and the switch of colours. Some
    pages exist only in Chinese."""
    config.mdx_configs["toc"]["slugify"] = slug
    chinese = config.theme["language"] == "zh"
    words = config.extra["chinese"] if chinese else {}
    more = config.extra["chinese_pages"] if chinese else {}

    def named(items: list[Any]) -> list[Any]:
        return [
            {words.get(title, title): named(inner + more.get(title, [])) for title, inner in item.items()}
            if isinstance(item, dict)
            else item
            for item in items
        ]

    config.nav = named(config.nav)
    for palette in config.theme["palette"]:
        palette["toggle"]["name"] = words.get(palette["toggle"]["name"], palette["toggle"]["name"])
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the linked files of the repository, and the notebook as a page."""
    from mkdocs.structure.files import File, InclusionLevel

    folder = Path(config.docs_dir)
    for path, file in linked_files(folder).items():
        text = None if file.suffix in (".md", ".png", ".svg") else f"# {file.name}\n\n{fence(file)}\n"
        given = {"abs_src_path": str(file)} if text is None else {"content": text}
        files.append(File.generated(config, path, inclusion=InclusionLevel.NOT_IN_NAV, **given))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    for notebook in sorted(folder.glob("*.ipynb")):
        files.append(File.generated(config, f"{notebook.stem}.md", content=notebook_page(notebook)))
    return files


def fence(file: Path) -> str:
    """Returns a source file as a block of code."""
    return f"````{file.suffix.removeprefix('.') or 'text'}\n{file.read_text(encoding='utf-8').rstrip()}\n````"


def notebook_page(path: Path) -> str:
    """Returns a notebook as a page: texts, code, and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            parts.append(
                "".join(data["image/svg+xml"])
                if "image/svg+xml" in data
                else f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"
            )
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links to where the files are in the site, puts diagrams into the page, and removes the marks of blocks for
    the tests. Pages of the repository are not searched."""
    if page.file.src_uri.startswith(REPOSITORY):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri == "troubleshooting.md":
        page.meta["search"] = {"boost": 3}  # whoever pastes a message into the search looks for its cause
    folder = Path(config.docs_dir)
    source = Path(page.file.abs_src_path).parent if page.file.abs_src_path else folder
    here = Path(page.file.src_uri).parent
    if page.file.src_uri.startswith(REPOSITORY):
        source = ROOT / Path(page.file.src_uri).relative_to(REPOSITORY).parent

    def moved(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        file = (source / unquote(path)).resolve()
        for language in LANGUAGES:
            if file.is_relative_to(DOCS / language) and language != folder.name:
                inside = file.relative_to(DOCS).with_suffix(".html").as_posix()
                return f'<a href="{os.path.relpath(inside, Path(folder.name, here))}{hash_}{anchor}">{label}</a>'
        if file.is_relative_to(folder):
            return found[0].replace(target, os.path.relpath(file.relative_to(folder), here) + hash_ + anchor)
        inside = site_path(file) if file.is_relative_to(ROOT) and file.is_file() else ""
        if inside not in files.src_uris:
            return label
        return f"{image}[{label}]({os.path.relpath(inside, here)}{hash_}{anchor})"

    def barred(found: re.Match[str]) -> str:
        code = re.sub(r"[*_|]", lambda sign: f"&#{ord(sign[0])};", escape(found[1].replace(BAR, "|")))
        return f"<code>{code}</code>"

    pieces = FENCED.split(markdown)
    pieces[::2] = [CODE_WITH_BAR.sub(barred, LINK.sub(moved, piece)) for piece in pieces[::2]]
    return re.sub(r"^(```\w+) [^\n]*$", r"\1", "".join(pieces), flags=re.MULTILINE)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Writes diagrams into the page, so that they have its colours. Their texts are not searched."""

    def drawn(found: re.Match[str]) -> str:
        source = files.get_file_from_path(os.path.normpath(Path(page.file.src_uri).parent / unquote(found[1])))
        return f'<div class="diagram" data-search-exclude>{source.content_string}</div>'

    return re.sub(r'<p><img [^>]*src="([^"]+\.svg)"[^>]*></p>', drawn, html)


def language_settings(site: Path, language: str, address: str) -> dict[str, str]:
    """Returns the settings of the site of one language. `address` is the public address of the whole site. If it is not
    empty, every page has its canonical address, and the site map and the page for missing addresses have absolute
    links. Links between pages are relative in any case, so the same site can be read from a folder."""
    own = {"docs_dir": str(DOCS / language), "site_dir": str(site / language), "site_name": TITLES[language]}
    return own | ({"site_url": f"{address.rstrip('/')}/{language}/"} if address else {})


class Page(HTMLParser):
    """The anchors and addresses of a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {given.get("id") or "", given.get("name") or ""}
        if tag == "a" and given.get("href"):
            self.targets.append(given["href"] or "")
        elif tag in ("link", "script", "img", "iframe", "source") and given.get("rel") != "canonical":
            self.loaded.append(given.get("src") or given.get("href") or "")


def faults_of(site: Path) -> list[str]:
    """Returns the links of the built site that lead nowhere, and what it would load from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    faults = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        faults += [f"{path}: loads {each}" for each in page.loaded if re.match(r"(https?:)?//", each)]
        for target in {*page.targets, *page.loaded}:
            if re.match(r"\w+:|//", target) or not target:
                continue
            address, _, anchor = unquote(target).partition("#")
            there = (path.parent / address.partition("?")[0]).resolve() if address else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                faults.append(f"{path}: {target} leads nowhere")
            elif there in pages and anchor not in pages[there].anchors and not anchor.startswith("__"):
                faults.append(f"{path}: {target} has no such anchor")
    return faults


def build(site: Path, address: str = "") -> int:
    """Builds both languages into `site` for the public address `address`. Returns the number of pages."""
    import jieba
    from mkdocs.commands.build import build as build_pages
    from mkdocs.config import load_config

    jieba.setLogLevel(logging.WARNING)
    shutil.rmtree(site, ignore_errors=True)
    for language in LANGUAGES:
        own = language_settings(site, language, address)
        config = load_config(str(DOCS / "mkdocs.yml"), hooks=[str(Path(__file__).resolve())], **own)
        config.theme["language"] = language
        if language == "zh":  # English words between Chinese ones are found as they are written
            config.plugins["material/search"].config.update(
                pipeline=[], separator=r"[\s\u200b\u3000\-、。，．？！；：（）]+"
            )
        config.plugins.on_startup(command="build", dirty=False)
        build_pages(config)
        config.plugins.on_shutdown()
    first = '<meta http-equiv="refresh" content="0; url=en/index.html"><script>if (/^zh/.test(navigator.language)) ' + (
        'location.replace("zh/index.html")</script><a href="en/index.html">English</a> <a href="zh/index.html">中文</a>'
    )
    (site / "index.html").write_text(f'<!doctype html><meta charset="utf-8">{first}\n', encoding="utf-8")
    return len(list(site.rglob("*.html")))


def main(site: Path) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    pages = build(site, os.environ.get("SITE_URL", ""))
    faults = faults_of(site)
    print("\n".join(faults) or f"{pages} pages in {site}, every link leads somewhere, nothing is loaded from elsewhere")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT / "build" / "site"))
