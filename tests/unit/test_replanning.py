"""Other plans for a run that trains, chosen while it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.cli.launch_plan import PlanChoice
from meshwright.cli.replanning import Replanner, lower_memory_hint
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.model_parser import read_model
from meshwright.spec.enums import Offload
from meshwright.spec.job import Job, LaunchSpec
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.workload import OptimizerConfig, Workload


def test_an_unwritable_folder_costs_the_plan_report_and_not_the_run(tmp_path: Path) -> None:
    """A full disk, or a folder that is gone: the ranks start from what they hold in memory all the same."""
    launch = LaunchSpec(
        model={"name": "m", "folder": "model"}, workload={"sequence": 32, "batch": 12}, data={"source": "text"},
        plan=Plan(dp_replicate=4), run={"folder": str(tmp_path / "gone" / "run")},
    )  # fmt: skip
    work = Replanner(launch, PlanChoice(None, launch.plan, None, []), tmp_path / "gone" / "run").replan(3)
    assert (work.world, work.plan) == (3, "dp3.mb1") and not (tmp_path / "gone").exists()


def question(cluster: str, optimizer: str) -> Job:
    work = Workload(batch=8, sequence=512, optimizer=OptimizerConfig(name=optimizer))
    return Job(model=read_model("gpt2"), cluster=read_cluster(cluster), workload=work)


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                ("dp2.mb4", "adamw"),
                ("dp2.mb4", "muon"),
                ("dp2.z1.mb4", "adamw"),
                ("dp2.z1.rc-full.off-optimizer-disk.ga6-2", "adamw"),
            )
        ),
        ("dp2.z1.mb4", "muon"),
    ],
)
def test_the_plan_that_an_oom_suggests_fits_and_suits_the_precision(plan: str, optimizer: str) -> None:
    job, now = question("2:cpu", optimizer), parse_plan(plan)
    said = lower_memory_hint(job, now)
    named = re.search(r"^plan (\S+) is estimated to take .*: use --plan \1$", said)
    if named is None:
        assert (
            said == f"no plan for 2 ranks takes less memory than {plan}: use more ranks, or a smaller batch"
            and "off" in plan
        )
        return
    other = parse_plan(named[1])
    assert estimate(job, other).fits and estimate(job, other).memory.total <= 0.8 * estimate(job, now).memory.total
    assert optimizer != "muon" or not {Offload.optimizer, Offload.optimizer_disk} & set(other.offload)


def test_a_model_that_nobody_priced_has_no_such_plan() -> None:
    assert (
        lower_memory_hint(None, parse_plan("dp2"))
        == "no plan for 2 ranks takes less memory than dp2: use more ranks, or a smaller batch"
    )


def test_a_launch_knows_what_each_pipeline_rank_is_to_take(tmp_path: Path) -> None:
    """Also under another plan than the first."""
    job, plan = question("4:cpu", "adamw"), parse_plan("dp4.mb2")
    launch = LaunchSpec(
        model={"name": "m", "folder": "model"}, workload=job.workload, data={"source": "text"}, plan=plan,
        run={"folder": str(tmp_path)}
    )  # fmt: skip
    work = Replanner(launch, PlanChoice(job, plan, estimate(job, plan), []), tmp_path).replan(2)
    assert work.payload["predicted"] == [stage.model_dump() for stage in estimate(*_asked(job, work.plan)).per_stage]


def _asked(job: Job, plan: str) -> tuple[Job, Plan]:
    return job.but(cluster=read_cluster("2:cpu")), parse_plan(plan)
