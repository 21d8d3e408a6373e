"""Where a run lies on disk and what it does beside training. Nothing here changes the result."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from meshwright.base.codec import Noun
from meshwright.base.oneline import OneLine
from meshwright.spec.proof import ProofMode

Every = Annotated[int, Field(ge=0)] | Literal["auto"]


class Run(Noun):
    """The `run` section of a job."""

    folder: OneLine = Field(default="", description="where records, checkpoints and the plan go; empty: runs/ and the name of the model")
    offload_to: OneLine = Field(
        default="",
        description="where the plan's off-optimizer-disk and off-parameters-disk lie, on a local disk; empty: in the run's folder",
    )
    checkpoint_every: Every = Field(
        default=100, description="steps between checkpoints; 0: only at the end; auto: by measured time and failure_hours"
    )
    failure_hours: float = Field(default=24.0, gt=0, description="mean hours between failures of the machine, for checkpoint_every: auto")
    anew: bool = Field(default=False, description="begin at step 0 although the folder has reported steps and lost its checkpoints")
    keep: int = Field(default=3, ge=1, description="checkpoints that stay; older ones are removed")
    evaluate_every: int = Field(default=50, ge=0, description="steps between losses on held-out data; 0: only at the end")
    tensorboard: bool = Field(default=True, description="events beside the records, where tensorboard is installed")
    balance: bool = Field(
        default=False,
        description="shares follow the speeds of the replicas while it runs, and a slow device may be left out; not repeated bit for bit then",
    )
    grace: float = Field(default=25.0, gt=0, description="seconds that a run that is told to stop gets to end its step and save")
    patience: float = Field(
        default=1.8, ge=0, description="seconds of silence after which a rank counts as hung, if that is more than 5 steps; 0: never"
    )
    copies: bool = Field(
        default=True, description="each step's state is copied in memory that outlives the ranks: one that fails costs no step"
    )
    retries: int = Field(
        default=5, ge=0, description="failures in a row, without a step between them, after which the run gives up; 0: the first"
    )
    compare_every: int = Field(default=50, ge=0, description="steps between comparisons of what several ranks hold alike; 0: never")
    recount_every: int = Field(
        default=0, ge=0, description="steps between gradients that are computed twice and compared; 0: only those that look wrong"
    )
    prove: ProofMode = Field(
        default="auto",
        description="when the plan is proven equal to one device, on the run's own ranks and weights: start (before the first update); a number of steps "
        "between proofs; never; auto: at the start where that takes under 1 % of the first 1,000 steps by the estimate",
    )
    least: int = Field(
        default=0, ge=0, description="ranks to go on with, at the least, when one fails again and again; 0: as many as it began with"
    )
    rejoin: float = Field(default=10.0, ge=0, description="seconds that a lost node gets to come back before the others go on without it")

    @property
    def every(self) -> int:
        """Steps between checkpoints, for who counts in steps; `auto` counts in seconds and is taken for the default."""
        return 100 if self.checkpoint_every == "auto" else self.checkpoint_every
