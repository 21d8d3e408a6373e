"""Messages and their Chinese catalogue: both have the same fields, numbers carry units, lines fold to the terminal."""

from __future__ import annotations

import ast
import os
import pickle
import re
import string
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from cyclopts import App
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli.application import HELP_TEXT, build_application, command_lines
from meshwright.cli.main import main
from meshwright.cli.verify import _finding_text, _lossy_notes
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.i18n.catalogue import read_catalogue
from meshwright.core.i18n.terms import TERMS
from meshwright.core.ipc import MessageReader, write_message
from meshwright.core.language import choose_language
from meshwright.core.messages import LANGUAGES, Message, pack_messages, term, translate, unpack_messages
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.failure import RankExit, diagnose, failure_cause
from meshwright.report.faults import read_events
from meshwright.report.run import read_run
from meshwright.report.run_text import list_decisions, run_text
from meshwright.report.text import align_columns, display_width, round_to_sum, wrap_text
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import EVENTS_FILE_NAME, RunEvent, StepRecord, device_names
from meshwright.spec.workload import Workload
from meshwright.train.console import RunConsole
from meshwright.train.straggler import ALL_HEALTHY_TEXT, SlowPhase, Straggler

MAX_WORDS = 35
CHANGES = [
    RunEvent(kind="slow", at=0.0, step=41, ranks=(3,), cause=Straggler(3, SlowPhase.computing, 2.1).words),
    RunEvent(kind="rebalanced", at=0.0, step=41, plan="dp4.z1.ga9-9-9-5", predicted=1.6),
    RunEvent(kind="rebalance_result", at=0.0, step=51, plan="dp4.z1.ga9-9-9-5", predicted=1.6, measured=1.5),
    RunEvent(kind="slow", at=0.0, step=60, cause=ALL_HEALTHY_TEXT),
    RunEvent(
        kind="slow",
        at=0.0,
        step=70,
        ranks=(2,),
        slots=(2,),
        cause=Message("computes {times:.1f} times as long as it should", times=2.0),
        decision=Message("goes on without {words}", words=device_names((2,))),
        predicted=1.4,
    ),
    RunEvent(
        kind="device_readmitted",
        at=0.0,
        step=90,
        slots=(2,),
        cause=Message("it multiplies matrices {first:.1f} times as fast as when it was left out", first=2.0),
        predicted=1.2,
    ),
    RunEvent(
        kind="rebalance_result",
        at=0.0,
        step=99,
        cause=Message("taking back {words}", words=device_names((2,))),
        predicted=1.2,
        measured=1.1,
    ),
]


SOURCE = Path(__file__).parents[2] / "src/meshwright"


def templates(node: ast.expr) -> list[str]:
    """The templates that an argument of `Message` may be."""
    if isinstance(node, ast.IfExp):
        return templates(node.body) + templates(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def source_msgids() -> set[tuple[str, str]]:
    """Contexts and templates of all messages in the sources. A template without words needs no translation."""
    found = {(group, word) for group, words in TERMS.items() for word in words.values() if word}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Message", "mark_msgid") and node.args:
                found |= {("", template) for template in templates(node.args[0])}
    return found


def has_words(template: str) -> bool:
    """Whether `template` has words in its text, or the noun of a count in a field."""
    return bool(re.search(r"[^\W\d_]", re.sub(r"\{[^} ]*\}", "", template)))


def fields(template: str) -> set[tuple[str, str, str]]:
    """Names, conversions and formats of the fields of a template; the noun of a count is the language's own."""
    parts = string.Formatter().parse(template)
    return {(field, flag or "", (kind or "").split(" ")[0]) for _, field, kind, flag in parts if field is not None}


def test_every_message_has_a_chinese_entry_and_no_entry_is_unused() -> None:
    found, entries = source_msgids(), read_catalogue("zh").entries
    assert {each for each in found if has_words(each[1])} - entries.keys() == set()
    assert {each for each in entries if each[1]} - found == set()


def long_sentences(texts: Iterable[str]) -> list[str]:
    """The sentences with more than 35 words; what follows a colon or a semicolon is one of its own, as in the docs."""
    parts = (each for text in texts for each in re.split(r"(?<=[.!?:;])\s+", text))
    return [each for each in parts if len(each.split()) > MAX_WORDS]


def test_no_sentence_of_a_message_or_of_a_help_text_has_more_than_35_words() -> None:
    helps = {text for _, text in read_catalogue("zh help").entries}
    assert len(helps) > 100
    assert long_sentences({template for _, template in source_msgids()} | helps) == []
    assert len(long_sentences(["Short. " + "word " * 36, "word " * 34 + "word: " + "word " * 3])) == 1


def test_every_chinese_entry_has_the_fields_of_its_message() -> None:
    entries = {msgid: text for (_, msgid), text in read_catalogue("zh").entries.items() if msgid}
    assert {msgid: text for msgid, text in entries.items() if fields(msgid) != fields(text)} == {}


def help_paragraphs(app: App) -> Iterator[str]:
    """The texts of `--help` of a command and of the commands in it, without examples."""
    yield from app.help.split("\n\n")
    if app.default_command is not None:
        arguments = app.assemble_argument_collection(parse_docstring=True)
        yield from (argument.parameter.help or "" for argument in arguments if argument.parse and argument.show)
    for name in app:
        if not name.startswith("-"):
            yield from help_paragraphs(app[name])


def test_every_help_text_has_a_chinese_entry_and_no_entry_is_unused(capsys: pytest.CaptureFixture[str]) -> None:
    found = set(command_lines().values()) | set(HELP_TEXT.split("\n\n"))
    for name in command_lines():
        found |= set(help_paragraphs(build_application([name])[name]))
    found = {" ".join(text.split()) for text in found if not text.strip().startswith(("Try: ", "Or: "))}
    entries = {msgid for _, msgid in read_catalogue("zh help").entries if msgid}
    assert entries - found == {"Display this message and exit.", "Display application version."}
    assert found - entries <= {""}
    assert main(["plan", "--help", "--lang", "zh"]) == 0
    out = capsys.readouterr().out
    assert "用法：meshwright plan [选项] [参数]" in out and "每步的序列数，所有设备合计" in out


def test_numbers_carry_their_unit_and_nouns_their_plural() -> None:
    near = Message(
        "{nodes:count node} ({devices:count device}) would fit ({plan}, {seconds:step} a step)",
        plan="dp1",
        seconds=0.25,
        nodes=1,
        devices=8,
    )
    assert near == "1 node (8 devices) would fit (dp1, 250.0 ms a step)"
    unlike_tables = [msgid for _, msgid in source_msgids() if ":seconds} a step" in msgid]
    assert not unlike_tables, "a table says 60.2 s, and :seconds says 1 min 0 s"
    assert Message("{gap:step} a step", gap=60.24) == "60.2 s a step"
    assert translate(near, "zh") == "1 个节点（8 个设备）就放得下（dp1，每步 250.0 ms）"


def test_a_message_inside_a_message_is_in_the_same_language() -> None:
    family = Message("{family} by {share:percent} ({plan})", family=term("family", "data"), share=0.1, plan="dp2")
    slower = Message("slower: {families}", families=(family,))
    assert (slower, translate(slower, "zh")) == ("slower: data by 10% (dp2)", "较慢：数据并行慢 10%（dp2）")


def test_a_word_without_an_entry_is_its_own_name() -> None:
    assert translate(term("reason", "tp does not divide ffn 3"), "zh") == "tp does not divide ffn 3"


def test_a_message_survives_an_exception_a_pipe_and_a_pickle() -> None:
    error = InputError(Message("pins {text!r} fix {name!r} twice", text="tp=1,tp=2", name="tp"))
    ours, theirs = os.pipe()
    write_message(theirs, {"message": str(error)})
    (received,), _ = MessageReader(ours).read()
    for text in (str(error), received["message"], pickle.loads(pickle.dumps(str(error)))):
        assert text == "pins 'tp=1,tp=2' fix 'tp' twice"
        assert translate(text, "zh") == "固定项 'tp=1,tp=2' 两次固定了 'tp'"


def test_a_message_of_another_version_is_shown_as_it_was_sent() -> None:
    sent = pack_messages(Message("pins {text!r} fix {name!r} twice", text="tp=1,tp=2", name="tp"))
    assert translate(unpack_messages({**sent, "fields": {"other": 1}}), "zh") == sent["text"]
    assert translate(unpack_messages({**sent, "msgid": "{text.__class__}"}), "zh") == sent["text"]


def test_english_output_does_not_read_the_catalogue() -> None:
    script = (
        "import sys; from meshwright.cli.main import main; "
        "main(['plan', '--cluster', '1x2:a100-80gb', '--model', 'llama-tiny']); "
        "sys.exit('gettext' in sys.modules or 'meshwright.core.i18n.catalogue' in sys.modules)"
    )
    environment = {**os.environ, "LC_ALL": "C"}
    assert subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True).returncode == 0


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


def plain_texts(path: Path) -> list[str]:
    """Texts that a file prints or raises and that are not messages."""
    printers = {
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
        "translate": 0,
        "Interrupted": -1,
        "RunLocked": -1,
    }
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    named = [(getattr(call.func, "id", getattr(call.func, "attr", "")), call) for call in calls]
    texts = [call.args[printers[name]] for name, call in named if name in printers]
    return [
        ast.unparse(text)
        for text in texts
        if isinstance(text, ast.Constant | ast.JoinedStr)
        and re.search("[a-z]{4}", re.sub(r"\{[^}]*\}", "", ast.unparse(text)))
    ]


@pytest.mark.parametrize(
    "place",
    [
        "spec/plan.py", "spec/plan_checks.py", "spec/plan_name.py", "spec/constraints.py",
        "spec/workload_constraints.py", "planner/search/*.py", "planner/inputs/*.py",
        "cli/plan.py", "cli/fit.py", "cli/train.py", "cli/doctor.py", "train/console.py", "elastic/*.py",
        "train/recovery.py", "train/run_lock.py", "report/*.py", "cli/report.py", "cli/probe.py", "cli/trials.py",
        "cli/node_role.py", "cli/launch.py", "elastic/launch/*.py",
    ],
)  # fmt: skip
def test_every_line_that_a_command_prints_is_a_message(place: str) -> None:
    paths = list(SOURCE.glob(place))
    assert paths, place
    assert [text for path in paths for text in plain_texts(path)] == []


def test_what_a_proof_found_is_said_in_both_languages() -> None:
    found = {
        "precision": "fp32", "equal": False, "loss": 0.5, "gradient": 0.25, "where": "a.weight", "steps": 3,
        "weight": 0.125, "weight_where": "b.bias", "parameters": (5000, 4000), "labels": (12, 12),
        "labels_by_replica": [5, 7], "missing": ["c"], "rounding": 2, "first": "d differs first",
    }  # fmt: skip
    english, chinese = (
        "".join(translate(part, language) for part in _finding_text(found, parse_plan("dp2"))) for language in LANGUAGES
    )
    assert english == (
        "float32 dp2 differs from one device: largest relative differences: loss 5.0e-01, gradients 2.5e-01 at "
        "a.weight, weights after 3 steps 1.2e-01 at b.bias, 4,000 parameters instead of 5,000, 12 labels, "
        "5 to 7 a replica, 1 gradients are missing or extra, the "
        "first c, 2 gradients are 0 on one device, up to rounding, and are not compared, d differs first"
    )
    numbers = [sorted(re.findall(r"\d[\d.e-]*", text.replace(",", ""))) for text in (english, chinese)]
    assert numbers[0] == numbers[1] and "单设备不同" in chinese
    for settings in ({"compression": {"kind": "low-rank"}}, {"local": {"steps": 4, "replicas": 2}}, {"preference": {}}):
        (line,) = _lossy_notes(Workload.model_validate(settings))
        assert translate(line, "zh") != line and "verified" not in translate(line, "zh")


def test_a_run_speaks_the_language_of_who_reads_and_what_it_wrote_stays(capsys: pytest.CaptureFixture[str]) -> None:
    screen = RunConsole(words=partial(translate, language="zh"))
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
    killed = failure_cause(RankExit(2, 0.0, -9))
    journal.fault(rank=2, step=7, phase="backward", cause=killed, decision=Message("ranks start again"))
    journal.fault(
        step=7,
        phase="backward",
        cause=Message("the supervisor was killed"),
        decision=Message("a new supervisor adopts its snapshots"),
    )
    why = Message("belong to another job")
    notes.append(Message("the snapshots of the killed supervisor {why}: not adopted", why=why))
    journal.resize(4, 3, "dp3.z2", 1)
    journal.resize(3, 3, "dp3.z3", 1)
    journal.hear({"kind": "begin", "step": 6, "source": "memory"}, 1)
    journal.hear({"kind": "record", "record": {"step": 7}}, 1)
    notes += [Straggler(3, phase, 2.1).words for phase in SlowPhase] + [ALL_HEALTHY_TEXT]
    notes += [Straggler(-1, phase, 0.4).words for phase in (SlowPhase.data, SlowPhase.communication)]
    notes += [row.words for row in list_decisions([*CHANGES, *read_events(tmp_path / EVENTS_FILE_NAME)])]
    for line in notes:
        said = translate(line, "zh")
        assert set(re.findall("[a-z]{3,}", said)) <= {"rank", "kill"}, said
    report = diagnose([RankExit(0, 0.0, -6)], 2, lambda rank: tmp_path / "x")
    assert re.search(
        r"上的 rank 0（共 2 个）：被 SIGABRT 杀死.*\n  日志：.*x$", translate(str(report), "zh"), re.DOTALL
    )


def test_a_report_is_said_in_chinese(tmp_path: Path) -> None:
    steps = [
        StepRecord(step=step, loss=2.0 / step, tokens=64, gradient_norm=1.0, lr=0.1, seconds=0.5, exposed={"data": 0.1})
        for step in (1, 2, 3)
    ]
    (tmp_path / "records.jsonl").write_text("".join(step.to_json(None) + "\n" for step in steps))
    (tmp_path / EVENTS_FILE_NAME).write_text("".join(event.to_line() + "\n" for event in CHANGES))
    said = run_text(read_run(tmp_path), "zh").replace(str(tmp_path), "")
    assert set(re.findall("[a-z]{3,}", said)) <= {"rank", "token", "plan", "json"}, said
    assert said.count("\n") == run_text(read_run(tmp_path)).count("\n")


def test_an_error_is_printed_in_the_requested_language(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (["--lang", "zh"], ["--lang=zh"]):
        assert main(["plan", "--cluster", "1x8:a100-80gb", "--model", "llama2-7b", "--pin", "tp=3", *asked]) == 2
        assert capsys.readouterr().err == "meshwright: 固定项 tp(3) = 3，不能整除集群的 8 个设备\n"


@pytest.mark.parametrize("command", command_lines())
def test_the_help_of_every_command_is_chinese_and_has_lang(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = ["list", "verify", "export", "import"] if command == "checkpoint" else [""]
    for name in commands:
        assert main([*filter(None, (command, name)), "--help", "--lang", "zh-CN"]) == 0
        said = capsys.readouterr().out
        assert "--lang" in said and "用法：" in said
        assert not re.search(r"\[(required|default|choices)", said)


def test_lists_of_entries_have_chinese_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog", "devices", "--like", "h100", "--lang", "zh-CN"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["设备", "显存", "带宽"]
    assert main(["checkpoint", "list", str(tmp_path), "--lang", "zh-CN"]) == 2
    assert "没有检查点" in capsys.readouterr().err
    assert main(["catalog", "models", "--like", "llama-65c", "--lang", "zh-CN"]) == 2
    assert " or " not in translate(did_you_mean("llama-65b", ["llama-65", "llama-65c"]), "zh")


def test_the_page_of_errors_quotes_the_text_of_a_chinese_screen() -> None:
    page = (Path(__file__).parents[2] / "docs" / "zh" / "errors.md").read_text(encoding="utf-8")
    fixed = [
        part for text in read_catalogue("zh").entries.values() for part in re.findall(r"[\u4e00-\u9fff]{3,}", text)
    ]
    quoted = re.findall(r"<br>`([^`]+)`", page)
    assert len(quoted) >= 15
    for text in quoted:
        assert any(part in text for part in fixed), text
