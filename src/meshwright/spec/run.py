"""Where a run lies on disk and what it does beside training. Nothing here changes the result."""

from __future__ import annotations

from pydantic import Field

from meshwright.base.codec import Noun


class Run(Noun):
    """The `run` section of a job."""

    folder: str = Field(default="", description="where records, checkpoints and the plan go; empty: runs/ and the name of the model")
    checkpoint_every: int = Field(default=100, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(default=3, ge=1, description="checkpoints that stay; older ones are removed")
    evaluate_every: int = Field(default=50, ge=0, description="steps between losses on held-out data; 0: only at the end")
    tensorboard: bool = Field(default=True, description="events beside the records, where tensorboard is installed")
    balance: bool = Field(default=False, description="shares follow the speeds of the replicas while it runs; not repeated bit for bit then")
    grace: float = Field(default=25.0, gt=0, description="seconds that a run that is told to stop gets to end its step and save")
