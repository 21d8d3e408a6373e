"""Defines the settings that change the result: batch, sequence, steps, precision, optimizer, seed, and the data.

The data section defines the sources of the training text, its tokenization, and the fraction used for validation.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from meshwright.core.codec import StrictModel
from meshwright.core.errors import did_you_mean
from meshwright.core.messages import Message
from meshwright.core.quantities import Count
from meshwright.spec.precision import DilocoConfig, GradientCompression, Recipe, recipe

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "muon": 2, "adafactor": 1}
"""The number of state tensors per parameter, if each has the shape of the weights. For states of other shapes see
`OptimizerConfig.elements`."""

USER_FUNCTION_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Matches `package.module:function`."""

FULL_TENSOR_OPTIMIZERS = ("muon", "adafactor")
"""Optimizers that update a tensor as a whole."""

STATE_BLOCK_NUMEL = 32
"""The number of 8-bit state elements that share one scale of 4 bytes. Flat buffers are aligned to this size, so that no
block of elements spans two ranks."""


OPTIMIZERS_WITH_BETAS = ("adamw", "adam", "muon")
OPTIMIZERS_BY_FIELD = {
    "betas": OPTIMIZERS_WITH_BETAS,
    "eps": OPTIMIZERS_WITH_BETAS,
    "momentum": ("sgd-momentum", "muon"),
    "matrix_lr": ("muon",),
    "weight_decay": tuple(OPTIMIZER_STATES),
    "decay": tuple(OPTIMIZER_STATES),
}
"""Fields that only some optimizers have, with the names of these optimizers."""


class OptimizerConfig(StrictModel):
    """The optimizer. Over `warmup` steps (at most half of all steps) the learning rate rises linearly to `lr`. Then it
    is constant, or it falls to `final_lr` x `lr` at the last step. The fall is a cosine (schedule cosine), linear
    (linear), or linear over only the last fraction `cooldown` of the steps (warmup-stable-decay)."""

    name: str = Field(
        default="adamw",
        description=f"{', '.join(OPTIMIZER_STATES)}, or package.module:function (parameters -> optimizer)",
    )
    lr: float = Field(default=3e-4, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="decay rates of the first and the second moment (adamw, adam, muon)"
    )
    eps: float = Field(
        default=1e-8, gt=0, description="term added to the denominator of the update (adamw, adam, muon)"
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="decay of the weights per step, relative to the learning rate"
    )
    decay: Literal["matrices", "all"] = Field(
        default="matrices", description="parameters with weight decay: matrices only (no biases and norms), or all"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of sgd-momentum and muon")
    matrix_lr: float | None = Field(
        default=None, gt=0, description="muon: learning rate of the matrices of blocks; null: lr"
    )
    state: Literal["8bit"] | None = Field(
        default=None,
        description="8bit: store optimizer states in 1 byte per element; null: in the dtype of the precision",
    )
    warmup: int = Field(
        default=0, ge=0, description="steps in which the learning rate rises linearly to lr, at most half of all steps"
    )
    final_lr: float = Field(default=0.1, ge=0, le=1, description="learning rate of the last step, relative to lr")
    schedule: Literal["constant", "cosine", "linear", "warmup-stable-decay"] = Field(
        default="cosine", description="fall of the learning rate after the warmup"
    )
    cooldown: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="warmup-stable-decay: fraction of all steps in which the learning rate decays",
    )
    clip: float | None = Field(
        default=1.0, gt=0, description="maximum norm of the whole gradient (clipping); null: no clipping"
    )

    @field_validator("name")
    @classmethod
    def _named(cls, name: str) -> str:
        if name not in OPTIMIZER_STATES and not USER_FUNCTION_PATTERN.fullmatch(name):
            raise ValueError(
                Message(
                    "{name!r} is not one of {optimizer_states}, nor package.module:function{hint}",
                    name=name,
                    optimizer_states=", ".join(OPTIMIZER_STATES),
                    hint=did_you_mean(name, OPTIMIZER_STATES),
                )
            )
        return name

    @model_validator(mode="after")
    def _known(self) -> OptimizerConfig:
        if self.state is not None and self.name not in ("adamw", "adam", "sgd-momentum"):
            raise ValueError(
                Message(
                    "{name} has no 8-bit states; adamw, adam and sgd-momentum have them: leave state out",
                    name=self.name,
                )
            )
        requested = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        for name, rules in OPTIMIZERS_BY_FIELD.items():
            if name in requested and self.name not in rules:
                raise ValueError(
                    Message(
                        "{name} is an option of {rules}, not of {value}: leave it out",
                        name=name,
                        rules=", ".join(rules),
                        value=self.name,
                    )
                )
        if "cooldown" in requested and self.schedule != "warmup-stable-decay":
            raise ValueError(
                Message("cooldown belongs to the schedule warmup-stable-decay: leave it out, or choose this schedule")
            )
        if "final_lr" in requested and self.schedule == "constant":
            raise ValueError(
                Message("final_lr has no effect with schedule constant: leave it out, or choose another schedule")
            )
        return self

    @property
    def live(self) -> bool:
        """Returns whether the optimizer is a user's function."""
        return self.name not in OPTIMIZER_STATES

    @property
    def states(self) -> int:
        """Returns the number of state tensors per parameter. A user's optimizer counts like AdamW, because its number
        of states is unknown."""
        return OPTIMIZER_STATES.get(self.name, OPTIMIZER_STATES["adamw"])

    @property
    def whole(self) -> bool:
        """Returns whether the optimizer updates some or all tensors as a whole."""
        return self.name in FULL_TENSOR_OPTIMIZERS

    def updates_whole(self, shape: tuple[int, ...], in_block: bool) -> bool:
        """Returns whether a tensor is updated as a whole: with Muon, the matrices of blocks; with Adafactor, every
        tensor."""
        return self.name == "adafactor" or (self.name == "muon" and in_block and len(shape) == 2)

    def state_bytes(self, size: int) -> float:
        """Returns the bytes of one element of a state. `size` is the bytes of an element without 8-bit states.

        >>> OptimizerConfig(state="8bit").state_bytes(4), OptimizerConfig().state_bytes(4)
        (1.125, 4)
        """
        return 1 + 4 / STATE_BLOCK_NUMEL if self.state == "8bit" else size

    def elements(self, shape: tuple[int, ...], in_block: bool) -> float:
        """Returns the number of state elements per element of a parameter that is not sharded.

        >>> (OptimizerConfig(name="muon").elements((64, 16), True),
        ...     OptimizerConfig(name="adafactor").elements((64, 16), True))
        (1.0, 0.078125)
        """
        if self.name == "muon" and in_block and len(shape) == 2:
            return 1.0
        if self.name == "adafactor" and len(shape) > 1:
            return 1.0 / shape[-1] + 1.0 / shape[-2]
        return float(self.states)


class LoraConfig(StrictModel):
    """Low-rank adapters A and B, which are trained instead of a weight W: y = W x + (alpha / rank) B A x. `rank` is the
    number of rows of A and of columns of B."""

    rank: int = Field(default=8, ge=1, description="rows of A and columns of B, the two factors of an adapter")
    alpha: float = Field(default=16.0, gt=0, description="scale of an adapter, which is multiplied by alpha / rank")
    target: tuple[str, ...] = Field(
        default=(),
        description="names of the adapted layers, last component only; empty: every linear layer of the blocks",
    )
    base: Literal["nf4"] | None = Field(
        default=None,
        description="nf4: store the frozen linear layers of the blocks in 4 bits (QLoRA); null: in the compute dtype",
    )


class PreferenceConfig(StrictModel):
    """Preference training on pairs of a chosen and a rejected answer to a prompt. `dpo` compares the log-probabilities
    of the answers with those of the model before the first step (Rafailov et al., 2023). `orpo` adds an odds ratio to
    the loss of the chosen answer and needs no reference (Hong et al., 2024)."""

    loss: Literal["dpo", "orpo"] = Field(default="dpo", description="loss of the pairs of answers")
    beta: float = Field(
        default=0.1, gt=0, description="dpo: factor of the log-probability ratios; orpo: weight of the odds ratio"
    )


class Workload(StrictModel):
    """The training workload. `batch` is the number of sequences per optimizer step, over all devices."""

    sequence: Count = Field(
        default=256,
        ge=1,
        le=2**32,
        description="tokens per sequence; without the key: the context of the model, at most 4,096 (256 on CPUs)",
    )
    batch: Count = Field(default=32, ge=1, le=2**32, description="sequences per optimizer step, over all devices")
    steps: Count = Field(default=200, ge=1, description="number of optimizer steps")
    precision: Literal["fp64", "fp32", "tf32", "bf16", "bf16-pure", "fp16", "fp8"] = Field(
        default="fp32",
        description="dtypes of weights, activations and matrix products; without the key: the fastest of the devices",
    )
    reduce: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="dtype of stored, summed and sent gradients; null: fp32 (bf16-pure: bf16, fp64: fp64)",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="the optimizer and its learning-rate schedule"
    )
    seed: int = Field(default=1, ge=0, description="seed of the initial weights, the data order and dropout")
    spikes: Literal["skip", "keep"] = Field(
        default="skip",
        description="action on a persistent loss spike: skip: roll back and skip the batches; keep: continue",
    )
    exact: int = Field(
        default=0,
        ge=0,
        description=(
            "sequences per micro-batch with exact integer gradient sums, bitwise equal for any "
            "data-parallel size; 0: floating-point sums"
        ),
    )
    compression: GradientCompression | None = Field(
        default=None, description="gradient compression between hosts, which changes the result; null: no compression"
    )
    local: DilocoConfig | None = Field(
        default=None,
        description=(
            "DiLoCo: replicas update locally and synchronize every few steps, which changes the result; null: off"
        ),
    )
    expert_capacity: float | None = Field(
        default=None,
        gt=0,
        description=(
            "capacity factor: maximum number of (token, expert) pairs of an expert per sequence, divided by "
            "the mean; excess pairs are dropped; null: unlimited"
        ),
    )
    expert_bias_rate: float | None = Field(
        default=None,
        gt=0,
        description="change of a router's bias per step against the load of each expert; null: no change",
    )
    lora: LoraConfig | None = Field(default=None, description="train LoRA adapters only; null: train all weights")
    preference: PreferenceConfig | None = Field(
        default=None, description="train on pairs of a chosen and a rejected answer (dpo, orpo); null: on text"
    )

    @model_validator(mode="after")
    def _agrees(self) -> Workload:
        chosen = self.recipe
        if self.compression is not None and (self.exact or self.precision == "fp16"):
            what = (
                Message("exact sums do not allow lossy compression")
                if self.exact
                else Message(
                    "with fp16 the loss scale can change between steps, so the saved compression error cannot be added"
                )
            )
            raise ValueError(
                Message(
                    "compression {kind}: {what}: leave compression out, or choose another precision",
                    kind=self.compression.kind,
                    what=what,
                )
            )
        if chosen.exact and chosen.loss_scaling:
            raise ValueError(
                Message(
                    "exact: precision {chosen} scales the loss and with it the gradients: use bf16 or fp32",
                    chosen=chosen.name,
                )
            )
        if chosen.exact and self.reduce is not None:
            raise ValueError(
                Message(
                    "exact sums gradients as integers, reduce {reduce} as floating-point numbers: leave one out",
                    reduce=self.reduce,
                )
            )
        if chosen.rounds and self.optimizer.whole:
            raise ValueError(
                Message(
                    "precision {chosen} needs an optimizer that updates each element separately; {optimizer} updates "
                    "whole tensors: use precision bf16",
                    chosen=chosen.name,
                    optimizer=self.optimizer.name,
                )
            )
        if self.local is not None and (self.exact or self.batch % self.local.replicas):
            what = (
                Message("replicas that do not synchronize in every step have no exact sums")
                if self.exact
                else Message("batch {batch} is not a multiple of its replicas", batch=self.batch)
            )
            raise ValueError(
                Message(
                    "local.replicas {replicas}: {what}: choose another number, or leave local out",
                    replicas=self.local.replicas,
                    what=what,
                )
            )
        return self

    @property
    def recipe(self) -> Recipe:
        """Returns the precision recipe: the types of weights, gradients and states."""
        found = recipe(self.precision, self.reduce, self.optimizer.state)
        return found.but(
            exact=self.exact > 0,
            compression=self.compression,
            local=self.local,
            reduced=0 if self.exact else found.reduced,
        )

    @property
    def bytes_per_parameter(self) -> float:
        """Returns the bytes of weights, gradients and optimizer per parameter, if the states have the shape of the
        weights.

        >>> (Workload(precision="bf16").bytes_per_parameter,
        ...     Workload(precision="bf16-pure", reduce="fp32").bytes_per_parameter)
        (18.0, 10.0)
        """
        recipe = self.recipe
        return recipe.bytes_per_parameter(0) + self.optimizer.states * float(
            self.optimizer.state_bytes(recipe.state_size)
        )

    @property
    def fixed(self) -> dict[str, Any]:
        """Returns the values of plan fields that exact sums, DiLoCo or preference pairs require. The result depends on
        the fields of the first two; a preference loss reads the logits of whole rows. The user's pins take precedence.

        >>> Workload(exact=2).fixed
        {'micro_batch': 2, 'tp': 1, 'pp': 1, 'cp': 1, 'ep': 1}
        """
        if self.local is not None:
            return {"dp_replicate": self.local.replicas, "ep": 1}
        if self.preference is not None and not self.exact:
            return {"cp": 1, "loss_chunks": 1}
        return {"micro_batch": self.exact, "tp": 1, "pp": 1, "cp": 1, "ep": 1} if self.exact else {}

    @property
    def skips_spikes(self) -> bool:
        """Returns whether a loss spike skips batches. In preference training it does not, since the log-probabilities
        of the reference are known only for the pairs that the steps read without a skip."""
        return self.spikes == "skip" and self.preference is None

    @property
    def tokens(self) -> int:
        """Returns the number of tokens per optimizer step."""
        return self.sequence * self.batch


class DataConfig(StrictModel):
    """The `data` section of a job.

    `source` is one of:
    - `stdlib`: the sources of Python's own standard library;
    - `shapes`: drawn images, for models that classify them;
    - one or several files, folders or patterns of text, JSON lines, Parquet or token arrays.
    """

    source: str | tuple[str, ...] = Field(
        default="stdlib",
        description="stdlib, shapes, or one or several files, folders or patterns with the training data",
    )
    weights: tuple[float, ...] = Field(
        default=(), description="share of the samples from each source, in their order; empty: sources are joined"
    )
    field: str = Field(
        default="text", min_length=1, description="field with the text in each JSON line, or column in a Parquet table"
    )
    tokenizer: str = Field(
        default="auto",
        min_length=1,
        description="auto, bytes, bpe, or a folder with a tokenizer.json or tokenizer.model",
    )
    documents: Literal["joined", "apart"] = Field(
        default="joined",
        description="documents that share a row: joined: one continuous text; apart: separate attention and positions",
    )
    held_out: float = Field(
        default=0.01, ge=0, le=0.5, description="fraction of the tokens reserved for validation; 0: none"
    )

    @field_validator("source")
    @classmethod
    def _named(cls, source: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not source or not all(source):
            raise ValueError(Message("no file is named: write 'stdlib', a path, or a list of paths"))
        return source

    @model_validator(mode="after")
    def _weighted(self) -> DataConfig:
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(
                Message(
                    "{weights} weights for {sources} sources: write one for each",
                    weights=len(self.weights),
                    sources=len(self.sources),
                )
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise ValueError(Message("weights must be positive numbers: leave out a source that is not to be read"))
        if any(weight < 0.001 * sum(self.weights) for weight in self.weights):
            raise ValueError(Message("a weight is less than 0.001 of the sum of all: leave this source out"))
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """Returns the sources as a tuple."""
        return (self.source,) if isinstance(self.source, str) else self.source
