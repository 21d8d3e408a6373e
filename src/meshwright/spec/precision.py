"""Defines precision recipes: the data types of weights, gradients and optimizer states, of computation and of
reduction. The table has the resulting bytes per parameter.

| recipe | weights | gradients | optimizer with AdamW | total | matrix products |
|---|---|---|---|---|---|
| fp64 | 8 | 8 | 16 | 32 | float64 |
| fp32 | 4 | 4 | 8 | 16 | float32 |
| tf32 | 4 | 4 | 8 | 16 | float32 whose factors have 10 bits of mantissa |
| bf16, fp16 | 2 | 4 | 4 (master) + 8 | 18 | bfloat16, float16 |
| fp8 | 2 | 4 | 4 (master) + 8 | 18 | float8 in the linear layers of blocks, else bfloat16 |
| bf16-pure | 2 | 2 | 4 | 8 | bfloat16; weights and states rounded stochastically |

Gradients are stored, summed over micro-batches and summed over ranks in the type `reduce` of the workload (bf16 and
fp16 have 2 bytes, fp32 has 4). Without `reduce` the table applies: float32 if weights are stored in fewer bits and have
float32 main weights, as in Megatron-LM and torchtitan. A sum in bfloat16 has 8 significant bits, so from some 256
micro-batches or ranks on it loses most of each addend. `bf16-pure` stores everything in bfloat16, to save memory.

The module also defines two options that change the result. Gradient compression sends fewer bytes between hosts. With
DiLoCo, replicas update locally and synchronize rarely. DiLoCo is meant for sites whose links are too slow for gradients
in every step.

Sources: Rajbhandari et al., ZeRO, section 3.1 (2 + 2 + 12 bytes per parameter, with `reduce` bf16); float32 sums:
NVIDIA/Megatron-LM megatron/training/arguments.py (`--grad-reduce-in-bf16` turns them off), pytorch/torchtitan
`mixed_precision_reduce`; Micikevicius et al., FP8 Formats for
Deep Learning, 2022; Gupta et al., Deep Learning with Limited Numerical Precision, 2015 (stochastic rounding); Douillard
et al., DiLoCo: Distributed Low-Communication Training of Language Models (arXiv 2311.08105). DiLoCo uses AdamW as the
inner optimizer, and SGD with Nesterov momentum over the mean change of the replicas as the outer optimizer. The paper's
settings (lr 0.7, momentum 0.9) are the defaults.

>>> RECIPES["bf16"].bytes_per_parameter(states=2), recipe("bf16", "bf16").bytes_per_parameter(states=2)
(18, 16)
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message

FLOAT8_SIZE_MULTIPLE = 16
"""A linear layer has float8 products if both dimensions of its weight are multiples of this number, which the kernels
require of both factors."""

INT8_BLOCK_NUMEL = 256
"""The number of int8 elements that share one scale."""


class GradientCompression(StrictModel):
    """The compression of gradients between hosts. bf16 sends 2 bytes per element. int8 sends 1 byte per element and one
    scale per block. low-rank sends two factors of each matrix.

    >>> GradientCompression(kind="int8").bytes_per_element
    1.015625
    """

    kind: Literal["bf16", "int8", "low-rank"] = Field(description="form in which gradients are sent between hosts")
    rank: int = Field(default=4, ge=1, description="columns of the factors in low-rank compression")

    @property
    def bytes_per_element(self) -> float:
        """Returns the bytes per element of a large vector. For low-rank, returns 4, because only matrices are
        compressed."""
        return {"bf16": 2.0, "int8": 1.0 + 4.0 / INT8_BLOCK_NUMEL}.get(self.kind, 4.0)


class DilocoConfig(StrictModel):
    """The DiLoCo settings. Each of the `replicas` replicas reads its own part of every batch and updates its weights
    locally. After every `steps` steps the replicas synchronize their weights."""

    replicas: int = Field(ge=2, description="number of replicas that update their weights locally")
    steps: int = Field(default=50, ge=1, description="steps between two synchronizations of the replicas")
    lr: float = Field(
        default=0.7, gt=0, description="learning rate of the outer optimizer; 1 without momentum averages the replicas"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Nesterov momentum of the outer optimizer")


class Recipe(StrictModel):
    """The dtypes of training. `compute` is torch's name of the data type of weights, activations and the gradients of
    one backward pass, and `size` is its bytes. `master` is the bytes of a main weight, 0 without main weights."""

    name: str
    compute: str
    size: int
    rate: str = Field(description="precision of the matrix products, a key of the device's peak rates")
    master: int = 0
    loss_scaling: bool = False
    exact: bool = False
    """Gradients are added as integers, which gives the same bits for any number of data-parallel ranks."""
    compression: GradientCompression | None = None
    """The compression of gradients between hosts."""
    products: str = Field(
        default="", description="precision of matrix products in the linear layers of blocks; empty: that of `rate`"
    )
    rounds: bool = Field(
        default=False, description="store weights and states in the compute dtype with stochastic rounding"
    )
    eight: bool = Field(default=False, description="store optimizer states in 8 bits")
    reduced: int = Field(
        default=0, description="bytes per element of stored and summed gradients; 0: bytes of the compute dtype"
    )
    local: DilocoConfig | None = None
    """The DiLoCo settings; None if replicas synchronize in every step."""

    @property
    def state_size(self) -> int:
        """Returns the bytes of one element of an optimizer state: those of a main weight, or of a weight if there are
        no main weights."""
        return self.master or self.size

    @property
    def gradient_size(self) -> int:
        """Returns the bytes of one element of a stored gradient."""
        return self.reduced or self.size

    @property
    def rates(self) -> tuple[str, ...]:
        """Returns the precisions for which a device must have a peak rate of matrix products."""
        return (self.rate, self.products) if self.products else (self.rate,)

    def bytes_per_parameter(self, states: float) -> float:
        """Returns the bytes of weights, gradients and optimizer per parameter. The optimizer has `states` state
        tensors."""
        return self.size + self.gradient_size + self.master + states * self.state_size


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fp64", compute="float64", size=8, rate="fp64"),
        Recipe(name="fp32", compute="float32", size=4, rate="fp32"),
        Recipe(name="tf32", compute="float32", size=4, rate="tf32"),
        Recipe(name="bf16", compute="bfloat16", size=2, rate="bf16", master=4, reduced=4),
        Recipe(name="bf16-pure", compute="bfloat16", size=2, rate="bf16", rounds=True),
        Recipe(name="fp16", compute="float16", size=2, rate="fp16", master=4, reduced=4, loss_scaling=True),
        Recipe(name="fp8", compute="bfloat16", size=2, rate="bf16", master=4, reduced=4, products="fp8"),
    )
}


REDUCE_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element of the dtypes that `reduce` accepts for stored and summed gradients."""


def recipe(name: str, reduce: str | None = None, state: str | None = None) -> Recipe:
    """Returns the precision recipe `name`, such as bf16. `reduce` (bf16, fp16 or fp32) replaces the dtype of
    stored and summed gradients,
    and `state` ('8bit') replaces the dtype of optimizer states.

    Raises: InputError for an unknown name, or for a combination that is not supported.

    >>> recipe("bf16", "bf16").gradient_size, recipe("bf16-pure").bytes_per_parameter(states=2)
    (2, 8)
    """
    if name not in RECIPES:
        raise InputError(
            Message(
                "precision {name!r} is not one of {recipes}{hint}",
                name=name,
                recipes=", ".join(RECIPES),
                hint=did_you_mean(name, RECIPES),
            )
        )
    found = RECIPES[name]
    if state is not None:
        if state != "8bit" or found.rounds or name == "fp64":
            raise InputError(
                Message(
                    "optimizer state {state} cannot be combined with precision {name}: '8bit' works with fp32, tf32, "
                    "bf16, fp16 and fp8",
                    state=state,
                    name=name,
                )
            )
        found = found.but(eight=True)
    if reduce is None:
        return found
    if reduce not in REDUCE_DTYPE_BYTES:
        raise InputError(
            Message(
                "reduce {reduce!r} is not one of {reduce_dtype_bytes}{hint}",
                reduce=reduce,
                reduce_dtype_bytes=", ".join(REDUCE_DTYPE_BYTES),
                hint=did_you_mean(reduce, REDUCE_DTYPE_BYTES),
            )
        )
    if name == "fp64" or (reduce != "fp32" and (reduce == "fp16") != (name == "fp16")):
        raise InputError(
            Message(
                "reduce {reduce} cannot represent the gradients of precision {name}: leave reduce out",
                reduce=reduce,
                name=name,
            )
        )
    return found.but(reduced=0 if REDUCE_DTYPE_BYTES[reduce] == found.size else REDUCE_DTYPE_BYTES[reduce])
