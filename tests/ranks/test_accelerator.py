"""What only ranks on accelerators need, decided where there are none: which kernels, where numbers lie, what is said first."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from meshwright.base.errors import MeshwrightError
from meshwright.elastic.supervisor import Supervisor, Work
from meshwright.parallel.device import own_device
from meshwright.parallel.exchange.group import by_nccl, of_process
from meshwright.parallel.zero.master import Master

HERE = Path(__file__).parent


@pytest.mark.parametrize(("options", "place"), [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({}, "cpu")])
def test_the_count_of_steps_goes_on_where_the_update_reads_it(options: dict[str, Any], place: str) -> None:
    master = Master(torch.zeros(512, device="meta"), [(0, 64)])
    optimizer = torch.optim.AdamW(master.runs, fused=None)
    optimizer.param_groups[0].update(options)
    master.prepare(optimizer, {"exp_avg": "float32"}, {"step": 3.0})
    assert {optimizer.state[run]["step"].device.type for run in master.runs} == {place}


def backends() -> tuple[str, bool]:
    group = of_process(dist.group.WORLD)
    assert group is not None
    return group.backends, group.is_native(torch.zeros(1))


def test_whether_nccl_carries_a_tensor_is_read_from_what_torch_says_of_each_device(ranks: Pool) -> None:
    said, native = ranks.run(2, backends)[0]
    assert "cpu:gloo" in said.split(",") and not native
    assert by_nccl(said.replace("cuda:gloo", "cuda:nccl"), "cuda"), "the same words, of a group whose tensors on CUDA devices NCCL carries"


def test_products_that_repeat_themselves_are_asked_for_before_cublas_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    own_device()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    own_device()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "somebody chose"


@pytest.mark.parametrize(("target", "words"), [("meshwright.train.loop:train", "model"), ("meshwright.cli.trials:rank", "job")])
def test_a_rank_says_what_failed_before_groups_end(target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    began = time.monotonic()
    with pytest.raises(MeshwrightError, match=words):
        Supervisor(Work(target, 2, {}, tmp_path, ("stuck",)), lambda *_: None).run()
    assert time.monotonic() - began < 60
