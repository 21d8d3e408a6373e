"""The words are true of the code: links resolve, both languages say the same, examples run, commands, plans and job
files are real."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.cli.application import command_lines
from meshwright.cli.main import main
from meshwright.core.codec import parse_text
from meshwright.core.errors import InputError, Interrupted, MeshwrightError, NothingFits, VerificationFailed
from meshwright.planner.inputs.job import ClusterChoice, ModelChoice, read_job
from meshwright.spec.job import RunConfig
from meshwright.spec.plan import parse_plan
from meshwright.spec.plan_name import _EXAMPLE_TOKENS
from meshwright.spec.precision import recipe
from meshwright.spec.schedules.action import simulate_orders
from meshwright.spec.schedules.schedule import schedule_orders
from meshwright.spec.workload import DataConfig, OptimizerConfig, Workload

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
assert _spec is not None and _spec.loader is not None
refresh: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(refresh)

PAGES: list[Path] = refresh.pages()
BLOCKS = [(page, block) for page in PAGES for block in refresh.blocks(page.read_text(encoding="utf-8"))]
ENGLISH = sorted(str(path.relative_to(ROOT / "docs" / "en")) for path in (ROOT / "docs" / "en").rglob("*.md"))
PAIRS = [
    (ROOT / "README.md", ROOT / "README.zh-CN.md"),
    *((ROOT / "docs" / "en" / name, ROOT / "docs" / "zh" / name) for name in ENGLISH),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def names(pair: Any) -> str:
    return pair.name if isinstance(pair, Path) else pair[0].name


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return refresh.BLOCK.sub("", text)


def anchors(page: Path) -> set[str]:
    """As the usual readers make them from headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def test_the_readme_has_at_most_120_lines_and_a_picture_on_top() -> None:
    for page in PAIRS[0]:
        lines = page.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 120 and lines[2].startswith("![")


def test_both_languages_have_the_same_pages() -> None:
    folder = ROOT / "docs" / "zh"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.md")} == {*ENGLISH, "terms.md"}


@pytest.mark.parametrize("pair", PAIRS, ids=names)
def test_both_languages_have_the_same_headings_tables_and_code(pair: tuple[Path, Path]) -> None:
    shapes = []
    for page in pair:
        text = page.read_text(encoding="utf-8")
        lines = prose(text).splitlines()
        code = [(block.language, block.marks, uncommented(block)) for block in refresh.blocks(text)]
        shapes.append(
            (
                [len(line) - len(line.lstrip("#")) for line in lines if line.startswith("#")],
                sum(line.startswith("|") for line in lines),
                code,
            )
        )
    headings, rows, code = zip(*shapes, strict=True)
    assert headings[0] == headings[1]
    assert rows[0] == rows[1]
    assert code[0] == code[1]


def uncommented(block: Any) -> list[str] | None:
    """What a machine reads of a block; None for output, which no two runs print alike."""
    if block.language in ("text", ""):
        return None
    lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in block.text.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_command_is_explained_on_a_page(language: str) -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs" / language).glob("*.md") if path.name != "cli.md"
    )
    missing = [name for name in command_lines() if f"meshwright {name}" not in text]
    assert not missing


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_about_plans_names_the_commands_that_speak_chinese(language: str) -> None:
    folder = ROOT / "docs" / language
    parts = re.split(r"^## ", (folder / "cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    speaking = {part.split()[0] for part in parts if "--lang STR" in part}
    said = next(line for line in (folder / "plan.md").read_text(encoding="utf-8").split("\n") if "`--lang zh`" in line)
    assert {"plan", *re.findall(r"`([a-z]+)`", said)} == speaking


def commands_of(text: str) -> list[list[str]]:
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [re.sub(r"\s#\s.*", "", line) for line in joined.splitlines() if not line.lstrip().startswith("#")]
    return [re.split(r"[>|&;]", line)[0].split() for line in lines if re.match(r"\s*meshwright\b", line)]


def test_commands_in_the_pages_exist_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    known = set(command_lines())
    helps: dict[str, str] = {}
    seen = 0
    for page, block in BLOCKS:
        for words in commands_of(block.text) if block.language == "bash" else []:
            assert len(words) == 1 or words[1] in known or words[1].startswith("--"), f"{page.name}: {' '.join(words)}"
            if len(words) < 2 or words[1].startswith("--"):
                continue
            asked = words[1:3] if words[1] == "checkpoint" else words[1:2]
            if " ".join(asked) not in helps:
                assert main([*asked, "--help"]) == 0
                helps[" ".join(asked)] = capsys.readouterr().out
            for option in (word.partition("=")[0] for word in words[2:] if word.startswith("--")):
                assert option in helps[" ".join(asked)] or option == "--debug", f"{page.name}: {' '.join(words)}"
                seen += 1
    assert seen > 10


def test_plan_names_in_the_pages_are_plans() -> None:
    seen = set()
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", prose(page.read_text(encoding="utf-8"))):
            if re.fullmatch(r"(dp\d+(x\d+)?|tp\d+|pp\d+)(\.[a-z0-9-]+)*", code):
                seen.add(parse_plan(code).name)
    assert len(seen) > 10


def test_job_files_in_the_pages_are_jobs(tmp_path: Path) -> None:
    seen = 0
    for page, block in BLOCKS:
        if block.language == "yaml":
            path = tmp_path / f"{page.stem}.yaml"
            path.write_text(block.text, encoding="utf-8")
            assert read_job(path).data == DataConfig(**parse_text(block.text, page.name).get("data", {}))
            seen += 1
    assert seen


def test_every_key_of_a_job_is_on_the_page_about_plans() -> None:
    specs = (ModelChoice, Workload, OptimizerConfig, DataConfig, ClusterChoice, RunConfig)
    keys = [name for spec in specs for name, field in spec.model_fields.items() if not field.exclude]
    assert not [name for page in both("plan.md") for name in keys if f"`{name}`" not in page]


def test_every_decision_has_its_own_number_and_stands_in_the_list() -> None:
    pages = sorted(path.name for path in (ROOT / "decisions").glob("[0-9]*.md"))
    listed = re.findall(r"\]\((\d+[^)]+)\)", (ROOT / "decisions" / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == pages
    assert len({name[:3] for name in pages}) == len(pages)


def test_no_entry_of_the_log_has_more_than_12_lines() -> None:
    entries = [
        (page.name, *entry.splitlines())
        for page in sorted((ROOT / "docs" / "log").glob("*.md"))
        for entry in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        if page.name != "README.md"
    ]
    assert entries
    for page, title, *body in entries:
        assert sum(bool(line.strip()) for line in body) <= 12, f"{page}: {title}"


def test_python_in_the_pages_compiles_and_names_what_the_package_has() -> None:
    seen = 0
    for page, block in BLOCKS:
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text, page.name)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mw":
                    assert node.attr in dir(meshwright), f"{page.name}: mw.{node.attr}"
                    seen += 1
    assert seen


RUNNABLE = {(block.language, block.text, block.exit_code) for _, block in BLOCKS if "run" in block.marks}
LONG = ("mine:Net", "meshwright.analysis", "fit --cluster", "gpt3-175b", "1x1:", "z=0", "--advice", "--why-not")
LONG += ("--seq 2048 --top", "--fleet-table", "--days 90", "dp8.tp2.pp4")
"""Parts of slow code blocks, which only `make soak` runs. Other tests in `make test` run the same commands."""
TRAINING = {(block.language, block.text, block.exit_code) for _, block in BLOCKS if "soak" in block.marks}


def try_block(language: str, text: str, code: int, folder: Path) -> str:
    done = refresh.run(refresh.Block(language, (), text, 0, 0), folder)
    assert done.returncode == code, done.stdout
    assert "Traceback" not in done.stdout
    return str(done.stdout)


@pytest.mark.parametrize(
    ("language", "text", "code"),
    [
        pytest.param(*block, marks=[pytest.mark.soak] * any(words in block[1] for words in LONG))
        for block in sorted(RUNNABLE)
    ],
)
def test_what_the_pages_say_to_run_runs(language: str, text: str, code: int, tmp_path: Path) -> None:
    assert try_block(language, text, code, tmp_path).strip()


@pytest.mark.soak
@pytest.mark.parametrize(("language", "text", "code"), sorted(TRAINING))
def test_the_training_that_the_pages_show_runs(language: str, text: str, code: int, tmp_path: Path) -> None:
    try_block(language, text, code, tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_an_example_compiles_and_says_how_it_is_started(example: Path) -> None:
    tree = ast.parse(example.read_text(encoding="utf-8"), example.name)
    said = ast.get_docstring(tree) or ""
    assert any(f"    {start} examples/{example.name}" in said for start in ("torchrun --nproc-per-node 2", "python"))


@pytest.mark.soak
@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if "torchrun" in each.read_text(encoding="utf-8")], ids=names
)
def test_an_example_trains_under_torchrun_as_its_text_says(example: Path) -> None:
    lines = re.findall(
        r"^    (torchrun .*)$", ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or "", re.MULTILINE
    )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    first = []
    for line in lines:
        command = line.replace("torchrun", "torchrun --standalone", 1) + " --steps 6"
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        first.append(re.search(r"step 1  loss (\S+)", done.stdout))
        assert first[-1] is not None, done.stdout
    losses = [float(found[1]) for found in first if found]
    assert max(losses) - min(losses) <= 2e-4, "plans disagree on the first loss"


# --- the numbers of the pages
# ---------------------------------------------------------------------------------------------------


def both(name: str) -> list[str]:
    return [(ROOT / "docs" / language / name).read_text(encoding="utf-8") for language in ("en", "zh")]


def state(billions: float, ranks: int, stage: int) -> float:
    """Gigabytes of model state per rank under ZeRO, 2 + 2 + 12 bytes."""
    weights, gradients, rest = 2.0, 2.0, 12.0
    divided = [part / ranks if stage >= least else part for part, least in ((weights, 3), (gradients, 2), (rest, 1))]
    return billions * sum(divided)


def test_the_memory_of_the_concepts_page_is_the_papers_arithmetic() -> None:
    papers = recipe("bf16", reduce="bf16").bytes_per_parameter(states=2)
    assert papers == 16 == recipe("fp32").bytes_per_parameter(states=2)
    assert recipe("bf16").bytes_per_parameter(states=2) == 18
    figures = [f"{state(7.5, 64, stage):.1f}".replace("120.0", "120") + " GB" for stage in range(4)]
    assert figures == ["120 GB", "31.4 GB", "16.6 GB", "1.9 GB"]
    wrong_claim = [f"{state(25, 8, stage):g} GB" for stage in (0, 1, 2)] + [f"{state(200, 64, 3):g} GB"]
    for page in both("concepts.md"):
        for figure in [*figures, *wrong_claim, "112 GB", "1,040 GB", "260 GB", "520 GB"]:
            assert figure in page, figure


def test_the_bubbles_of_the_concepts_page_are_those_of_the_schedules() -> None:
    cases = [
        ("1f1b", 4, 1, 16, "15.8 %"),
        ("interleaved", 4, 2, 16, "8.6 %"),
        ("1f1b", 8, 1, 8, "46.7 %"),
        ("gpipe", 4, 1, 16, "15.8 %"),
    ]
    for schedule, ranks, virtual, micro_batches, figure in cases:
        stages = ranks * virtual
        played = simulate_orders(
            schedule_orders(schedule, ranks, virtual, micro_batches), [1.0] * stages, [2.0] * stages
        )
        assert f"{played.bubble:.1%}".replace("%", " %") == figure
        assert all(figure in page for page in both("concepts.md"))


def test_exit_codes_of_the_errors_page_are_those_of_the_errors() -> None:
    codes = {
        0,
        *(kind.exit_code for kind in (MeshwrightError, InputError, NothingFits, VerificationFailed, Interrupted)),
    }
    for page in both("errors.md"):
        assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes


def test_messages_of_the_errors_page_are_what_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "typo.yaml").write_text("workload: {sequnce: 4}\n", encoding="utf-8")
    ask = ["estimate", "--cluster", "1x16:a100-80gb", "--plan"]
    trials = [
        (
            ["plan", str(tmp_path / "typo.yaml")],
            "$.workload: Workload has no field 'sequnce'; did you mean 'sequence'?",
        ),
        ([*ask, "dp4.tp3.pp2", "--batch", "32"], "dp(4) * tp(3) * pp(2) = 24 but the cluster has 16 devices"),
        (["estimate", "--plan", "dp8.tq2"], "plan 'dp8.tq2': part 'tq2' is not understood"),
        (
            ["estimate", "--cluster", "1x4:a100-80gb", "--plan", "dp4.mb2", "--batch", "30"],
            "batch 30 is not a multiple of dp(4) * micro_batch(2) = 8",
        ),
    ]
    for arguments, line in trials:
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1
        assert all(line in page for page in both("errors.md"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_of_names_has_every_part_that_a_plan_s_name_may_have(language: str) -> None:
    shape = lambda part: re.sub(r"\d+", "N", re.sub(r"\d+(-\d+)+", "N-N", part))
    page = (ROOT / "docs" / language / "plan.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page[page.index("| `dp8` |") :].partition("\n\n")[0].splitlines()]
    told = {shape(part) for cell in cells for name in re.findall("`([^`]+)`", cell) for part in name.split(".")}
    assert {shape(part) for part in _EXAMPLE_TOKENS} <= told
