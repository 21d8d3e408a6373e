"""What all tests share: the cases that hypothesis tries are the same in every run, but for the soak, which looks for new ones; a cache of their own."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
"""No case fails because the machine has other things to do."""

settings.register_profile("same", derandomize=True, **CALM)
settings.register_profile("new", **CALM)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("MESHWRIGHT_MEASURED", "0")  # what somebody measured on this machine must not change answers
    os.environ.setdefault("MESHWRIGHT_PROVE", "never")  # tests compare with one device themselves; those of the proof ask for one
    if "MESHWRIGHT_CACHE" not in os.environ:  # nor what other runs have kept; and a home may be read only
        os.environ["MESHWRIGHT_CACHE"] = folder = tempfile.mkdtemp(prefix="meshwright-cache-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings.load_profile("new" if config.getoption("-m") == "soak" else "same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, four at most: half of the tests wait for ranks that compute, or for a fault to be noticed."""
    return min((os.cpu_count() or 1) + 1, 4)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: nobody looks through it for garbage, neither on the way, a third of the time, nor in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
