"""What all tests share: the cases that hypothesis tries are the same in every run, but for the soak, which looks for
new ones; a cache of their own."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Generator, Sequence

import pytest
from hypothesis import HealthCheck, settings

from soak_parts import part_of

WORD = re.compile(r"\w+")

CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
"""No case fails because the machine has other things to do."""

settings.register_profile("same", derandomize=True, **CALM)
settings.register_profile("new", **CALM)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("MESHWRIGHT_TEST_DEVICE") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are written for CPU ranks
    os.environ.setdefault("MESHWRIGHT_MEASURED", "0")  # what somebody measured on this machine must not change answers
    os.environ.setdefault("MESHWRIGHT_ANSWERS", "0")  # nor what an earlier search has found
    os.environ.setdefault(
        "MESHWRIGHT_PROVE", "never"
    )  # tests compare with one device themselves; those of the proof ask for one
    # The preflight checks take longer than all steps of the small runs with faults. The results of these runs are
    # compared with those of undisturbed runs.
    os.environ.setdefault("MESHWRIGHT_TEST_CHECKS", "first" if config.getoption("-m") == "soak" else "never")
    if "MESHWRIGHT_CACHE" not in os.environ:  # nor what other runs have kept; and a home may be read only
        os.environ["MESHWRIGHT_CACHE"] = folder = tempfile.mkdtemp(prefix="meshwright-cache-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings.load_profile("new" if config.getoption("-m") == "soak" else "same")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test with the mark `covering`, the cases that are not chosen run only in the soak. The choice leaves out
    cases that have the mark `soak` themselves. A case that is requested by name runs."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            tests.setdefault(f"{item.path}::{item.originalname}", []).append(item)
    for every in tests.values():
        mark = every[0].get_closest_marker("covering")
        assert mark is not None
        cases = [case for case in every if not case.get_closest_marker("soak")]
        chosen = covering([case.name for case in cases], mark.args[0])
        for case in cases if len(cases) > 1 else ():
            if case.name not in chosen:
                case.add_marker(pytest.mark.soak)
    check_parts(items)


def check_parts(items: Sequence[pytest.Item]) -> None:
    """Every soak test is in a part of `make soak`."""
    long = {item.path.relative_to(item.config.rootpath).as_posix() for item in items if item.get_closest_marker("soak")}
    left = sorted(path for path in long if part_of(path) is None)
    if left:
        raise pytest.UsageError(f"{', '.join(left)}: has soak tests and is in no part of tests/soak_parts.py")


def covering(names: Sequence[str], count: int) -> set[str]:
    """`count` of `names` that have as many different words as possible: the one with the most new words first, ties in
    an order that new names do not change.

    >>> sorted(covering(["gpt2-dp2.z1", "gpt2-dp2.z3", "llama-dp2.z1", "llama-tp2"], 2))
    ['gpt2-dp2.z3', 'llama-tp2']
    """
    left = sorted(names, key=lambda name: zlib.crc32(name.encode()))
    chosen: set[str] = set()
    known: set[str] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda name: len(set(WORD.findall(name)) - known))
        left.remove(best)
        chosen.add(best)
        known |= set(WORD.findall(best))
    return chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, four at most: half of the tests wait for ranks that compute, or for a fault to be
    noticed."""
    return min((os.cpu_count() or 1) + 1, 4)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: nobody looks through it for garbage, neither on the way, a third of the
    time, nor in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def forget_user_modules(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Modules that a test imports from its own folder are no modules of later tests, which may use the same name."""
    before, folder = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
