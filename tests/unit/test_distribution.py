"""The files that users install: everything that the program reads is in them, and they run without this source tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from meshwright.core.version import __version__

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
BUILD = "import sys; from setuptools import build_meta as b; out = sys.argv[1]; b.build_wheel(out); b.build_sdist(out)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel and the source distribution in a copy of the tree, since the build writes into it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.rstrip("\0").split("\0"):
        if name.startswith("src/") or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tree, capture_output=True, check=True)
    return out


def package_files() -> set[str]:
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name.removeprefix("src/") for name in tracked.splitlines()}


def test_wheel_and_source_have_every_file_of_the_package(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert package_files() == {name for name in names if not name.startswith(f"meshwright-{__version__}.dist-info/")}
    with tarfile.open(source) as files:
        inside = {name.partition("/")[2] for name in files.getnames()}
    assert {f"src/{name}" for name in package_files()} | {"README.md", "LICENSE", "pyproject.toml"} <= inside


def test_the_wheel_runs_without_this_source_tree(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "LC_ALL": "C.UTF-8"}
    code = (
        "import sys, meshwright; print(meshwright.__file__); sys.argv[0] = 'meshwright'; "
        "from meshwright.__main__ import main; main()"
    )
    for words, expected in (
        (["--version"], __version__),
        (["plan", "--model", "llama-7b", "--cluster", "8:h100"], "6.74 B parameters"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        where, _, printed = done.stdout.partition("\n")
        assert where.startswith(str(tmp_path / "installed")) and expected in printed


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"], cited["cff-version"]) == (__version__, "Apache-2.0", "1.2.0")


INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_dockerfile_is_valid_and_copies_and_installs_what_the_tree_has(kind: str) -> None:
    path = ROOT / "docker" / f"{kind}.Dockerfile"
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    steps = [line.split(" ", 1) for line in text.splitlines()]
    assert steps[0][0] == "FROM" and {name for name, _ in steps} <= INSTRUCTIONS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = re.fullmatch(r"python:(\d+\.\d+)-slim", steps[0][1])
    assert python is not None and f"Programming Language :: Python :: {python[1]}" in project["classifiers"]
    pinned = re.search(r"^TORCH +\?= (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None and ["ARG", f"TORCH={pinned[1]}"] in steps
    sent = {line[1:] for line in path.with_name(f"{path.name}.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = {word for name, words in steps if name == "COPY" for word in words.split()[:-1]}
    assert copied == sent and all((ROOT / word).exists() for word in copied)
    for script in (words for name, words in steps if name == "RUN"):
        assert subprocess.run(["sh", "-nc", script], capture_output=True).returncode == 0, script
    extras = {name for found in re.findall(r"/src\[([\w,]+)\]", text) for name in found.split(",")}
    assert extras and extras <= project["optional-dependencies"].keys()
    (entry,) = (json.loads(words)[0] for name, words in steps if name == "ENTRYPOINT")
    assert entry in project["scripts"]
