"""Other plans for a run that trains, chosen while it runs."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.preparation import Choice
from meshwright.cli.replans import Replans
from meshwright.spec.launch import Launch
from meshwright.spec.plan import Plan


def test_a_folder_that_cannot_be_written_costs_what_it_says_of_the_plan_and_not_the_run(tmp_path: Path) -> None:
    """A full disk, or a folder that is gone: the ranks start from what they hold in memory all the same."""
    launch = Launch(
        model={"name": "m", "folder": "model"}, workload={"sequence": 32, "batch": 12}, data={"source": "text"}, plan=Plan(dp_replicate=4),
        run={"folder": str(tmp_path / "gone" / "run")},
    )  # fmt: skip
    work = Replans(launch, Choice(None, launch.plan, None, []), tmp_path / "gone" / "run").replan(3)
    assert (work.world, work.plan) == (3, "dp3") and not (tmp_path / "gone").exists()
