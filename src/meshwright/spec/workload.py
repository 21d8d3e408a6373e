"""Everything that changes the result: batch, sequence, steps, precision, optimizer, seed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from meshwright.base.codec import Noun
from meshwright.spec.compression import Compression

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}


class Optimizer(Noun):
    """The update rule. `warmup` steps (at most half of all) rise linearly to `lr`, then a cosine falls to `final_lr` x `lr` at the last step."""

    name: Literal["adamw", "adam", "sgd", "sgd-momentum"] = "adamw"
    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    decay: Literal["matrices", "all"] = Field(default="matrices", description="what weight decay falls on; biases and norms are vectors")
    momentum: float = Field(default=0.9, ge=0, lt=1)
    warmup: int = Field(default=0, ge=0)
    final_lr: float = Field(default=0.1, ge=0, le=1)
    schedule: Literal["constant", "cosine"] = "cosine"
    clip: float | None = Field(default=1.0, gt=0, description="largest norm of the whole gradient; null: no clipping")

    @property
    def states(self) -> int:
        """State tensors per parameter."""
        return OPTIMIZER_STATES[self.name]


class Lora(Noun):
    """Low-rank adapters instead of all weights: y = W x + (alpha / rank) B A x, where only A and B are trained."""

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    target: tuple[str, ...] = Field(
        default=(), description="layers by the last part of their names; empty: every linear layer of the blocks"
    )


class Workload(Noun):
    """`batch` is in sequences per optimizer step, over all devices."""

    sequence: int = Field(default=256, ge=1)
    batch: int = Field(default=32, ge=1)
    steps: int = Field(default=200, ge=1)
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    optimizer: Optimizer = Optimizer()
    seed: int = Field(default=1, ge=0)
    spikes: Literal["skip", "keep"] = Field(
        default="skip", description="when the loss rises and stays: skip: go back and leave the batches out; keep: train on"
    )
    exact: int = Field(
        default=0,
        ge=0,
        description="sequences of a micro-batch whose gradients are added as integers: the same bits for any number of data-parallel ranks; "
        "0: floating-point sums",
    )
    compression: Compression | None = Field(
        default=None, description="gradients in fewer bytes between hosts, which changes the result; null: as they are"
    )
    lora: Lora | None = Field(default=None, description="train adapters only; null: all weights")

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        if self.compression is not None and (self.exact or self.precision == "fp16"):
            what = "exact sums lose nothing" if self.exact else "what fp16 keeps back for the next step has another loss scale there"
            raise ValueError(f"compression {self.compression.kind}: {what}: leave compression out, or choose another precision")
        return self

    @property
    def fixed(self) -> dict[str, int]:
        """Fields of a plan that the result hangs on, where it is to be exact, unless someone fixes them otherwise.

        >>> Workload(exact=2).fixed
        {'micro_batch': 2, 'tp': 1, 'pp': 1, 'cp': 1, 'ep': 1}
        """
        return {"micro_batch": self.exact, "tp": 1, "pp": 1, "cp": 1, "ep": 1} if self.exact else {}

    @property
    def tokens(self) -> int:
        """Per optimizer step."""
        return self.sequence * self.batch
