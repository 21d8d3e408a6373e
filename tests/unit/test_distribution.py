"""The files that users install: everything that the program reads is in them, and they run without this source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
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
