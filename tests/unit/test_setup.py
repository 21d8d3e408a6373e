"""Set-up: what an installation adds to torch, that the lock file holds everything, and (in `make soak`) that it works
in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "development.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MOST_PACKAGES, MOST_BYTES = 20, 110e6


def closure(requirements: list[str]) -> set[str]:
    """The names of all installed packages that `requirements` bring, themselves included."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += [Requirement(text) for text in metadata.requires(name) or []]
    return found


def added_by_the_core() -> set[str]:
    return closure(PROJECT["dependencies"]) - closure(["torch"])


def locked() -> dict[str, Version]:
    return {
        canonicalize_name(name): Version(version)
        for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_the_core_adds_at_most_20_packages_to_torch() -> None:
    added = added_by_the_core()
    assert len(added) <= MOST_PACKAGES, sorted(added)


def test_the_core_adds_at_most_110_megabytes_to_torch() -> None:
    sizes = {
        name: sum(
            path.stat().st_size for file in metadata.files(name) or [] if (path := Path(str(file.locate()))).is_file()
        )
        for name in added_by_the_core()
    }
    assert 0 < sum(sizes.values()) <= MOST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:5]


TRACKERS = {"wandb", "mlflow-skinny", "swanlab"}
"""Their own dependencies are many. The tests replace them by their documented calls where they are not installed."""


def test_the_lock_file_holds_all_that_the_project_asks_for_but_trackers() -> None:
    versions = locked()
    asked = PROJECT["dependencies"] + [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name != "torch" and name not in TRACKERS:
            assert versions[name] in requirement.specifier, f"{requirement} but the lock file has {versions[name]}"


def test_the_lock_file_holds_all_that_is_installed_with_what_it_names() -> None:
    missing = {name for name in closure([*PROJECT["dependencies"]]) if name != "torch"} - set(locked())
    missing = {name for name in missing if not name.startswith(("nvidia-", "triton", "cuda-"))}
    assert not missing


def test_the_lock_file_pins_hashes_and_names_no_registry_and_no_torch() -> None:
    text = LOCK.read_text(encoding="utf-8")
    blocks = [block for block in re.split(r"\n(?=\S)", text.strip()) if not block.startswith("#")]
    assert len(blocks) == len(locked()) and all("--hash=sha256:" in block for block in blocks)
    assert "://" not in text and not re.search(r"^(-i|--\w*index|--find|torch==)", text, re.MULTILINE)


def test_the_torch_of_development_is_one_that_the_project_admits() -> None:
    pinned = re.search(r"^TORCH\s*\?=\s*(\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    admitted = next(Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch"))
    assert pinned is not None and Version(pinned[1]) in admitted.specifier and Version("2.11.0") in admitted.specifier


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and script.read_text(encoding="utf-8").rstrip().endswith("make test")


# --- an empty environment
# -----------------------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def freeze(python: Path) -> dict[str, str]:
    lines = run(python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check").split()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def occupied(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.suffix != ".pyc" and path.is_file())


def checkout(place: Path) -> Path:
    """A copy of what git tracks, as a fresh clone has it."""
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place


@pytest.mark.soak
def test_in_an_empty_environment_help_works_and_torch_stays_as_it_was(tmp_path: Path) -> None:
    source = checkout(tmp_path / "source")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-qq", "install")
    run(*pip, "torch==2.13.0", cwd=tmp_path)
    before, size = freeze(python), occupied(tmp_path / "venv")
    run(*pip, source, cwd=tmp_path)
    after, added = freeze(python), occupied(tmp_path / "venv") - size
    assert {name: after[name] for name in before} == before
    assert len(after) - len(before) - 1 <= MOST_PACKAGES, sorted(set(after) - set(before))
    assert added <= MOST_BYTES, added
    meshwright = tmp_path / "venv" / "bin" / "meshwright"
    assert "plan" in run(meshwright, "--help", cwd=tmp_path)
    assert "llama" in run(meshwright, "catalog", "models", cwd=tmp_path)


@pytest.mark.soak
def test_an_interrupted_set_up_starts_again_cleanly(tmp_path: Path) -> None:
    source = checkout(tmp_path / "source")
    first = subprocess.Popen(
        ["make", "setup"], cwd=source, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while (
        not list(source.glob(".venv/lib/python*/site-packages/num*"))
        and time.monotonic() < deadline
        and first.poll() is None
    ):
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert list(source.glob(".venv/*")) and not list(source.glob(".venv/ready-*"))
    run("make", "setup", cwd=source)
    assert len(list(source.glob(".venv/ready-*"))) == 1
    assert run(
        source / ".venv" / "bin" / "python", "-c", "import meshwright, torch; print(torch.__version__)"
    ).startswith("2.13.0")
    stamp = next(source.glob(".venv/ready-*")).stat().st_mtime_ns
    run("make", "setup", cwd=source)
    assert next(source.glob(".venv/ready-*")).stat().st_mtime_ns == stamp


@pytest.mark.soak
def test_the_device_check_runs_on_cpu_and_says_what_is_missing_without_cuda() -> None:
    check = (sys.executable, "-m", "bench.gpu_check")
    said = run(*check, "--cpu", "--steps", "2")
    for part in ("A device", "B training", "C memory", "D options", "E mesh", "F faults"):
        assert f"{part} on the CPU" in said
    assert "all required claims are met" in said and said.count("  met ") > 15
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for options, code in ((["--skip-without-cuda"], 0), ([], 2)):
        done = subprocess.run([*check, *options], cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=900)
        assert done.returncode == code and "no CUDA device" in done.stderr and len(done.stderr.splitlines()) == 1


PYTHON_WITHOUT_PACKAGES = """#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; printf '#!/bin/sh\\necho trained\\n' > .venv/bin/meshwright
    chmod +x .venv/bin/meshwright ;;
  *--require-hashes*) trap 'echo "ERROR: Operation cancelled by user" >&2; exit 1' INT
    [ -e fast ] || { sleep 60 & wait; } ;;
esac
"""


def make_train(folder: Path, locale: str, stop: bool = False) -> tuple[int, str]:
    """Returns the exit code and the output of `make train`; `stop`: Ctrl-C while pip installs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "MAKE", "MFLAGS"))}
    process = subprocess.Popen(
        ["make", "train", "PYTHON=./python"],
        cwd=folder,
        env={**environment, "LANG": locale},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    until = time.monotonic() + 60
    while stop and not (folder / ".venv" / "set-up.log").exists() and time.monotonic() < until:
        time.sleep(0.05)
    if stop:
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("locale", "line"), [("C", "starts it again"), ("zh_CN.UTF-8", "安装已中断")])
def test_ctrl_c_during_the_set_up_prints_one_line_and_the_same_command_works(
    tmp_path: Path, locale: str, line: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "python").write_text(PYTHON_WITHOUT_PACKAGES)
    (tmp_path / "python").chmod(0o755)
    code, said = make_train(tmp_path, locale, stop=True)
    lines = said.splitlines()
    assert code and len(lines) == 3 and line in lines[-1]
    assert all(("安装" if locale.startswith("zh") else "set-up") in each for each in lines)
    (tmp_path / "fast").touch()
    code, said = make_train(tmp_path, locale)
    assert code == 0 and said.splitlines()[-1] == "trained" and len(said.splitlines()) == 4
