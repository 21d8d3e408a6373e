"""What a rank is told before it trains: everything, so that it needs no planner. RUN/launch.json holds it, and says whose run folder it is."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from meshwright.base.codec import Noun
from meshwright.spec.data import Data
from meshwright.spec.estimate import Memory
from meshwright.spec.plan import Plan
from meshwright.spec.proof import ProofPrice
from meshwright.spec.rule import Rule
from meshwright.spec.run import Run
from meshwright.spec.workload import Workload


class ModelSource(Noun):
    """How to build the module: from `sizes` of a reference model, from a `folder` with a Hugging Face config, or by calling `module`; `rules` say what tensor ranks share of it."""

    name: str
    sizes: dict[str, Any] = Field(default_factory=dict)
    folder: str = ""
    module: str = ""
    rules: tuple[Rule, ...] = ()

    @model_validator(mode="after")
    def _one(self) -> ModelSource:
        if sum(map(bool, (self.sizes, self.folder, self.module))) != 1:
            raise ValueError("a model is built from sizes, from a folder or by a module: exactly one of them")
        return self


class Launch(Noun):
    """One run. `parameters` is how many the planner counted, 0 when it did not; `predicted` what it says that each pipeline rank takes."""

    model: ModelSource
    workload: Workload
    data: Data
    plan: Plan
    run: Run
    parameters: int = 0
    predicted: tuple[Memory, ...] = ()
    proof: ProofPrice = ProofPrice()

    def result(self) -> dict[str, Any]:
        """What decides the result, flat: 'workload.batch' to its value. Two launches that agree here are one job under two plans.

        With a constant learning rate more steps continue the same curve: then `steps` decides nothing.
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
        del flat["workload.spikes"]  # it decides what is done from here on
        return flat


def difference(mine: Launch, theirs: Launch) -> str:
    """The first thing that makes them two jobs, in words; empty when they are one.

    >>> from meshwright.spec.plan import Plan
    >>> def launch(batch): return Launch(model={"name": "a", "module": "a:b"}, workload={"batch": batch}, data={}, plan=Plan(), run={})
    >>> difference(launch(8), launch(4))
    'workload.batch is 4 there and 8 here'
    """
    here, there = mine.result(), theirs.result()
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            return f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
    return ""


def lengthened(mine: Launch, theirs: Launch) -> str:
    """What `mine`, which trains on where `theirs` ends, has of another length, in words; empty where it is not longer. Steps that were made stay as they were made.

    >>> from meshwright.spec.plan import Plan
    >>> def launch(steps): return Launch(model={"name": "a", "module": "a:b"}, workload={"steps": steps}, data={}, plan=Plan(), run={})
    >>> lengthened(launch(8), launch(4))
    'goes on to step 8 instead of 4: from here on the learning rate follows the cosine over 8 steps, the steps so far followed that over 4'
    """
    steps, before = mine.workload.steps, theirs.workload.steps
    if steps <= before:
        return ""
    if mine.workload.optimizer.schedule == "constant":
        return f"goes on to step {steps} instead of {before}"
    rate = f"from here on the learning rate follows the {mine.workload.optimizer.schedule} over {steps} steps"
    return f"goes on to step {steps} instead of {before}: {rate}, the steps so far followed that over {before}"
