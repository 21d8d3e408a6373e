"""The command line: one line per mistake, the documented exit codes, JSON that is only JSON, a reference that is true,
a quick start."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli import main as command_line
from meshwright.cli.application import build_application, command_lines
from meshwright.cli.doctor import Remedy, doctor_text, torch_remedies
from meshwright.cli.launch_plan import disk_space_warnings
from meshwright.cli.main import main
from meshwright.cli.start_checks import cluster_mismatches
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, translate
from meshwright.interop.registry import SYSTEMS
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.inputs.plans import read_plan
from meshwright.report.text import display_width
from meshwright.spec.estimate import Estimate, MemoryBreakdown, TimeBreakdown
from meshwright.spec.plan import parse_plan

ROOT = Path(__file__).parents[2]
LARGE = ["--model", "llama-65b", "--cluster", "8x8:a100-40gb", "--batch", "512", "--seq", "2048"]
MIDDLE = ["--model", "llama2-7b", "--cluster", "1x8:a100-80gb", "--batch", "512", "--seq", "4096"]
SMALL = ["--cluster", "1x4:cpu"]
MEMORY = {"parameters", "gradients", "optimizer", "activations", "buffers", "total", "driver", "reserved"}
TIME = {"compute", "recompute", "bubble", "tensor", "data", "pipeline", "context", "expert", "offload", "step"}


def called(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error without the lines that only a busy machine prints."""
    code = main(list(tokens))
    caught = capsys.readouterr()
    return code, caught.out, re.sub(r"searching for the best plan: .* so far\n", "", caught.err)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["paln"], "no command 'paln'; did you mean 'plan'? commands are catalog, checkpoint"),
        (["--lang", "zh", "plan"], "选项 --lang 在命令之前：请写在命令之后"),
        (["plan", "--modle", "x"], "plan: unknown option --modle; did you mean '--model'?"),
        (["plan", "--batch", "many"], "plan: --batch 'many' is not a whole number, such as 32 or 4k"),
        (["plan", "a.yaml", "b.yaml"], "plan: 'b.yaml' is one argument too many"),
        (["plan", "nowhere.yaml"], "job 'nowhere.yaml' does not exist"),
        (["plan", "--budget", "-1GiB"], "$.cluster.budget: input should be greater than or equal to 0, got '-1GiB'"),
        (
            ["estimate", *SMALL, "--plan", "dp4.rc-full999"],
            "plan dp4.rc-full999: rc-full999 counts the blocks of one stage, which has at most 4",
        ),
        (["plan", *SMALL, "--pin", "rc=full,recompute_layers=7"], "no plan is legal: "),
        (["plan", "--batch", "0"], "meshwright: $.workload.batch: input should be greater than or equal to 1, got 0"),
        (["plan", "--top", "0"], "--top 0 must be at least 1"),
        (["plan", *SMALL, "--pin", "tp"], "pin 'tp' is not name=value; write pins like 'tp=2,pp=4'"),
        (["plan", "--set", "workload.stpes=3"], "Workload has no field 'stpes'; did you mean 'steps'?"),
        (["estimate", *SMALL, "--plan", "dp3"], "plan dp3: dp(3) * tp(1) * pp(1) = 3 but the cluster has 4 devices"),
        (["plan", *SMALL, "--plan", "dp2"], "dp(2) * tp(1) * pp(1) = 2 but the cluster has 4 devices"),
        (
            ["train", "--cluster", "local:1", "--optimizer", "muon", "--plan", "dp1.off-optimizer-disk"],
            "plan dp1.off-optimizer-disk: an optimizer that updates whole tensors does not support offload: remove "
            "off-optimizer-disk, or use AdamW",
        ),
        (
            ["plan", "--set", "run.checkpoint_every=often"],
            "$.run.checkpoint_every: input should be a valid integer, unable to parse string as an integer, or "
            "'auto', got 'often'",
        ),
        (["estimate", *SMALL, "--precision", "bf17"], "got 'bf17'; did you mean 'bf16'"),
        (
            ["estimate", "--model", "llama-65bb"],
            "model 'llama-65bb' is neither in the catalog nor a folder with config.json nor a file; did you mean",
        ),
        (
            ["catalog", "modles"],
            "catalog: KIND 'modles' is not one of models, devices, clusters, links; did you mean 'models'?",
        ),
        (
            ["train", "--cluster", "1x2:a100-80gb"],
            "has a100-80gb, but this machine has no GPU: use --cluster local, or",
        ),
        (["train", "--cluster", "local:2", "--data", "nowhere.txt"], "data source 'nowhere.txt' does not exist"),
        (["catalog", "models", "--like", "zebra"], "none of 108 entries has 'zebra'"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error_and_exit_code_2(
    tokens: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(capsys, *tokens)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("meshwright: ") and message in err


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DP8", "dp8.mb1"),
        ("ddp", "dp8.mb1"),
        ("fsdp", "dp8.z3.mb1"),
        ("zero3", "dp8.z3.mb1"),
        ("FSDP.tp2", "dp4.tp2.z3.mb1"),
        ("hsdp2x4", "dp2x4.z3.mb1"),
        ("dp8.zero1", "dp8.z1.mb1"),
        ("ep4", "dp8.ep4.z1.mb1"),
        ("dp8.ep4", "dp8.ep4.z1.mb1"),
        ("dp4.tp2.ep2", "dp4.tp2.ep2.mb1"),
    ],
)
def test_words_of_other_systems_name_a_plan(name: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    eight = ["--model", "mixtral-8x7b", "--cluster", "1x8:a100-80gb", "--batch", "64", "--seq", "2k", "--json"]
    code, out, err = called(capsys, "estimate", *eight, "--plan", name)
    assert (code, json.loads(out)["name"]) == (0, meant)
    assert f"plan {name} = {meant}\n" in err


def test_defaults_of_batch_and_sequence_are_the_model_s_own_and_announced(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama3-70b", "--cluster", "8x8:h100", "--top", "1"]
    for language, work, progress, defaults in (
        (
            "en",
            "work     batch 32 x 4096 tokens",
            "searching for the best plan: ",
            "using defaults: batch 32 (--batch), sequence 4,096 (--seq)",
        ),
        (
            "zh",
            "负载     批次 32 x 4096 个 token",
            "正在搜索最佳方案：",
            "使用默认值：批大小 32（--batch），序列长度 4,096（--seq）",
        ),
    ):
        _, out, err = called(capsys, *asked, "--lang", language)
        assert work in out
        assert [line for line in err.splitlines() if not line.startswith(progress)] == [defaults]
    assert "2048 tokens" in called(capsys, "fit", "--model", "llama-65b", "--cluster", "8x8:a100-40gb")[1]
    both = ["--cluster", "1x4:cpu", "--batch", "8", "--seq", "1k"]
    assert called(capsys, "plan", "--model", "gpt2", *both, "--top", "1")[2] == ""


def test_a_path_that_cannot_be_written_is_a_mistake_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(capsys, "plan", *SMALL, "--save", "/proc/none.json")
    assert (code, err) == (2, "meshwright: '/proc/none.json': No such file or directory; name another path\n")


def test_a_pin_for_which_the_host_has_no_room_fits_nowhere_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(
        capsys,
        "plan",
        "--model",
        "llama-65b",
        "--cluster",
        "1x1:a100-80gb",
        "--batch",
        "1",
        "--pin",
        "offload=optimizer",
    )
    assert (code, out) == (3, "") and "inf" not in err
    assert "each rank offloads 729.6 GiB to its host, but the host has only 177.8 GiB for each device" in err


@pytest.mark.soak
def test_a_job_that_fits_nowhere_is_exit_code_3_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "plan", "--model", "llama-65b", "--cluster", "1x2:a100-40gb", "--batch", "8")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "GiB" in err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        main(["plan", "--top", "0", "--debug"])


def test_what_stands_behind_two_dashes_is_another_command_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(command_line, "run_command", lambda tokens: ran.append(tokens) or 1 // 0)
    behind = ["--", "train", "--debug", "--lang", "zh"]
    assert called(capsys, "probe", *behind)[0] == 1
    with pytest.raises(ZeroDivisionError):
        main(["probe", "--debug", *behind])
    assert ran == [["probe", *behind]] * 2


def test_a_mistake_is_said_in_the_language_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(tokens: list[str]) -> int:
        raise InputError(Message("--top {top} must be at least 1", top=0))

    monkeypatch.setattr(command_line, "run_command", wrong)
    monkeypatch.setenv("LC_ALL", "C")
    for asked in (["--lang", "zh"], ["--lang=zh"], ["--lang=zh", "--", "--lang", "en"]):
        assert called(capsys, "plan", *asked) == (2, "", "meshwright: --top 0：至少是 1\n")
    for asked in ([], ["--lang=en"], ["--", "--lang", "zh"]):
        assert called(capsys, "plan", *asked) == (2, "", "meshwright: --top 0 must be at least 1\n")


def test_an_error_of_ours_is_exit_code_1_and_asks_for_debug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "run_command", lambda tokens: 1 // 0)
    code, out, err = called(capsys, "plan")
    assert (code, out) == (1, "")
    assert (
        err == "meshwright: ZeroDivisionError: integer division or modulo by zero; this is a fault of meshwright, "
        "--debug shows where\n"
    )


def test_an_interrupt_is_exit_code_75(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(tokens: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run_command", stop)
    assert called(capsys, "plan") == (75, "", "meshwright: interrupted; run the same command again to continue\n")


@pytest.mark.parametrize(
    ("asked", "world"), [(MIDDLE, 8), pytest.param(LARGE, 64, marks=pytest.mark.soak)], ids=["middle", "large"]
)
def test_plan_prints_json_in_the_promised_form_and_nothing_else(
    asked: list[str], world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(capsys, "plan", *asked, "--top", "3", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer.keys() == {"job", "chosen", "plans", "considered", "rejected", "seconds", "nearest"}
    assert len(answer["plans"]) == 3 and answer["chosen"] == answer["plans"][0]
    assert all(entry.keys() == {"reason", "count", "example"} for entry in answer["rejected"])
    check_entry(answer["chosen"], world)


def test_estimate_prints_one_entry_whose_items_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "estimate", *LARGE, "--plan", "dp2.tp4.pp8.z1.rc-full", "--json")
    entry = json.loads(out)
    assert code == 0
    check_entry(entry, 64)
    memory, time = entry["estimate"]["memory"], entry["estimate"]["time"]
    kinds = memory.keys() - {"total", "driver", "reserved"}
    assert sum(memory[kind] for kind in kinds) == pytest.approx(memory["total"])
    assert sum(time[kind] for kind in time.keys() - {"step"}) == pytest.approx(time["step"])
    assert len(entry["estimate"]["per_stage"]) == 8


def check_entry(entry: dict[str, Any], world: int) -> None:
    plan = read_plan(entry["name"])
    assert plan is not None and plan.world == world
    assert plan.model_dump(mode="json") == {**entry["plan"], "layers_per_stage": entry["plan"]["layers_per_stage"]}
    assert entry["estimate"]["memory"].keys() >= MEMORY and entry["estimate"]["time"].keys() >= TIME
    assert {"per_stage", "tokens_per_second", "mfu", "fits"} <= entry["estimate"].keys()


@pytest.mark.parametrize(
    "tokens",
    [
        ["plan", *MIDDLE],
        pytest.param(["plan", *LARGE], marks=pytest.mark.soak),
        ["estimate", *LARGE, "--plan", "dp2.tp4.pp8.z1.mb1.rc-full"],
        ["catalog", "models"],
    ],
)
def test_text_is_plain_and_fits_100_columns(tokens: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, *tokens)
    assert (code, err) == (0, "")
    assert not {"\r", "\x1b"} & set(out)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("asked", "model"),
    [
        (MIDDLE, "llama2-7b: 6.74 B parameters"),
        pytest.param(LARGE, "llama-65b: 65.3 B parameters", marks=pytest.mark.soak),
    ],
    ids=["middle", "large"],
)
def test_plan_says_why_in_at_most_five_lines_and_why_others_were_rejected(
    asked: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = called(capsys, "plan", *asked, "--top", "1", "--runnable")
    question, table, why, *trust, tally, usage = out.strip().split("\n\n")
    assert (
        question.startswith(f"model    {model}") and sum(not line.startswith(" ") for line in table.splitlines()) == 2
    )
    assert 1 <= sum(not line.startswith(" ") for line in why.splitlines()) <= 5
    assert "plans considered" in tally and "does not fit" in tally
    assert not trust or "nearest published runs" in trust[0]
    assert usage.startswith("speed-up") and "are duplicates" in usage.replace("\n    ", " ")


def test_a_pin_holds_and_a_saved_plan_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    code, out, err = called(capsys, "plan", *SMALL, "--pin", "tp=2,z=1", "--top", "4", "--save", str(path))
    assert (
        code == 0
        and err
        == f"plan {(name := out.split()[out.split().index('exposed') + 1])} is saved in {path}; "
        f"`--plan {path}` uses it\n"
    )
    saved = read_plan(str(path))
    assert saved is not None and (saved.tp, saved.zero, saved.name) == (2, 1, name)
    assert called(capsys, "estimate", *SMALL, "--plan", str(path))[0] == 0


@pytest.mark.parametrize(("kind", "count"), [("models", 108), ("devices", 39), ("clusters", 17), ("links", 14)])
def test_the_catalog_lists_everything(kind: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(called(capsys, "catalog", kind)[1].splitlines()) == count + 1
    data = json.loads(called(capsys, "catalog", kind, "--json")[1])
    assert list(data) == [kind] and len(data[kind]) == count


def test_a_probe_with_too_many_ranks_names_the_number_that_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwright.planner.inputs.cluster_parser.available_cpus", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = called(capsys, "probe", "--cluster", "local:900")
    assert (
        (code, out, err.count("\n")) == (2, "", 1) and "probe of 900 ranks" in err and "use --cluster local:16" in err
    )
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert "请用 --cluster local:16" in called(capsys, "probe", "--cluster", "local:17")[2]


def test_files_that_the_disk_may_not_hold_are_said_with_the_share_that_would_fit(tmp_path: Path) -> None:
    memory = MemoryBreakdown(parameters=1, gradients=1, optimizer=1, activations=1, buffers=1, total=5, reserved=5)
    priced = Estimate(
        memory=memory,
        per_stage=(memory,),
        time=TimeBreakdown(step=1.0),
        tokens_per_second=1.0,
        mfu=0.1,
        fits=True,
        offloaded=15 * 2.0**30,
        in_files=10 * 2.0**30,
    )
    plan = parse_plan("dp4.z3.off-optimizer-disk80")
    line = disk_space_warnings(plan, priced, tmp_path, 10 * 2.0**30)
    assert "has 10.0 GiB" in line and "up to 40.0 GiB" in line and "off-optimizer-disk20 would fit" in line
    assert parse_plan("dp4.z3.off-optimizer-disk20").offload == plan.offload
    both = parse_plan("dp4.z3.off-optimizer-disk80.off-parameters-disk40")
    assert "off-optimizer-disk20.off-parameters-disk10 would fit" in disk_space_warnings(
        both, priced, tmp_path, 10 * 2.0**30
    )
    assert not disk_space_warnings(plan, priced, tmp_path, 40 * 2.0**30)
    assert "up to 40.0 GiB" in disk_space_warnings(
        plan.but(offload=(*plan.offload, "activations")), priced, tmp_path, 10 * 2.0**30
    )
    kept = parse_plan("dp2.pp2.off-activations-disk")
    assert "off-activations-disk4 would fit" in disk_space_warnings(kept, priced, tmp_path, 10 * 2.0**30, blocks=32)
    assert "would fit" not in disk_space_warnings(kept, priced, tmp_path, 10 * 2.0**30)
    job = resolve_job(read_job(None, (), {"cluster.name": "2x8:a100-80gb", "model.name": "llama2-7b"}))
    groups = tuple(group.but(storage_bandwidth=1e9) for group in job.cluster.groups)
    both = mw.estimate(job.but(cluster=job.cluster.but(groups=groups)), "dp16.z1.off-optimizer-disk.off-activations")
    assert 0 < both.in_files < both.offloaded
    assert not disk_space_warnings(parse_plan("dp4.z3.off-optimizer80"), priced, tmp_path, 0.0)


def test_the_schema_knows_every_section_and_every_pin(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(called(capsys, "schema")[1])
    assert schema["properties"].keys() == {"model", "workload", "data", "cluster", "plan", "run"}
    assert {"tp", "pp", "dp", "zero", "name"} <= schema["properties"]["plan"]["properties"].keys()
    assert schema["additionalProperties"] is False


def test_the_version_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "--version") == (0, "0.1.0\n", "")


def helped(name: str) -> list[list[str]]:
    """A command and the commands inside it, as tokens."""
    inside = [word for word in build_application([name])[name] if not word.startswith("-")]
    return [[name], *([name, word] for word in inside)]


@pytest.mark.parametrize("name", list(command_lines()))
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for tokens in helped(name):
        code, out, _ = called(capsys, *tokens, "--help")
        assert code == 0 and (f"Try: meshwright {' '.join(tokens)}" in out or len(helped(name)) > len(tokens) == 1)


def test_the_references_are_what_help_and_docstrings_say(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "docs" / "generate.py"))["write"](tmp_path)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    diagrams = [path for path in written if path.suffix == ".svg"]
    assert len(diagrams) >= 16 and len(written) == len(diagrams) + 6 + 2 * len(SYSTEMS)
    for name in written:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "run: python docs/generate.py"


@pytest.mark.parametrize(
    ("tokens", "strangers"),
    [
        (["--help"], "torch numpy pydantic yaml meshwright.planner.inputs meshwright.planner.cost"),
        (["--version"], "torch numpy pydantic yaml meshwright.planner.inputs"),
        (["catalog", "devices"], "torch numpy cost rich"),
        (["plan", *SMALL], "torch rich transformers"),
        (["estimate", *SMALL, "--plan", "dp4"], "torch rich transformers meshwright.planner.search"),
    ],
)
def test_a_command_imports_only_what_it_needs(tokens: list[str], strangers: str) -> None:
    """Start time is import time: bench/ holds the seconds, this holds their cause."""
    script = (
        f"import sys; from meshwright.cli.main import main; code = main({tokens!r}); "
        f"sys.exit(code or ' '.join(set({strangers.split()!r}) & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m meshwright catalog models --json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_doctor_gives_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    code, out, _ = called(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert code == {"works": 0, "broken": 1}[facts["verdict"]]
    assert facts["speed"]["matrix_product_flops_per_second"] > 1e8 and facts["cores"] >= 1
    newer = "torch {torch} is newer than {newest_torch}.{newest_torch_2}, the newest that was tested"
    mends = [Remedy(Message(newer, torch="9.9", newest_torch=2, newest_torch_2=13))]
    assert (
        doctor_text(facts, mends, "en").splitlines()[-2]
        == "may fix  torch 9.9 is newer than 2.13, the newest that was tested"
    )
    chinese = doctor_text(facts, mends, "zh")
    assert "torch 9.9 比测试过的最新版 2.13 还新" in chinese and not re.search("verdict|fix|host|core|works", chinese)


def test_a_narrow_terminal_gets_lines_that_fit_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    for language in ("en", "zh"):
        code, out, _ = called(capsys, "plan", *SMALL, "--top", "3", "--lang", language)
        assert code == 0 and 60 < max(map(display_width, out.splitlines())) <= 80


def test_a_ctrl_c_is_one_line_and_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(folder: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.report.run.read_run", interrupted)
    assert main(["report", "anything"]) == 75
    assert capsys.readouterr().err == "meshwright: interrupted; run the same command again to continue\n"


def test_a_cluster_that_this_machine_is_not_is_said_before_its_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.planner.inputs.cluster_parser.cuda_device_names", tuple)
    for cluster, words in (
        ("local:2", []),
        ("1x2:a100-80gb", ["has a100-80gb, but this machine has cores"]),
        ("2x2:cpu@1Gb", ["has 2 nodes, but this command starts all ranks on this node"]),
    ):
        question = resolve_job(
            read_job(
                None,
                (),
                {"model.name": "llama-tiny", "cluster.name": cluster, "workload.batch": 8, "workload.sequence": 64},
            )
        )
        lines = cluster_mismatches(question)
        assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True))
        assert all("machine" not in translate(line, "zh") and "ranks" not in translate(line, "zh") for line in lines)


@pytest.mark.parametrize(
    "lang, said",
    [
        ("en", "needs 30.9 GiB more host memory for offload; 1.62 GiB (5%) headroom on the device"),
        ("zh", "卸载还缺 30.9 GiB"),
    ],
)
def test_a_plan_that_only_its_host_has_no_room_for_says_what_the_host_lacks(
    lang: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "--model",
        "llama2-7b",
        "--precision",
        "fp16",
        "--batch",
        "8",
        "--seq",
        "512",
        "--cluster",
        "2x1:v100-32gb",
        "--set",
        "workload.reduce=fp16",
    ]
    asked += ["--plan", "dp2.rc-full.off-optimizer", "--lang", lang]
    _, out, _ = called(capsys, "estimate", *asked)
    assert said in " ".join(out.split()) and "too much" not in out
    assert called(capsys, "launch", *asked, "--save", str(tmp_path))[0] == 0
    written = (tmp_path / "torchrun.sh").read_text()
    assert said in written and "off-optimizer59" in written


def test_the_doctor_tells_of_an_accelerator_that_training_leaves_idle() -> None:
    torch_of = {
        "backends": ["gloo"],
        "cuda_devices": [],
        "idle": "this machine has an accelerator of type mps, which Meshwright does not support: ...",
    }
    facts = {
        "packages": {"torch": "2.13.0"},
        "cuda_cards": [],
        "speed": {"all_reduce_seconds": 1e-4},
        "torch": torch_of,
    }
    assert [(mend.what, mend.must) for mend in torch_remedies(facts)] == [(torch_of["idle"], False)]


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", "export", "runs/mine", "--to", "full"],
        ["checkpoint", "export", "runs/mine", "--to", "full", "--form", "dcp"],
        ["checkpoint", "export", "runs/mine", "--to", "full/model.safetensors"],
        ["export", "--model", "llama2-7b", "--to", "megatron", "--out", "full/model.safetensors"],
        ["import", "launch.sh", "--out", "full/model.safetensors"],
    ],
)
def test_a_wrong_output_folder_is_refused_before_anything_is_imported_or_read(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").touch()
    code = (
        f"import sys; from meshwright.cli.main import main; code = main({words!r}); "
        "sys.exit(code + 100 * bool({'torch', 'meshwright.interop', 'meshwright.planner'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr.count("\n") == 1 and "full" in found.stderr
