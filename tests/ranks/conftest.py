"""The fixture `ranks`: a pool of warm ranks for the whole session. Its interface stands in pool.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import warm_process
from pool import Pool, warm

from meshwright.elastic.nursery import Nursery

warm()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs that fail are trained on."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n\n" for n in range(400)))
    return file


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The warm process of all runs that fail (faulty.py)."""
    yield from warm_process(tmp_path_factory.mktemp("nursery"))
