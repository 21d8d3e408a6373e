"""Mistakes that users make (mistakes.yaml): one line, its exit code, its remedy, before any rank starts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli import start_checks
from meshwright.cli.launch_plan import build_model_source
from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.data.corpus import find_files
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.spec.job import LaunchSpec
from meshwright.spec.plan import Plan

ROOT = Path(__file__).parents[2]
MISTAKES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))
RUN = [row for row in MISTAKES if "run" in row]


@pytest.mark.parametrize("row", RUN, ids=[row["run"].replace(" ", "_") for row in RUN])
def test_a_mistake_of_a_user_is_one_line_with_its_exit_code_and_remedy(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    for name, text in row.get("files", {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    code = main(shlex.split(row["run"]))
    caught = capsys.readouterr()
    lines = [line for line in caught.err.splitlines() if not line.startswith(("using defaults: ", "searching for "))]
    assert (code, caught.out, len(lines)) == (row["code"], "", 1), caught.err
    assert lines[0].startswith("meshwright: ") and row["line"] in lines[0]
    assert "fault of meshwright" not in lines[0]


def test_the_table_has_42_mistakes_of_the_trial_and_60_others_and_every_named_test_exists() -> None:
    text = Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8")
    trial = yaml.safe_load(text.partition("# New ones")[0])
    assert (len(trial), len(MISTAKES) >= 102) == (42, True)
    kinds = {(row.get("run") or row["what"], str(row.get("files"))) for row in MISTAKES}
    assert len(kinds) == len(MISTAKES)
    for row in MISTAKES:
        if "shown" in row:
            path, _, name = row["shown"].partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), row["shown"]


def test_names_of_the_hub_are_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for kind in ("models", "datasets"):
        snapshot = tmp_path / f"{kind}--some--thing" / "snapshots" / "0f1e"
        (snapshot / "data").mkdir(parents=True)
        (tmp_path / f"{kind}--some--thing" / "refs").mkdir()
        (tmp_path / f"{kind}--some--thing" / "refs" / "main").write_text("0f1e")
        (snapshot / "README.md").write_text("x")
    (snapshot / "data" / "train-0.jsonl").write_text("{}")
    (snapshot / "data" / "test-0.jsonl").write_text("{}")
    llama = next(row["files"]["net/config.json"] for row in RUN if "net/config.json" in row.get("files", {}))
    (tmp_path / "models--some--thing" / "snapshots" / "0f1e" / "config.json").write_text(llama)
    job = read_job(None, (), {"model.name": "some/thing", "cluster.name": "1x2:cpu"})
    assert resolve_job(job).model.name == "some/thing" and resolve_job(job).model.blocks == 2
    assert build_model_source(job).name == "thing"
    assert [path.name for path in find_files(("some/thing",))] == ["train-0.jsonl"]


def test_a_missing_package_is_one_line_with_the_extra_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "find_spec", lambda name: None)
    launch = LaunchSpec.model_validate(
        {"model": {"name": "a", "module": "a:b"}, "workload": {"lora": {}}, "data": {}, "plan": Plan(), "run": {}}
    )
    with pytest.raises(InputError, match=r"^LoRA needs the package peft: pip install 'meshwright\[peft\]'$"):
        start_checks.check_before_ranks(launch, None, allow_cpu=True, ranks=1)
