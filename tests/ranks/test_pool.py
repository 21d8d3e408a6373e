"""The pool of warm ranks does what its docstring says."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankFailure


def total(scale: float) -> torch.Tensor:
    tensor = torch.ones(2) * dist.get_rank() * scale
    dist.all_reduce(tensor)
    return tensor


def one_raises(victim: int) -> int:
    if dist.get_rank() == victim:
        raise ValueError("no good")
    dist.all_reduce(torch.ones(1))
    return 0


def one_dies(victim: int) -> int:
    if dist.get_rank() == victim:
        os._exit(7)
    return 0


def draw() -> float:
    return torch.rand(1).item()


def sleep() -> None:
    time.sleep(60)


def test_ranks_answer_in_order_of_rank_and_share_a_group(ranks: Pool) -> None:
    assert [r.tolist() for r in ranks.run(2, total, 3.0)] == [[3.0, 3.0]] * 2
    assert [r.tolist() for r in ranks.run(4, total, 1.0)] == [[6.0, 6.0]] * 4
    assert [r.tolist() for r in ranks.run(2, total, 1.0)] == [[1.0, 1.0]] * 2


def test_every_call_draws_the_same_random_numbers(ranks: Pool) -> None:
    first = ranks.run(2, draw)
    assert first == ranks.run(2, draw)
    assert first[0] == first[1]


def test_a_rank_that_raises_is_named_and_the_pool_recovers(ranks: Pool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1: (.|\n)*no good"):
        ranks.run(2, one_raises, 1)
    assert ranks.run(2, total, 1.0)[0].tolist() == [1.0, 1.0]


def test_a_rank_that_dies_or_hangs_is_named_and_the_pool_recovers(ranks: Pool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0: died \(exit code 7\)"):
        ranks.run(2, one_dies, 0)
    with pytest.raises(RankFailure, match=r"rank 1 did not answer within 0\.5 s"):
        ranks.run(2, sleep, timeout=0.5)
    assert ranks.run(2, total, 1.0)[0].tolist() == [1.0, 1.0]
