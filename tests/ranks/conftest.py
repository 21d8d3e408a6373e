"""The fixture `ranks`: a pool of warm ranks for the whole session. Its interface stands in pool.py."""

from collections.abc import Iterator

import pytest
from pool import Pool, warm

warm()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
