"""Plans that are tried one after the other in the same processes: one that does not run is said, and the next one is
tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_data_dependent_models import WIDTH, Mean
from torch import nn

from meshwright.spec.job import LaunchSpec, ModelSource, RunConfig
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.workload import DataConfig, Workload
from meshwright.train.measured_runs import TrialResult, TrialRunner


class Centred(nn.Module):
    """Its rows see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(260, WIDTH), nn.ModuleList(Mean() for _ in range(2))
        self.head = nn.Linear(WIDTH, 260)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tried(source: str, plans: list[str]) -> list[TrialResult]:
    launch = LaunchSpec(
        model=ModelSource(name="centred", module=f"{__name__}:Centred"),
        workload=Workload(batch=4, sequence=16, precision="fp32"),
        data=DataConfig(source=source, tokenizer="bytes"),
        plan=Plan(),
        run=RunConfig(),
    )
    ground = TrialRunner(launch, steps=1)
    return [ground.try_plan(parse_plan(plan)) for plan in plans]


def test_a_plan_that_is_refused_in_its_first_step_is_said_and_the_next_one_is_tried(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("".join(f"{number} and {number * number}\n" for number in range(400)))
    for first, second, third in ranks.run(2, tried, str(tmp_path / "words.txt"), ["dp2.mb2", "pp2.mb2", "tp2.mb4"]):
        assert first.seconds is second.seconds is None
        assert (
            "rows of a batch depend on each other" in first.why and "rows of a batch depend on each other" in second.why
        )
        assert third.seconds > 0 and not third.why
