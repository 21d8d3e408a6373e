"""The pages about other systems: the examples that they print, and the proofs of the systems that run on CPUs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fault_runs import ENVIRONMENT, FIRST
from pool import Pool

from meshwright.cli.main import main
from meshwright.elastic import supervisor
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.supervisor import Supervisor
from meshwright.interop.registry import SYSTEMS

ROOT = Path(__file__).parents[2]
refresh = runpy.run_path(str(ROOT / "docs" / "refresh.py"))
FILE = re.compile(r"cat > (\S+) <<'END'\n(.*?)\nEND\n", re.DOTALL)
EQUAL = ["float64 equal to one device:", "float32 equal to one device:"]


def page_of(system: str) -> str:
    return (ROOT / "docs" / "en" / "coming-from" / f"{system.replace('_', '-')}.md").read_text(encoding="utf-8")


def marked(system: str, mark: str) -> list[Any]:
    return [block for block in refresh["blocks"](page_of(system)) if mark in block.marks]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the commands of all pages run, one page after the other."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("coming-from")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def warm(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAgent]:
    """A fork server in this folder: each command forks its ranks from it instead of starting its own. Runs are proven,
    as those of a user are."""
    log = tmp_path_factory.mktemp("agent") / "log"
    checks = os.environ["MESHWRIGHT_TEST_CHECKS"]
    environment = {**ENVIRONMENT, "MESHWRIGHT_CHECKS": checks, "MESHWRIGHT_PROVE": "start"}
    with LocalAgent(log, ("meshwright.train.verify", "meshwright.train.loop"), environment) as agent:
        while not agent.events(1.0):
            assert not agent.ended
        yield agent


def run_example(text: str) -> Iterator[tuple[str, list[str]]]:
    """Writes the files of a block and yields its commands, split into words."""
    for name, content in FILE.findall(text):
        Path(name).write_text(f"{content}\n", encoding="utf-8")
    for line in filter(None, FILE.sub("", text).replace("\\\n", " ").splitlines()):
        words = shlex.split(line)
        assert words[0] == "meshwright", line
        yield line, words[1:]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.covering(2)
def test_the_example_of_a_page_is_imported_planned_verified_and_trained(
    system: str, place: Path, warm: LocalAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*given: Any, **more: Any) -> Supervisor:
        return Supervisor(*given, **{**more, "agent": warm, "generation": next(FIRST)})

    monkeypatch.setattr(supervisor, "Supervisor", start)
    shutil.rmtree("runs", ignore_errors=True)
    done = []
    for block in marked(system, "example"):
        for line, words in run_example(block.text):
            assert main(words) == 0, line
            done.append(words[0])
            said = capsys.readouterr()
            out = said.out.splitlines()
            if words[0] == "import":
                assert out and not [each for each in out if each not in page_of(system).splitlines()], line
            elif words[0] == "plan":
                assert [each.partition(":")[0] for each in out[:3:2]] == ["yours", "best here"], line
            elif words[0] == "verify":
                assert [found[:28] for found in out] == EQUAL, line
            else:
                assert re.search(r"^  trained +2 of 2 steps", said.err, re.MULTILINE), line
                assert "proven equal to one device before step 1: " in said.err, line
    assert [*dict.fromkeys(done)] == ["import", "plan", "verify", "train"]


def loop_of(system: str) -> str:
    """The script of a proof."""
    (block,) = marked(system, "proof")
    return dict(FILE.findall(block.text))["loop.py"]


def run_script(folder: str, script: str) -> str:
    """Runs a script as torchrun does, on a rank of the pool, which has joined its process group already. Returns what
    the script prints."""
    made, destroyed, before = dist.init_process_group, dist.destroy_process_group, Path.cwd()
    dist.init_process_group = dist.destroy_process_group = lambda *given, **more: None
    os.chdir(folder)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            exec(compile(script, "loop.py", "exec"), {"__name__": "__main__"})
        return shown.getvalue()
    finally:
        dist.init_process_group, dist.destroy_process_group = made, destroyed
        os.chdir(before)


@pytest.mark.parametrize("fault", [False, True])
def test_the_loop_of_the_page_of_fsdp2_equals_one_device_unless_its_loss_is_a_mean(
    fault: bool, ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = loop_of("fsdp2")
    if fault:
        script = script.replace(', reduction="sum")', ")").replace("loss / count * dist.get_world_size()", "loss")
    (tmp_path / "loop.py").write_text(script, encoding="utf-8")
    ranks.run(2, run_script, str(tmp_path), script)
    code = main(["verify", "--recording", str(tmp_path / "trace"), "--model", f"{tmp_path / 'loop.py'}:build"])
    said = capsys.readouterr()
    assert (code, "mean of the mean losses" in said.err) == ((4, True) if fault else (0, False)), said
    assert fault or said.out.endswith("equal to one device\n")


@pytest.mark.soak
@pytest.mark.parametrize("system", [name for name in SYSTEMS if marked(name, "proof")])
def test_a_system_that_runs_on_cpus_is_proved_as_its_page_says(system: str, tmp_path: Path) -> None:
    (block,) = marked(system, "proof")
    for mark in block.marks:
        if mark.startswith("needs="):
            # nanotron 0.4 of PyPI is installed, but has a circular import
            pytest.importorskip(mark.removeprefix("needs="), exc_type=ImportError)
    done = refresh["run"](block, tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("equal to one device\n"), done.stdout
    assert (tmp_path / "report.html").stat().st_size > 1000
