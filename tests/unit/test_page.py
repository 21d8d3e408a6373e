"""The page: every number in it is the planner's, every setting's plans are those of a search, nothing in it leads out,
commands lead back to it."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from math import isfinite, prod
from pathlib import Path
from typing import Any

import pytest
from brute_force import attending
from hypothesis import HealthCheck, example, given, settings
from jobs import cluster, decoder, named_job, small_job
from test_search import small_jobs

from meshwright.cli.main import main
from meshwright.core.errors import MeshwrightError
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.best_plans import SearchObjective
from meshwright.planner.search.ranking import search_plans
from meshwright.report.page.page_grid import (
    PLANS_PER_ANCHOR,
    GridShape,
    PageGrid,
    grid_shape_for,
    page_axes,
    resize_cluster,
    search_page_grid,
)
from meshwright.report.page.plan_page import (
    CHART_UNITS,
    FRAME_FILE,
    STYLE_FILE,
    page_body,
    page_scripts,
    pipeline_chart,
    plan_page_text,
    read_asset,
    simulate_pipeline,
)
from meshwright.spec.estimate import MemoryBreakdown, TimeBreakdown
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan
from meshwright.spec.plan_name import _EXAMPLE_TOKENS
from meshwright.spec.schedules.schedule import offered_schedules

SMALL: GridShape = (1, 2, 1)
PAGES = ("plans", "run", "recording")


def embedded(text: str) -> dict[str, Any]:
    """The data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    for point in data["points"]:
        point["plans"] = [dict(zip(data["keys"]["entry"], row, strict=False)) for row in point["plans"]]
    return data


def page_of(job: Job, shape: GridShape = SMALL) -> tuple[PageGrid, dict[str, Any]]:
    found = search_page_grid(job, page_axes(job, shape))
    return found, embedded(plan_page_text(found, ["meshwright", "plan"], job.cluster.name))


EVEN = decoder(((1, 8),), hidden=32, heads=2, vocabulary=108)
EVEN = EVEN.but(layers=tuple(map(attending(32, 0, 0.0), EVEN.layers)))
"""On four devices with one sequence, two of its plans take the same time but for a rounding."""


def sizeless(name: str) -> str:
    """The name of a plan without its micro-batch size: one plan of the page stands for all sizes."""
    return re.sub(r"(^|\.)mb\d+", "", name)


def check_anchors(job: Job) -> None:
    """The plans of every anchor are on the page."""
    found, data = page_of(job)
    for point, shown in zip(found.points, data["points"], strict=True):
        names = {sizeless(entry["name"]) for entry in shown["plans"]}
        assert len(names) == len(shown["plans"])
        assert point.error or len(point.anchors) == len({anchor.job.to_json() for anchor in point.anchors})
        for anchor in point.anchors:
            try:
                expected = {sizeless(entry.name) for entry in search_plans(anchor.job, 3).plans}
            except MeshwrightError:
                expected = set()
            assert expected <= names
            assert isfinite(anchor.score) == bool(expected)


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@example(small_job(EVEN, cluster(1, 4, 2e6), 1, precision="fp32", sequence=32))
@given(small_jobs())
def test_every_point_has_the_plans_of_its_searches(job: Job) -> None:
    check_anchors(job)


@pytest.mark.soak
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(small_jobs())
def test_every_point_of_20_random_jobs_has_the_plans_of_its_searches(job: Job) -> None:
    check_anchors(job)


def test_the_grid_of_points_depends_on_the_plan_space_and_on_nothing_else() -> None:
    assert inspect.signature(grid_shape_for).parameters.keys() == {"considered"}
    sizes = [prod(grid_shape_for(considered)) for considered in (10**5, 10**7, 5 * 10**7, 10**9)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 18 and sizes[-1] == 1


def test_with_a_budget_the_range_of_memory_is_one_of_budgets_up_to_the_memory_of_a_device() -> None:
    job = named_job("llama2-7b", "1x4:a100-40gb", 16, 2048)
    axes = page_axes(job.but(cluster=job.cluster.but(budget=36 * 2.0**30)), (2, 1, 1))
    assert axes.memory == tuple(size * 2**30 for size in (24, 36, 40))
    assert [on.devices for on in axes.clusters] == [4, 8]
    budgets = [anchor.cluster.budget for anchor in axes.anchors(job.but(cluster=axes.clusters[0]))][:3]
    assert budgets == [size * 2**30 for size in (36, 24, 40)]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(small_job(batch=16), id="small"),
        pytest.param(named_job("llama2-7b", "1x4:a100-40gb", 16, 2048), id="llama2-7b", marks=pytest.mark.soak),
    ],
)
def test_families_and_what_was_left_out_of_the_question_are_those_of_the_search(job: Job) -> None:
    found, data = page_of(job, (1, 1, 1))
    answer = search_plans(job, PLANS_PER_ANCHOR)
    shown = data["points"][0]
    on_page = {(data["families"][entry["family"]], sizeless(entry["name"])) for entry in shown["plans"]}
    assert on_page >= {(family.name, sizeless(family.plan.name)) for family in answer.families}
    assert [
        (data["reasons"][reason], count, shown["examples"][example])
        for reason, count, example in shown["anchors"][0]["rejected"]
    ] == [(entry.reason, entry.count, entry.example) for entry in answer.rejected]
    assert shown["considered"] == answer.considered
    assert data["lines"]["en"] == {} and set(shown["examples"]) <= data["lines"]["zh"].keys()
    assert found.base.job == job


def test_nothing_of_the_page_leads_out_of_it() -> None:
    job = small_job()
    text = plan_page_text(search_page_grid(job, page_axes(job, (1, 1, 1))), ["meshwright", "plan"], None)
    assert "default-src 'none'" in text and "connect-src" not in text
    addresses = set(re.findall(r"[a-z]+://[^\s\"'<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "the name of a vocabulary, nothing else"
    assert not re.search(
        r"@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")|<iframe|<script src|fetch\(|XMLHttpRequest|import\(",
        text,
    )
    assert "{{" not in text.replace("{{DATA}}", "")


def test_what_a_person_wrote_takes_no_place_of_the_frame() -> None:
    job = small_job().but(model=decoder().but(name="{{DATA}}{{STYLE}}"))
    text = plan_page_text(search_page_grid(job, page_axes(job, (1, 1, 1))), ["meshwright", "plan"], None)
    assert "<title>{{DATA}}{{STYLE}}, " in text and embedded(text)["model"]["name"] == "{{DATA}}{{STYLE}}"


def test_what_a_person_wrote_cannot_end_the_data_or_become_markup() -> None:
    job = small_job().but(model=decoder().but(name="</script><b>x"))
    text = plan_page_text(
        search_page_grid(job, page_axes(job, (1, 1, 1))),
        ["meshwright", "plan", "--set", "model.name=</script>"],
        None,
    )
    assert text.count("</script>") == 2 and "<b>x" not in text
    assert embedded(text)["model"]["name"] == "</script><b>x"


@pytest.mark.soak
def test_a_page_of_many_settings_and_ranks_stays_under_a_megabyte() -> None:
    job = small_job(decoder(((48, 128),)), cluster(2, 8), 64)
    text = plan_page_text(search_page_grid(job, page_axes(job, (1, 3, 1))), ["meshwright", "plan"], job.cluster.name)
    once = (
        len(text.encode())
        - sum(len(read_asset(name).encode()) for name in (STYLE_FILE, page_body("plans"), *page_scripts("plans")))
        - len(json.dumps(embedded(text)["charts"]))
    )
    settings = len(embedded(text)["points"])
    assert settings == 3
    assert once * 18 / settings + 250_000 + 70_000 < 1e6


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_labels(page: str) -> None:
    words, *script = map(read_asset, page_scripts(page))
    english, chinese = words.split("\n  zh: {")
    labels = [re.findall(r"(?:^|, )\s*(\w+): (?=[\"(]|\{ \w)", half, re.MULTILINE) for half in (english, chinese)]
    assert labels[0] == labels[1] and len(labels[0]) > 40
    assert set(re.findall(r'data-say="(\w+)"', read_asset(FRAME_FILE) + read_asset(page_body(page)))) <= set(labels[0])
    assert set(re.findall(r"\bsay\.(\w+)", "".join(script))) <= set(labels[0])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_explains_every_part_of_a_name_and_every_term(language: str) -> None:
    english, chinese = read_asset("plans_words.js").split("\n  zh: {")
    half = {"en": english, "zh": chinese}[language]
    patterns = {name: json.loads(f'"{text}"') for name, text in re.findall(r'(\w+): \["((?:[^"\\]|\\.)*)", "', half)}
    schedules = {rules.name_part(rules.stages_per_rank) for rules in offered_schedules()}
    for part in _EXAMPLE_TOKENS:
        found = next((name for name, pattern in patterns.items() if re.fullmatch(pattern, part)), None)
        assert found is not None and (found == "schedule") == (part in schedules), part
    explained = re.search(r"explain: \{(.*?)\n    \},\n", half, re.DOTALL)
    assert explained is not None
    terms = set(re.findall(r'(\w+): "', explained[1]))
    assert {*TimeBreakdown.model_fields, *MemoryBreakdown.model_fields} <= terms
    columns = re.search(r"const COLUMNS = \{(.*?)\n\}", read_asset("plans.js"), re.DOTALL)
    assert columns is not None and set(re.findall(r"(?:^|, )\s*(\w+): ", columns[1], re.MULTILINE)) <= terms


@pytest.mark.parametrize("page", PAGES)
def test_no_two_scripts_of_a_page_declare_the_same_name(page: str) -> None:
    """Scripts of one page share a scope: a second constant of a name ends the script, a second function silently
    replaces the first."""
    names = [
        name
        for script in page_scripts(page)
        for name in re.findall(r"^(?:const|let|(?:async )?function) (\w+)", read_asset(script), re.MULTILINE)
    ]
    assert sorted(set(names)) == sorted(names) and {"WORDS", "make", "DATA", "read", "draw", "begin"} <= set(names)


@pytest.mark.parametrize("name", ["dp2.pp4", "dp4.pp2.gpipe.rc-full", "pp4.tp2.interleaved2", "dp8"])
def test_the_chart_is_the_play_of_the_plans_own_order(name: str) -> None:
    job, plan = small_job(decoder(((8, 128),)), cluster(1, 8), 64), parse_plan(name)
    drawn = pipeline_chart(CostModel(job), plan)
    assert drawn["ranks"] == list(range(plan.pp)) and drawn["count"] <= drawn["of"] == plan.micro_batches(64)
    found = simulate_pipeline(CostModel(job), plan, drawn["count"])
    for spans, row in zip(found.spans, drawn["rows"], strict=True):
        assert len(row) == 5 * len(spans)
        now = 0
        for at, ((kind, stage, micro_batch), start, end) in enumerate(spans):
            which, turn, number, idle, taken = row[5 * at : 5 * at + 5]
            assert ("FBW"[which], turn * plan.pp + stage % plan.pp, number) == (kind, stage, micro_batch)
            assert (now + idle) / CHART_UNITS == pytest.approx(start / found.makespan, abs=1 / CHART_UNITS)
            now += idle + taken
            assert now / CHART_UNITS == pytest.approx(end / found.makespan, abs=1 / CHART_UNITS)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved2", "zbh1", "zbv", "dualpipev"])
@pytest.mark.parametrize("pp", [2, 13, 16])
def test_every_schedule_has_a_chart_at_every_number_of_ranks(pp: int, schedule: str) -> None:
    job, plan = small_job(decoder(((2 * pp, 128),)), cluster(1, pp), 4 * pp), parse_plan(f"pp{pp}.{schedule}")
    drawn = pipeline_chart(CostModel(job), plan)
    assert 0 < drawn["count"] <= drawn["of"] and 0 < len(drawn["rows"]) == len(drawn["ranks"]) <= pp


@pytest.mark.parametrize("name", ["dp2.pp4.gpipe", "dp2.pp4", "dp8.mb2"])
def test_a_whole_step_as_played_is_the_steps_estimate_before_its_sums_and_update(name: str) -> None:
    """Without a gradient to sum in a step nothing but the update is left."""
    job, plan = small_job(decoder(((8, 512),), hidden=256), cluster(1, 8), 64), parse_plan(name)
    priced = estimate(job, plan).time
    found = simulate_pipeline(CostModel(job), plan, plan.micro_batches(64))
    assert found.makespan <= priced.step - priced.data
    assert found.makespan == pytest.approx(priced.compute + priced.bubble + priced.pipeline, rel=0.15)


def job_of_two_groups() -> Job:
    """A node of two fast devices and one of two slow devices with a quarter of the memory."""
    first = cluster(1, 2, 64e6).groups[0]
    slow = first.device.but(name="slow", memory=16e6, peak={name: rate / 3 for name, rate in first.device.peak.items()})
    groups = (first, first.but(device=slow))
    return small_job(
        decoder(((4, 512),), hidden=256, heads=4), cluster(1, 2, 64e6).but(groups=groups), 16, sequence=512
    )


def test_the_page_shows_placement_and_memory_limit_of_heterogeneous_ranks() -> None:
    job = job_of_two_groups()
    _, data = page_of(job, (1, 1, 1))
    answer, shown = search_plans(job, PLANS_PER_ANCHOR), {entry["name"]: entry for entry in data["points"][0]["plans"]}
    assert {entry.name for entry in answer.plans} <= shown.keys() and data["inputs"].keys() == {"memory"}
    placed = [entry for entry in answer.plans if entry.plan.placement]
    assert placed and data["inputs"]["memory"][0] == data["inputs"]["memory"][2]
    for known in answer.plans:
        entry = shown[known.name]
        assert entry["verdict"] == known.estimate.verdict
        seconds = [data["program"]["constants"][-1 - operand] for operand in entry["time"]]
        assert seconds == pytest.approx([seconds for _, seconds in known.estimate.time], rel=1e-9)
        memories = [job.cluster.groups[group].device.memory for group in known.plan.placement]
        assert entry["limits"] == pytest.approx([0.98 * memory for memory in memories]) or not known.plan.placement
    assert {family.plan.name for family in answer.families} <= shown.keys()


def test_devices_double_and_halve_as_the_name_of_the_cluster_says() -> None:
    asked = {
        name: named_job("llama2-7b", name, 64, 2048).cluster
        for name in ("1x8:a100-80gb", "2x8:h100@ib-ndr", "2x8:a100-80gb+4x8:v100-32gb")
    }
    assert [other.name for step in (-1, 1) for other in resize_cluster(asked["1x8:a100-80gb"], step)] == [
        "1x4:a100-80gb",
        "2x8:a100-80gb",
    ]
    assert [other.name for step in (-1, 1) for other in resize_cluster(asked["2x8:h100@ib-ndr"], step)] == [
        "1x8:h100@ib-ndr",
        "4x8:h100@ib-ndr",
    ]
    assert [other.name for other in resize_cluster(asked["2x8:a100-80gb+4x8:v100-32gb"], 1)] == [
        "4x8:a100-80gb+8x8:v100-32gb"
    ]
    assert not list(resize_cluster(cluster(1, 8), 1)), "a cluster that no name describes"


def test_plans_can_be_ranked_by_what_they_leave_free_among_those_that_run() -> None:
    job = small_job(on=cluster(1, 4, 2.0**25))
    found = search_page_grid(job, page_axes(job, (1, 1, 1)), SearchObjective.headroom, runnable=True)
    answer = search_plans(job, PLANS_PER_ANCHOR, SearchObjective.headroom, runnable=True)
    assert {entry.plan for entry in answer.plans} <= {priced.plan for priced in found.base.plans}
    assert embedded(plan_page_text(found, [], None))["objective"] == "headroom"


def test_sequences_end_where_the_positions_of_the_model_do() -> None:
    job = small_job(decoder().but(context=256), batch=7)
    axes = page_axes(job, (3, 3, 3))
    assert axes.lengths[0] == 32 and axes.lengths[-1] == 256 and 128 in axes.lengths and axes.batch == (2, 7, 28)


def test_the_command_line_writes_a_page_whose_commands_lead_back_to_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.html"
    asked = [
        "plan",
        "--model",
        "gpt2-xl",
        "--cluster",
        "1x2:v100-32gb",
        "--batch",
        "8",
        "--seq",
        "1024",
        "--pin",
        "tp=1,pp=1",
    ]
    assert main([*asked, "--page", str(path), "--lang", "zh"]) == 0
    said = capsys.readouterr()
    assert f"网页：{path}" in said.err and path.stat().st_size < 1e6
    data = embedded(path.read_text(encoding="utf-8"))
    assert data["language"] == "zh" and data["command"] == [
        "meshwright",
        "plan",
        "--model",
        "gpt2-xl",
        "--pin",
        "tp=1,pp=1",
    ]
    axes, inputs = data["axes"], data["inputs"]
    for devices, batch, memory in ((0, 8, inputs["memory"][0]), (-1, 32, inputs["memory"][1])):
        words = [
            *data["command"][1:],
            "--cluster",
            data["clusters"][devices],
            "--set",
            f"cluster.memory={memory / 2**30:.0f}GiB",
            *("--batch", str(batch), "--seq", str(axes["sequence"][0])),
        ]
        code = main([*words, "--json", "--top", "3"])
        answer = json.loads(capsys.readouterr().out) if code == 0 else {"plans": []}
        shown = {sizeless(entry["name"]) for entry in data["points"][devices]["plans"]}
        assert {sizeless(entry["name"]) for entry in answer["plans"]} <= shown


def test_a_page_is_of_all_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster", "1x4:cpu", "--page", str(tmp_path / "out.html"), "--objective", "fewest"]) == 2
    assert "--page ranks plans on all devices, --objective fewest also on fewer" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--page", "--save"])
def test_a_place_that_cannot_be_written_is_said_before_the_search(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--cluster", "1x4:cpu", option, str(tmp_path / "no" / "out.html")]) == 2
    assert f"folder {tmp_path / 'no'} does not exist; name a file in an existing folder" in capsys.readouterr().err
    assert main(["plan", "--cluster", "1x4:cpu", option, str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_an_installation_brings_every_part_of_the_page() -> None:
    root = Path(__file__).parents[2]
    globs = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"][
        "meshwright"
    ]
    parts = {FRAME_FILE, STYLE_FILE, *(name for page in PAGES for name in (page_body(page), *page_scripts(page)))}
    brought = {path for glob in globs for path in (root / "src" / "meshwright").glob(glob)}
    assert {root / "src" / "meshwright" / "report" / "page" / name for name in parts} <= brought
