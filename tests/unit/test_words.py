"""What is said: both languages say the same things, numbers carry their units, lines fold by what a terminal shows."""

from __future__ import annotations

import ast
import re
import string
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli.main import main
from meshwright.cli.verify import _finding_text, _lossy_notes
from meshwright.core.errors import InputError
from meshwright.core.i18n.line_patterns import _translate_piece, translate_line
from meshwright.core.i18n.line_patterns_zh import LINES
from meshwright.core.i18n.messages import (
    MESSAGE_TABLES,
    choose_language,
    make_message,
    make_term_message,
    message_table,
    render_message,
)
from meshwright.elastic.event_log import EventLog
from meshwright.report.faults import read_events
from meshwright.report.run import read_run
from meshwright.report.run_text import list_decisions, run_text
from meshwright.report.text import align_columns, display_width, round_to_sum, wrap_text
from meshwright.spec.event import EVENTS_FILE_NAME, RunEvent
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import StepRecord
from meshwright.spec.workload import Workload
from meshwright.train.console import RunConsole
from meshwright.train.straggler import ALL_HEALTHY_TEXT, SlowPhase, Straggler

CHANGES = [
    RunEvent(kind="slow", at=0.0, step=41, ranks=(3,), cause="rank 3 computes 2.1 times as long as its peers"),
    RunEvent(kind="rebalanced", at=0.0, step=41, plan="dp4.z1.ga9-9-9-5", predicted=1.6),
    RunEvent(kind="rebalance_result", at=0.0, step=51, plan="dp4.z1.ga9-9-9-5", predicted=1.6, measured=1.5),
    RunEvent(kind="slow", at=0.0, step=60, cause=ALL_HEALTHY_TEXT),
    RunEvent(
        kind="slow",
        at=0.0,
        step=70,
        ranks=(2,),
        slots=(2,),
        cause="computes 2.0 times as long as it should",
        decision="goes on without device 2",
        predicted=1.4,
    ),
    RunEvent(
        kind="device_readmitted",
        at=0.0,
        step=90,
        slots=(2,),
        cause="it multiplies 2.0 times as fast as when it was left out",
        predicted=1.2,
    ),
    RunEvent(kind="rebalance_result", at=0.0, step=99, cause="taking back device 2", predicted=1.2, measured=1.1),
]


def places(text: str) -> set[tuple[str, str]]:
    """Names and kinds of the places of a text; the noun of a count is the language's own."""
    return {
        (field, (kind or "").split(" ")[0]) for _, field, kind, _ in string.Formatter().parse(text) if field is not None
    }


def test_both_languages_have_the_same_keys_and_places() -> None:
    english, chinese = message_table("en"), message_table("zh")
    assert english.keys() == chinese.keys()
    assert [key for key in english if places(english[key]) != places(chinese[key])] == []


@pytest.mark.parametrize("language", MESSAGE_TABLES)
def test_every_kind_of_place_is_one_that_can_be_shown(language: str) -> None:
    for key, text in message_table(language).items():
        values = {field: 1.5 for _, field, _, _ in string.Formatter().parse(text) if field is not None}
        assert "{" not in render_message(make_message(key, **values), language)


def test_numbers_carry_their_unit_and_nouns_their_plural() -> None:
    values = {"plan": "dp1", "seconds": 0.25, "nodes": 1, "devices": 8}
    assert render_message(make_message("near.nodes", **values)) == "1 node (8 devices) would fit (dp1, 250.0 ms a step)"
    assert (
        render_message(make_message("near.nodes", **values), "zh")
        == "1 个节点（8 个设备）就放得下（dp1，每步 250.0 ms）"
    )


def test_a_sentence_inside_a_sentence_is_said_in_the_same_language() -> None:
    said = make_message(
        "why.slower",
        families=(make_message("why.family.even", family=make_term_message("family", "data"), share=0.1, plan="dp2"),),
    )
    assert (render_message(said), render_message(said, "zh")) == (
        "slower: data by 10% (dp2)",
        "较慢：数据慢 10%（dp2）",
    )


def test_a_word_that_no_table_knows_is_said_as_it_is() -> None:
    assert render_message(make_term_message("reason", "tp does not divide ffn 3"), "zh") == "tp does not divide ffn 3"


def test_the_language_is_the_asked_one_or_that_of_the_locale() -> None:
    assert choose_language(None, {"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}) == "en"
    assert choose_language(None, {"LC_ALL": "", "LC_MESSAGES": "zh_TW"}) == "zh"
    with pytest.raises(InputError, match="--lang 'zn' is not one of en, zh"):
        choose_language("zn", {})


def test_columns_of_chinese_cells_line_up() -> None:
    lines = align_columns([["方案", "每步"], ["dp2.tp2", "1.00 s"]]).splitlines()
    assert [display_width(line) for line in lines] == [len("dp2.tp2  1.00 s")] * 2


@given(st.text(alphabet="ab 时间，（）1%", max_size=80), st.integers(8, 30))
def test_folding_keeps_every_character_and_the_width(text: str, width: int) -> None:
    lines = wrap_text(text, width, "  ").splitlines() or [""]
    assert "".join(text.split()) == "".join("".join(lines).split())
    longest = max(map(display_width, text.replace("时", " ").replace("间", " ").split()), default=0)
    assert all(display_width(line) <= max(width, longest + 8) for line in lines)


@given(st.lists(st.floats(-50, 50), max_size=9))
def test_whole_parts_sum_to_the_rounded_sum_and_none_is_off_by_a_step(values: list[float]) -> None:
    parts = round_to_sum(values, 0.01)
    assert sum(parts) == round(sum(values) / 0.01) or abs(sum(parts) - sum(values) / 0.01) <= 0.5 + 1e-6
    assert all(abs(part - value / 0.01) < 1 + 1e-6 for part, value in zip(parts, values, strict=True))


def said_by(path: Path) -> set[str]:
    """The lines of rules and errors in a file, with {} for what differs."""

    def skeletons(node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return ["".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)]
        if isinstance(node, ast.BinOp):
            return [first + second for first in skeletons(node.left) for second in skeletons(node.right)]
        return [*skeletons(node.body), *skeletons(node.orelse)] if isinstance(node, ast.IfExp) else ["{}"]

    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    sayers = {
        "Violation": -1,
        "InputError": -1,
        "ValueError": -1,
        "NothingFits": -1,
        "Remedy": 0,
        "print_note": 0,
        "note": 0,
        "remark": 0,
        "MeshwrightError": -1,
        "_note": 0,
        "translate_line": 0,
        "Interrupted": -1,
        "RunLocked": -1,
    }
    named = [(getattr(call.func, "id", getattr(call.func, "attr", "")), call) for call in calls]
    lines = [call.args[sayers[name]] for name, call in named if name in sayers]
    return {text for line in lines for text in skeletons(line) if re.search("[a-z]{4}", text)}


@pytest.mark.parametrize(
    "place",
    [
        "spec/plan.py", "spec/plan_name.py", "spec/constraints.py", "planner/search/*.py", "planner/inputs/*.py",
        "cli/plan.py", "cli/fit.py", "cli/train.py", "cli/doctor.py", "train/console.py", "elastic/*.py",
        "train/recovery.py", "train/run_lock.py", "report/*.py", "cli/report.py", "cli/probe.py", "cli/trials.py",
        "cli/node_role.py", "cli/launch.py", "elastic/launch/*.py",
    ],
)  # fmt: skip
def test_every_line_that_a_command_says_is_known_in_chinese(place: str) -> None:
    said = {text for path in (Path(__file__).parents[2] / "src/meshwright").glob(place) for text in said_by(path)}
    assert said, place
    assert said - LINES.keys() == set()


def test_what_a_proof_found_is_said_in_both_languages() -> None:
    found = {
        "precision": "fp32", "equal": False, "loss": 0.5, "gradient": 0.25, "where": "a.weight", "steps": 3,
        "weight": 0.125, "weight_where": "b.bias", "parameters": (5000, 4000), "labels": (12, 12),
        "labels_by_replica": [5, 7], "missing": ["c"], "rounding": 2, "first": "d differs first",
    }  # fmt: skip
    english, chinese = (
        "".join(render_message(part, language) for part in _finding_text(found, parse_plan("dp2")))
        for language in MESSAGE_TABLES
    )
    assert english == (
        "float32 dp2 differs from one device: loss 5.0e-01, gradients 2.5e-01 at a.weight, weights after 3 steps "
        "1.2e-01 at b.bias, 4,000 parameters instead of 5,000, 12 labels, 5 to 7 a replica, 1 gradients are missing "
        "or extra, the first c, 2 gradients are rounding noise and are skipped, d differs first"
    )
    numbers = [sorted(re.findall(r"\d[\d.e-]*", text.replace(",", ""))) for text in (english, chinese)]
    assert numbers[0] == numbers[1] and "单设备不同" in chinese
    for workload in (Workload(compression={"kind": "low-rank"}), Workload(local={"steps": 4, "replicas": 2})):  # type: ignore[arg-type]
        (line,) = _lossy_notes(workload)
        assert translate_line(line, "zh") != line and "verified" not in translate_line(line, "zh")


def test_a_run_speaks_the_language_of_who_reads_and_what_it_wrote_stays(capsys: pytest.CaptureFixture[str]) -> None:
    screen = RunConsole(words=partial(translate_line, language="zh"))
    screen.hear({"kind": "begin", "step": 4, "steps": 8, "data": "some text", "parameters": 5})
    record = StepRecord(
        step=8,
        loss=2.0,
        tokens=64,
        gradient_norm=1.0,
        lr=0.1,
        seconds=0.5,
        tokens_per_second=1234.0,
        memory={"resident": 2.0**20},
    )
    screen.hear({"kind": "record", "record": record.model_dump()})
    screen.hear({"kind": "sample", "text": "loss 1.0\nall 3 steps are done"})
    said = "some text\n从第 4 步的检查点继续\n第 8/8 步  损失 2.0000  每秒 1.23 k 个 token  峰值 rank 占 1.00 MiB\n"
    assert capsys.readouterr().err == f"{said}它写出的样例：\n  | loss 1.0\n  | all 3 steps are done\n"


def test_what_breaks_in_a_run_and_what_is_done_about_it_is_said_in_chinese(tmp_path: Path) -> None:
    notes: list[str] = []
    journal = EventLog(tmp_path, notes.append)
    killed = "killed by SIGKILL: by someone's kill -9, or by the system for want of memory"
    journal.fault(rank=2, step=7, phase="backward", cause=killed, decision="ranks start again")
    journal.fault(
        step=7, phase="backward", cause="the supervisor was killed", decision="another one adopts its snapshots"
    )
    notes.append("the snapshots of the killed supervisor are of another job: not adopted")
    journal.resize(4, 3, "dp3.z2", 1)
    journal.resize(3, 3, "dp3.z3", 1)
    journal.hear({"kind": "begin", "step": 6, "source": "memory"}, 1)
    journal.hear({"kind": "record", "record": {"step": 7}}, 1)
    notes += [f"step 41: {Straggler(3, phase, 2.1).words}" for phase in SlowPhase] + [f"step 60: {ALL_HEALTHY_TEXT}"]
    notes += [f"step 41: {Straggler(-1, phase, 0.4).words}" for phase in (SlowPhase.data, SlowPhase.communication)]
    notes += [f"{row.words}" for row in list_decisions([*CHANGES, *read_events(tmp_path / EVENTS_FILE_NAME)])]
    for line in notes:
        said = translate_line(line, "zh")
        assert set(re.findall("[a-z]{3,}", said)) <= {"rank", "kill"}, said
    assert translate_line(
        "rank 0 of 2 on a: killed by SIGABRT: a library gave up (gloo does so when ranks disagree on a size)\n  log: x",
        "zh",
    ).endswith("\n  日志：x")


def test_a_report_is_said_in_chinese(tmp_path: Path) -> None:
    steps = [
        StepRecord(step=step, loss=2.0 / step, tokens=64, gradient_norm=1.0, lr=0.1, seconds=0.5, exposed={"data": 0.1})
        for step in (1, 2, 3)
    ]
    (tmp_path / "records.jsonl").write_text("".join(step.to_json(None) + "\n" for step in steps))
    (tmp_path / EVENTS_FILE_NAME).write_text("".join(event.to_json(None) + "\n" for event in CHANGES))
    said = run_text(read_run(tmp_path), "zh").replace(str(tmp_path), "")
    assert set(re.findall("[a-z]{3,}", said)) <= {"rank", "token", "plan", "json"}, said
    assert said.count("\n") == run_text(read_run(tmp_path)).count("\n")


def test_a_line_in_chinese_has_every_value_of_the_english_one() -> None:
    for line, text in LINES.items():
        count = line.replace("{name: llama-tiny}", "").count("{}")
        values = [f"V{at}" for at in range(count)]
        assert sorted(re.findall(r"V\d", text.format(*values))) == values, line


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "pins tp(3) = 3 but the cluster has 8 devices, which 3 does not divide",
            "固定项 tp(3) = 3，而集群有 8 个设备，3 除不尽",
        ),
        (
            "no plan is legal: dp4.ep2: ep(2): the model has no experts; use ep 1 (3 plans); tp8: tp(8) does not "
            "divide heads(4) (1 plan)",
            "没有合法的方案：dp4.ep2：ep(2)：模型没有专家；用 ep 1（3 个方案）；tp8：tp(8) 除不尽 heads(4)（1 个方案）",
        ),
        (
            "$.workload: Workload has no field 'sequenc'; did you mean 'sequence'?",
            "$.workload：Workload 没有字段 'sequenc'；是不是 'sequence'？",
        ),
        (
            "rank 3 is out of memory in step 2: 2.00 GiB more were asked for beside parameters 8 B; that is 2.10 GiB "
            "for activations and all else, 1.00 GiB more than the 1.10 GiB that were predicted; no plan for 2 ranks "
            "takes less memory than dp2: use more ranks, or a smaller batch",
            "rank 3 在第 2 步内存不足：还要 2.00 GiB，已占 parameters 8 B；activations and all else 共 2.10 GiB，"
            "比预测的 1.10 GiB 多 1.00 GiB；2 个 rank 没有比 dp2 更省内存的方案：请用更多 rank，或更小的 batch",
        ),
        ("a line that nobody wrote", "a line that nobody wrote"),
    ],
)
def test_a_line_is_read_by_its_fixed_words_and_a_line_in_it_too(line: str, wanted: str) -> None:
    assert translate_line(line, "zh") == wanted
    assert translate_line(line, "en") == line


def test_a_long_line_of_which_nothing_is_known_is_not_taken_apart() -> None:
    """It has thousands of parts between its marks; each was held against every line of the table."""
    line = "; ".join(f'File "x.py", row {number}: in f: value: {number}' for number in range(60))
    before = _translate_piece.cache_info().misses
    assert translate_line(line, "zh") == line
    assert _translate_piece.cache_info().misses == before + 1


def test_an_error_is_said_in_the_language_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (["--lang", "zh"], ["--lang=zh"]):
        assert main(["plan", "--cluster", "1x8:a100-80gb", "--model", "llama2-7b", "--pin", "tp=3", *asked]) == 2
        assert capsys.readouterr().err == "meshwright: 固定项 tp(3) = 3，而集群有 8 个设备，3 除不尽\n"
