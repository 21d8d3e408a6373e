"""Opens a page of `meshwright plan --page` and one of `meshwright report --page` in a headless Chromium and holds what
they show to what Python says:
tables, address, command, no errors, first paint. `make docs` runs it where a browser is installed; elsewhere it says so
and does nothing.

python docs/page_check.py                 # check
python docs/page_check.py --pictures      # also write the pictures of the documentation, docs/pictures/
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from meshwright.cli.main import main as command
from meshwright.core.units import show_bytes, show_step
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.search.ranking import search_plans
from meshwright.report.page.plan_page import FRAME_FILE, STYLE_FILE, page_body, page_scripts, read_asset
from meshwright.spec.record import EVENTS_FILE_NAME, RunEvent, StepRecord

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PICTURES = Path(__file__).parent / "pictures"
PICTURED_FILE = PICTURES / "plan-page.json"
"""What the pictures show (`pictured`). A test compares it with the page as it is."""
ASKED = ["plan", "--model", "llama2-7b", "--cluster", "2x8:a100-80gb", "--batch", "128", "--seq", "4096"]
PICTURED = "dp8.cp2.z2.mb4.compile"
"""The plan whose bars the pictures show."""
WIDE, NARROW = (1280, 1000), (390, 844)
PAINT = 1.0
"""Seconds until the first paint, at most."""
WATCH = """<script>
addEventListener("error", event => { document.body.dataset.error = event.message })
new PerformanceObserver(seen => seen.getEntries().forEach(paint => console.log(`${paint.name} ${paint.startTime} \
ms`))).observe({ type: "paint", buffered: true })
const asked = new URLSearchParams(location.hash.slice(1)), keys = asked.get("press")?.split(",") || []
addEventListener("load", () => {
  const chart = document.querySelector("#lossChart svg"), ends = asked.get("drag")?.split("-")
  if (!chart || !ends) return
  const box = chart.getBoundingClientRect()
  const point = (kind, part) => chart.dispatchEvent(new PointerEvent(kind, { clientX: box.left + part * box.width }))
  point("pointermove", ends[0])
  document.body.dataset.read = document.querySelector("#lossChart .readout").textContent
  point("pointerdown", ends[0]); point("pointerup", ends[1])
  document.body.dataset.address = location.hash
})
addEventListener("load", () => keys.forEach(key => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, \
bubbles: true }))))
setTimeout(() => { document.body.dataset.wide = document.documentElement.scrollWidth - \
document.documentElement.clientWidth }, 400)
</script>"""


class Cells(HTMLParser):
    """The rows of the table of plans, the command, what the page noticed of itself, and addresses that it would ask
    for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.command = ""
        self.selected = -1
        self.language = ""
        self.body: dict[str, str | None] = {}
        self.where: list[str] = []
        self.changed: dict[str, str] = {}
        """By table of "How the answer changes", the text of the row of this setting."""
        self._here = False
        self.parts = self.unexplained = 0
        """Parts of names of plans, and those without an explanation."""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "tr":
            self._here = given.get("aria-selected") == "true" and self.where[-1:] != ["ranked"]
        if tag == "body":
            self.body = given
        if given.get("class") in ("part", "term"):
            self.parts += 1
            self.unexplained += not given.get("title")
        if tag in ("table", "code") and "id" in given:
            self.where.append(given["id"] or "")
        if tag == "html":
            self.language = given.get("lang") or ""
        if tag == "tr" and "data-plan" in given:
            self.selected = len(self.rows) if given.get("aria-selected") == "true" else self.selected
            self.rows.append([])
        if tag == "td" and self.rows and self.where[-1:] == ["ranked"]:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" or (tag == "code" and self.where[-1:] == ["words"]):
            self.where.pop()

    def handle_data(self, data: str) -> None:
        if self.where[-1:] == ["ranked"] and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data
        if self.where[-1:] == ["words"]:
            self.command += data
        if self._here and self.where and self.where[-1].startswith("changed-"):
            self.changed[self.where[-1]] = self.changed.get(self.where[-1], "") + data


class Tables(HTMLParser):
    """The rows of every table, all text that is read, and what the page noticed of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, int] = {}
        self.body: dict[str, str | None] = {}
        self.text = ""
        self._table = self._hidden = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.body = given if tag == "body" else self.body
        self._table = given.get("id") or "" if tag == "table" else self._table
        self._hidden = tag if tag in ("script", "style") else self._hidden
        if tag == "tr":
            self.rows.setdefault(self._table, -1)  # the first one is the head
            self.rows[self._table] += 1

    def handle_endtag(self, tag: str) -> None:
        self._hidden = "" if tag == self._hidden else self._hidden

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data


def browse(browser: str, page: Path, state: str, *options: str, size: tuple[int, int] = WIDE) -> str:
    """What the browser prints of `page` in a state of its address."""
    with tempfile.TemporaryDirectory() as profile:
        words = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
        ]
        words += [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", *(options or ("--dump-dom",))]
        done = subprocess.run(
            [*words, f"{page.as_uri()}#{state}"], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout + "".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def first_paint(browser: str, page: Path) -> float:
    """Seconds until something is seen, by the browser's own clock."""
    logging = ("--enable-logging=stderr", f"--screenshot={page.with_suffix('.png')}", "--timeout=3000")
    found = re.search(r"first-contentful-paint ([\d.]+) ms", browse(browser, page, "", *logging))
    return float(found[1]) / 1e3 if found else float("inf")


def look(browser: str, page: Path, state: str, size: tuple[int, int] = WIDE) -> Cells:
    """What a person sees."""
    cells = Cells()
    cells.feed(browse(browser, page, state, "--dump-dom", "--virtual-time-budget=2000", size=size))
    return cells


def answer(words: list[str]) -> dict[str, Any]:
    """What the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        code = command([*words, "--json", "--top", "8"])
    return dict(json.loads(out.getvalue())) if code == 0 else {"plans": []}


def wrong(browser: str, page: Path, state: str, size: tuple[int, int]) -> Iterator[str]:
    """What the page shows in a state and should not, or does not and should. Every number is that of the command, and
    so is the first plan unless the state has values for which the page has no search."""
    is_searched = not re.search(r"efficiency=|link=|network=|batch=132", state)
    cells = look(browser, page, state, size)
    noticed = cells.body
    if noticed.get("data-error"):
        yield f"script: {noticed['data-error']}"
    if int(noticed.get("data-wide") or 0) > 0:
        yield f"{noticed['data-wide']} pixels wider than a window of {size[0]}"
    if not cells.parts or cells.unexplained:
        yield f"{cells.unexplained} of {cells.parts} parts of names and terms have no explanation"
    print(f"  {state or 'the question'}: {len(cells.rows)} plans, {cells.command}")
    expected = answer(shlex.split(cells.command)[1:])["plans"]
    said = {entry["name"]: entry["estimate"] for entry in expected}
    shown = {row[0].removesuffix("\u25cb"): row for row in cells.rows}
    common = len(shown.keys() & said.keys())
    if len(shown) < len(expected) or common < min(len(said), len(said) / 2 if is_searched else 1):
        yield f"plans {', '.join(shown)}, the command says {', '.join(said)}"
    if expected and is_searched and next(iter(shown)) != expected[0]["name"]:
        yield f"the first plan is {next(iter(shown))}, the command says {expected[0]['name']}"
    for name, text in cells.changed.items():
        if expected and is_searched and expected[0]["name"] not in text:
            yield f"{name} shows {text!r} for this setting, the command says {expected[0]['name']}"
    for name in shown.keys() & said.keys():
        priced, row = said[name], shown[name]
        numbers = [
            show_step(priced["time"]["step"]),
            f"{priced['tokens_per_second']:,.0f}",
            f"{priced['mfu']:.1%}",
            show_bytes(priced["memory"]["reserved"]),
        ]
        if [row[1], row[3], row[4], row[5]] != numbers:
            yield f"shows {row}, the command says {numbers}"


def keyboard(browser: str, page: Path, last: str) -> Iterator[str]:
    """What keys do not do."""
    cases = (
        ("ArrowDown,ArrowDown,ArrowUp,l", "", 1, "zh"),
        ("ArrowUp,l,l", "", 0, "en"),
        ("ArrowDown,0", last, 0, "en"),
    )
    question = look(browser, page, "").command
    for keys, state, selected, language in cases:
        cells = look(browser, page, f"{state}&press={keys}")
        if (cells.selected, cells.language, cells.command) != (selected, language, question):
            yield (
                f"keys {keys}: plan {cells.selected} in {cells.language!r}, {cells.command}; not plan {selected} in "
                f"{language!r}, {question}"
            )


def tried(folder: Path) -> Path:
    """The folder of a run in which a rank was killed and another one slow, as `train` would have left it."""
    job = resolve_job(
        read_job(
            None,
            (),
            {"model.name": "llama-tiny", "cluster.name": "local:4", "workload.batch": 16, "workload.sequence": 128},
        )
    )
    entry = search_plans(job, 1, runnable=True).chosen
    folder.mkdir()
    for name, noun in (("job", job), ("plan", entry.plan), ("estimate", entry.estimate)):
        (folder / f"{name}.json").write_text(noun.to_json(), encoding="utf-8")
    seconds, memory = (
        1.2 * entry.estimate.time.step,
        {"parameters": 7e6, "activations": 4e7, "total": 6e7, "resident": 4e8},
    )
    held = {0: 8.4, 60: 5.0, 120: 4.0}
    records = [
        StepRecord(step=step, loss=4 + 4 / (1 + step / 10), tokens=2048 if step else 0, gradient_norm=1.0, lr=1e-3,
                   seconds=seconds, memory=memory,
                   exposed={"data": seconds / 10}, data_seconds=1e-5, held_out_loss=held.get(step))
        for step in range(121)
    ]  # fmt: skip
    (folder / "records.jsonl").write_text("".join(record.to_json(None) + "\n" for record in records), encoding="utf-8")
    events = [
        RunEvent(
            kind="fault", at=0.0, rank=2, step=31, phase="backward", cause="killed by SIGKILL: by someone's kill -9"
        ),
        RunEvent(kind="recovery", at=1.0, step=30, seconds=0.6, source="memory"),
        RunEvent(kind="slow", at=2.0, step=71, ranks=(3,), cause="rank 3 computes 2.1 times as long as its peers"),
        RunEvent(kind="rebalanced", at=2.0, step=71, plan="dp4.z1.mb4.ga5-5-5-2", predicted=1.7),
        RunEvent(kind="rebalance_result", at=3.0, step=81, plan="dp4.z1.mb4.ga5-5-5-2", predicted=1.7, measured=1.6),
    ]
    (folder / EVENTS_FILE_NAME).write_text("".join(event.to_json(None) + "\n" for event in events), encoding="utf-8")
    return folder


def wrong_run(browser: str, page: Path, told: dict[str, Any], state: str, size: tuple[int, int]) -> Iterator[str]:
    """What the page of a run shows in a state and should not, or does not and should. `told`: what `report --json`
    says."""
    seen = Tables()
    seen.feed(browse(browser, page, state, "--dump-dom", "--virtual-time-budget=2000", size=size))
    if seen.body.get("data-error"):
        yield f"script: {seen.body['data-error']}"
    if int(seen.body.get("data-wide") or 0) > 0:
        yield f"{seen.body['data-wide']} pixels wider than a window of {size[0]}"
    rows = {"timeRows": len(told["time"]), "memoryRows": len(told["memory"]), "eventRows": 1, "decisionRows": 2}
    for table, count in rows.items():
        if seen.rows.get(table) != count:
            yield f"{table}: {seen.rows.get(table)} rows, the report has {count}"
    if "drag=" in state:
        found = re.search(r"steps=(\d+)-(\d+)", seen.body.get("data-address") or "")
        if found is None or not 20 < int(found[1]) < int(found[2]) < 100:
            yield f"dragging over the losses chooses {seen.body.get('data-address')}"
        if not re.search(r"\d: .* \d", seen.body.get("data-read") or ""):
            yield f"a pointer on the losses reads {seen.body.get('data-read')}"
    yield from (f"it says {word!r}" for word in ("undefined", "NaN", "[object", "null") if word in seen.text)
    for fact in (told["plan"], f"{told['loss']['last']['loss']:.4f}", "1.70", "1.60"):
        if fact not in seen.text:
            yield f"it does not say {fact!r}"


def run_pages(browser: str, folder: Path) -> Iterator[str]:
    """What is wrong with the page of a run, in both languages, themes and widths."""
    run, page = tried(folder / "run"), folder / "run.html"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if command(["report", str(run), "--page", str(page), "--lang", "en", "--json"]):
            yield "report --page failed"
            return
    told = json.loads(out.getvalue())
    page.write_text(page.read_text(encoding="utf-8").replace("</head>", WATCH + "</head>", 1), encoding="utf-8")
    told_states = (("", WIDE), ("lang=zh", NARROW), ("theme=dark&lang=zh", WIDE), ("theme=dark", NARROW))
    more_states = (("drag=0.3-0.7", WIDE), ("smooth=90&log=1&steps=20-80&lang=zh", (820, 1000)))
    for state, size in (*told_states, *more_states):
        yield from (
            f"run page, {state or 'as it opens'}: {fault}" for fault in wrong_run(browser, page, told, state, size)
        )


def states(data: dict[str, Any]) -> list[tuple[str, tuple[int, int]]]:
    """The question, and each slider at both of its ends, in several languages, themes and sizes."""
    dresses = ["", "&lang=zh", "&theme=dark", "&theme=dark&lang=zh"]
    found = [("", WIDE), ("lang=zh", NARROW), (f"plan={PICTURED}&with=dp16.z1.mb1", (820, 1000))]
    values = {name: stops for name, stops in data["axes"].items() if len(stops) > 1}
    values |= {name: (low, high) for name, (low, _, high) in data["inputs"].items()}
    values |= {"batch": data["batch"], "sequence": data["lengths"]}
    for at, (name, stops) in enumerate(values.items()):
        found += [(f"{name}={stop}{dresses[at % 4]}", NARROW if at % 2 else WIDE) for stop in {stops[0], stops[-1]}]
    return [*found, ("network=1.5e10&efficiency=0.6&tp=2", WIDE), ("batch=132&sequence=3008", NARROW)]


def pictured() -> dict[str, Any]:
    """What the pictures show: a digest of the files of the page, and the plans with their steps."""
    files = "".join(read_asset(name) for name in (STYLE_FILE, FRAME_FILE, page_body("plans"), *page_scripts("plans")))
    plans = [f"{entry['name']} {show_step(entry['estimate']['time']['step'])}" for entry in answer(ASKED)["plans"]]
    return {"page": hashlib.sha256(files.encode()).hexdigest()[:16], "plans": plans}


def main(arguments: list[str]) -> int:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print(f"no browser is installed ({', '.join(BROWSERS)}): the page was not looked at")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        page, watched = Path(folder) / "page.html", Path(folder) / "watched.html"
        if command([*ASKED, "--page", str(page), "--lang", "en", "--top", "1"]):
            return 1
        text = page.read_text(encoding="utf-8")
        watched.write_text(text.replace("</head>", WATCH + "</head>", 1), encoding="utf-8")
        found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
        assert found is not None
        faults = [
            f"{state}: {fault}"
            for state, size in states(json.loads(found[1]))
            for fault in wrong(browser, watched, state, size)
        ]
        faults += keyboard(browser, watched, states(json.loads(found[1]))[3][0])
        paint = first_paint(browser, watched)
        print(f"  {page.stat().st_size:,} bytes, first paint after {paint:.2f} s")
        faults += run_pages(browser, Path(folder))
        faults += [f"first paint after {paint:.2f} s, at most {PAINT} s"] if paint > PAINT else []
        if "--pictures" in arguments:
            PICTURES.mkdir(exist_ok=True)
            PICTURED_FILE.write_text(json.dumps(pictured(), indent=1) + "\n", encoding="utf-8")
            for language in ("en", "zh"):
                screen = f"--screenshot={PICTURES / f'plan-page-{language}.png'}"
                browse(
                    browser,
                    page,
                    f"plan={PICTURED}&lang={language}&theme=light",
                    screen,
                    "--virtual-time-budget=2000",
                    size=(1180, 1460),
                )
    print("\n".join(faults) or "the pages show what the commands say")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
