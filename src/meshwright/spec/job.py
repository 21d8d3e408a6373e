"""Defines the job that the planner reads, its `run` section, and the launch file that ranks read.

`Job` is the input of the planner: model, cluster, workload, and the fields of the plan that the user fixed.

`RunConfig` is the `run` section of a job. `LaunchSpec` is the launch file of a training run. It has everything that a
rank needs except the model's weights and the data.

Guarantees: nothing in `RunConfig` changes the result of training, except that `balance` changes the summation order.
`LaunchSpec` is complete, so that a rank needs no planner. RUN/launch.json contains it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from meshwright.core.codec import OneLine, StrictModel
from meshwright.core.messages import Message
from meshwright.spec.cluster import Cluster
from meshwright.spec.estimate import MemoryBreakdown
from meshwright.spec.model import ModelSpec, TpRule
from meshwright.spec.plan import Plan
from meshwright.spec.record import ProofCost, ProofMode
from meshwright.spec.workload import DataConfig, Workload


class Job(StrictModel):
    """The job to plan. `pins` are fields of `Plan` that the user fixed. `trust`: whether the search considers all
    plans, or only those whose features all occur in published runs with a measured step time
    (planner/cost/uncertainty.py)."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload = Workload()
    pins: dict[str, int | str | bool | tuple[int, ...] | tuple[str, ...]] = Field(default_factory=dict)
    trust: Literal["all", "measured"] = "all"


TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "prometheus"]


def _split_names(value: Any) -> Any:
    """Returns the names in a text such as "wandb,mlflow", which `--set` passes."""
    return tuple(filter(None, value.replace(" ", "").split(","))) if isinstance(value, str) else value


StepInterval = Annotated[int, Field(ge=0)] | Literal["auto"]


class RunConfig(StrictModel):
    """The `run` section of a job: the folder of the training run, the interval of checkpoints, and the handling of
    faults."""

    folder: OneLine = Field(
        default="", description="folder of records, checkpoints and the plan; empty: runs/ plus the name of the model"
    )
    offload_to: OneLine = Field(
        default="",
        description=(
            "folder on a local disk for tensors offloaded to disk (off-*-disk); empty: a folder in the run folder"
        ),
    )
    checkpoint_every: StepInterval = Field(
        default=100,
        description="steps between checkpoints; 0: only at the end; auto: from measured times and failure_hours",
    )
    failure_hours: float = Field(
        default=24.0, gt=0, description="mean hours between failures of the machine, for checkpoint_every: auto"
    )
    resume_from: OneLine = Field(
        default="",
        description=(
            "checkpoint with which a new run begins, also one of another system: torch DCP, DeepSpeed, Megatron, "
            "safetensors"
        ),
    )
    restart: bool = Field(
        default=False, description="start at step 0 even if the run folder has step records but no checkpoint"
    )
    keep: int = Field(default=3, ge=1, description="number of checkpoints to keep; older ones are deleted")
    evaluate_every: int = Field(
        default=50, ge=0, description="steps between computations of the validation loss; 0: only at the end"
    )
    track: Annotated[tuple[TrackerName, ...], BeforeValidator(_split_names)] = Field(
        default=(),
        description="trackers that get the records: tensorboard, wandb, mlflow, swanlab, prometheus (a text file)",
    )
    balance: bool = Field(
        default=False,
        description=(
            "move micro-batches between replicas as their speeds change, and exclude stragglers; "
            "not bitwise reproducible"
        ),
    )
    grace_period: float = Field(
        default=25.0,
        gt=0,
        description="seconds that a run has to complete the step and save a checkpoint after a stop signal",
    )
    hang_timeout: float = Field(
        default=1.8,
        ge=0,
        description="minimum seconds without progress before a rank counts as hung (at least 5 steps); 0: never",
    )
    memory_checkpoints: bool = Field(
        default=True,
        description=(
            "store an in-memory checkpoint of each step that survives the ranks, so that a failed rank loses no step"
        ),
    )
    retries: int = Field(
        default=5,
        ge=0,
        description="maximum number of consecutive restarts without a completed step; 0: end at the first failure",
    )
    replica_check_every: int = Field(
        default=50, ge=0, description="steps between comparisons of replicated states across ranks; 0: never"
    )
    sdc_check_every: int = Field(
        default=0,
        ge=0,
        description=(
            "steps between checks for silent data corruption (gradients computed twice); 0: only "
            "if gradients are suspicious"
        ),
    )
    deterministic: bool = Field(
        default=False,
        description=(
            "use deterministic kernels on accelerators, so that repeated computations are bit-identical; attention "
            "backward is slower (on CPUs this is always so)"
        ),
    )
    prove: ProofMode = Field(
        default="auto",
        description=(
            "when to prove the plan equal to one device: start, a number of steps between proofs, "
            "never; auto: start if it takes at most 5 s or 1 % of 1,000 steps"
        ),
    )
    min_ranks: int = Field(
        default=0,
        ge=0,
        description=(
            "minimum number of ranks to start with if nodes are missing, and to continue with if a node is lost or a "
            "rank keeps failing; 0: start with all nodes, continue with the remaining ones, keep every rank"
        ),
    )
    rejoin_timeout: float = Field(
        default=10.0,
        ge=0,
        description="seconds to wait for a lost node before the others continue without it",
    )

    @property
    def every(self) -> int:
        """Returns the number of steps between checkpoints. With `auto`, the interval is chosen in seconds, and this
        number is only a placeholder."""
        return 100 if self.checkpoint_every == "auto" else self.checkpoint_every


class ModelSource(StrictModel):
    """The source from which ranks build the module. It is one of: the `sizes` of a reference model, a `folder` with a
    Hugging Face config, a user's function `module` (package.module:function). `rules` are the user's tensor-parallel
    rules."""

    name: str
    sizes: dict[str, Any] = Field(default_factory=dict)
    folder: str = ""
    module: str = ""
    rules: tuple[TpRule, ...] = ()

    @model_validator(mode="after")
    def _one(self) -> ModelSource:
        if sum(map(bool, (self.sizes, self.folder, self.module))) != 1:
            raise ValueError(Message("a model is built from sizes, from a folder or by a module: exactly one of them"))
        return self


class LaunchSpec(StrictModel):
    """The launch file of a training run. `parameters` is the number of parameters that the planner counted, and
    `vocabulary` the number of token ids that the embedding has; both are 0 without an estimate. `predicted` is the
    estimated memory of each pipeline rank. `ideal_seconds` are the seconds of a step at an MFU of 1, or 0 without an
    estimate or without devices with a nominal peak."""

    model: ModelSource
    workload: Workload
    data: DataConfig
    plan: Plan
    run: RunConfig
    parameters: int = 0
    vocabulary: int = 0
    predicted: tuple[MemoryBreakdown, ...] = ()
    ideal_seconds: float = 0.0
    proof: ProofCost = ProofCost()

    def result(self) -> dict[str, Any]:
        """Returns the fields that determine the result as a flat mapping with keys such as 'workload.batch'. Two
        launches with equal fields run the same job, even with different plans.

        With a constant learning rate, the number of steps does not affect earlier steps, so `steps` is omitted.
        `spikes` is always omitted, so that a resumed run may change it.
        """
        flat: dict[str, Any] = {}

        def put(prefix: str, value: Any) -> None:
            if isinstance(value, dict):
                for name, inner in value.items():
                    put(f"{prefix}.{name}" if prefix else name, inner)
            else:
                flat[prefix] = value

        put("", self.model_dump(mode="json", include={"model", "workload", "data"}))
        if self.workload.optimizer.schedule == "constant":
            del flat["workload.steps"]
        del flat["workload.spikes"]  # a change affects only steps that have not run yet
        return flat


def job_difference(mine: LaunchSpec, theirs: LaunchSpec) -> str:
    """Describes the first difference between the jobs of two launches. In the text, `mine` is "here" and `theirs` is
    "there". Returns an empty text if both run the same job.

    >>> from meshwright.spec.plan import Plan
    >>> model = {"name": "a", "module": "a:b"}
    >>> def launch(batch): return LaunchSpec(model=model, workload={"batch": batch}, data={}, plan=Plan(), run={})
    >>> job_difference(launch(8), launch(4))
    'workload.batch is 4 there and 8 here'
    """
    here, there = mine.result(), theirs.result()
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            return Message(
                "{name} is {there!r} there and {here!r} here",
                name=name,
                there=there.get(name),
                here=here.get(name),
            )
    return ""


def describe_extension(mine: LaunchSpec, theirs: LaunchSpec) -> str:
    """Describes by how many steps `mine` extends `theirs`. Returns an empty text if `mine` is not longer. `mine`
    resumes where `theirs` ends and does not change steps that have run.

    >>> from meshwright.spec.plan import Plan
    >>> model = {"name": "a", "module": "a:b"}
    >>> def launch(steps): return LaunchSpec(model=model, workload={"steps": steps}, data={}, plan=Plan(), run={})
    >>> describe_extension(launch(8), launch(4)).partition(": ")[0]
    'goes on to step 8 instead of 4'
    """
    steps, before = mine.workload.steps, theirs.workload.steps
    if steps <= before:
        return ""
    if mine.workload.optimizer.schedule == "constant":
        return Message("goes on to step {steps} instead of {before}", steps=steps, before=before)
    rate = Message(
        "from here on the learning rate follows the {schedule} over {steps} steps",
        schedule=mine.workload.optimizer.schedule,
        steps=steps,
    )
    return Message(
        "goes on to step {steps} instead of {before}: {rate}; the steps so far used the schedule over {before} steps",
        steps=steps,
        before=before,
        rate=rate,
    )
