"""What all tests share: the cases that hypothesis tries are the same in every run, but for the soak, which looks for new ones."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("MESHWRIGHT_MEASURED", "0")  # what somebody measured on this machine must not change answers
    settings.load_profile("new" if config.getoption("-m") == "soak" else "same")
