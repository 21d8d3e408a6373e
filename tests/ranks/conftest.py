"""The fixtures `ranks`, a pool of warm ranks for the whole session (pool.py), and `sweep`, many pairs and their table
(sweep.py)."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from fault_runs import warm_process
from network_namespace import joined
from pool import Pool, warm
from sample_accounting import check_changed
from sweep import asked, run

from meshwright.elastic.local_agent import LocalAgent

warm()

BEGAN = pytest.StashKey[int]()
"""When the test began, in nanoseconds."""


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def without_a_group_of_another_test() -> Iterator[None]:
    """Ends the process group that a test leaves in this process, and restores the variables of a launcher. Lightning
    sets them, and the Trainer of transformers then joins a group: all later tests that fork ranks failed."""
    before = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def sweep() -> Callable[..., None]:
    return run


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A part of a soak has its part of all tests; sweeps are in every part, and deal out their own pairs."""
    _, part, parts = asked()
    dealt = [item for item in items if "sweep" not in getattr(item, "fixturenames", ())]
    others = {id(item) for at, item in enumerate(dealt) if at % parts != part - 1}
    items[:] = [item for item in items if id(item) not in others]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs that fail are trained on."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n\n" for n in range(400)))
    return file


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAgent]:
    """The warm process of all runs that fail (fault_runs.py)."""
    yield from warm_process(tmp_path_factory.mktemp("agent"), MESHWRIGHT_CHECKS=os.environ["MESHWRIGHT_TEST_CHECKS"])


@pytest.fixture
def space() -> Iterator[str]:
    """A network namespace behind a link (network_namespace.py)."""
    yield from joined()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Runs before every fixture of the test."""
    item.stash[BEGAN] = time.time_ns()


@pytest.fixture(scope="session")
def accounts_seen() -> dict[Path, tuple[int, int]]:
    """The runs whose accounts were checked, and the times of their logs then."""
    return {}


@pytest.fixture(autouse=True)
def accounts_checked(request: pytest.FixtureRequest, accounts_seen: dict[Path, tuple[int, int]]) -> Iterator[None]:
    """After each test, the accounts of every run that it left are compared with its raw files (sample_accounting.py):
    no test of a fault can leave it out. A test without a folder has no run."""
    yield
    if {"tmp_path", "tmp_path_factory"} & set(request.fixturenames):
        folder = request.getfixturevalue("tmp_path_factory").getbasetemp()
        check_changed(folder, accounts_seen, request.node.stash[BEGAN])
