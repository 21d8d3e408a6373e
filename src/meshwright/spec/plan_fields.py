"""Into how many parts a plan divides a job: the degree of each axis and the ZeRO stage, and the numbers of ranks that
follow from them.

Which rows of a batch each data replica reads: its micro-batches, their number and their size.

Rule: replica r passes n_r micro-batches of m_r sequences, one replica's rows behind the other's, and the sum of n_r m_r
is the batch. Both may differ
by replica: numbers (`shares`) where devices are unlike in speed, sizes (`micro_batch_sizes`) where one size would not
fit on all or waste some. The
loss is the sum over all labels over their number, so that neither is seen in it. With unlike sizes and equal numbers
all replicas meet in every
micro-batch, which ZeRO 2 and 3 need; unlike numbers meet once a step.

What the ranks of a plan keep between forward and backward, what they make again instead, and what of all that they hold
waits elsewhere.

Blocks are told apart by their place in their virtual stage: the first so many do more than those behind them. Where
only some blocks recompute and only
some send their activations away, these are the same first ones.

Micro-batches by speed: how many of a batch each replica takes so that all are done as early as possible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.spec.enums import (
    ACTIVATION_OFFLOADS,
    EXCLUSIVE_OFFLOADS,
    OFFLOAD_AMOUNT_FIELDS,
    PARAMETER_OFFLOADS,
    PER_BLOCK_RECOMPUTE,
    Offload,
    Recompute,
    offloads_activations,
    offloads_states,
    offloads_weights,
)


class PlanDegrees(StrictModel):
    """The first fields of a plan. `version` is that of its schema."""

    version: int = Field(default=1, ge=1, le=1)
    dp_replicate: int = Field(default=1, ge=1)
    dp_shard: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    zero: int = Field(default=0, ge=0, le=3)

    @property
    def dp(self) -> int:
        """Replicas that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Ranks that share the states of one replica: the shard group and its context ranks. 1 at ZeRO 0."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same states: the replicas of the shard group; at ZeRO 0 all data and context ranks.

        >>> PlanDegrees(dp_replicate=2, dp_shard=2, cp=2, zero=1).copies, PlanDegrees(dp_replicate=2, cp=2).copies
        (2, 4)
        """
        return self.dp * self.cp // self.shards

    @property
    def expert_tensor(self) -> int:
        """Tensor ranks that share one expert. Expert ranks are taken from dp_shard x cp; tensor ranks that must join
        hold whole experts.

        >>> PlanDegrees(tp=2, ep=4, dp_shard=8, zero=1).expert_tensor, PlanDegrees(tp=8, ep=8).expert_tensor
        (2, 1)
        """
        return self.tp // (self.ep // math.gcd(self.ep, self.dp_shard * self.cp)) if self.ep > 1 else self.tp


class PlanBatchLayout(PlanDegrees):
    """How a batch is laid over the replicas of a plan."""

    micro_batch: int = Field(default=1, ge=1, description="sequences per pass of one replica; of unlike ones the most")
    micro_batch_sizes: tuple[int, ...] = Field(
        default=(), description="sequences per pass of each data replica; empty: micro_batch on every one"
    )
    shares: tuple[int, ...] = Field(
        default=(), description="micro-batches of each data replica in a step; empty: equally many"
    )

    @model_validator(mode="after")
    def _sized(self) -> PlanBatchLayout:
        sizes = self.micro_batch_sizes
        if not sizes:
            return self
        if len(sizes) != self.dp or self.dp < 2 or min(sizes) < 1:
            raise ValueError(
                f"micro-batch sizes {list(sizes)} give each of dp({self.dp}) replicas at least one sequence, of two replicas or more"
            )
        if max(sizes) != self.micro_batch or min(sizes) == self.micro_batch:
            raise ValueError(
                f"micro-batch sizes {list(sizes)}: micro_batch({self.micro_batch}) is the largest of unlike sizes; where all are equal write it alone"
            )
        if self.ep > 1:
            raise ValueError(
                "micro-batch sizes: experts on unlike replicas would wait for unlike numbers of tokens; use ep1"
            )
        return self

    def size_of(self, replica: int) -> int:
        """Sequences in a micro-batch of `replica`."""
        return self.micro_batch_sizes[replica] if self.micro_batch_sizes else self.micro_batch

    @property
    def rows_at_once(self) -> int:
        """Sequences in one micro-batch of every replica."""
        return sum(self.micro_batch_sizes) or self.dp * self.micro_batch

    @property
    def rows_shared_out(self) -> int:
        """Sequences of a batch that the shares are of; 0 without shares."""
        return sum(count * self.size_of(replica) for replica, count in enumerate(self.shares))

    def micro_batches(self, batch: int, replica: int | None = None) -> int:
        """Micro-batches per step of `replica`, or the most that one has. Raises InputError when `batch` does not
        divide."""
        if self.shares:
            if self.rows_shared_out != batch:
                raise InputError(f"shares: {self.shares_equation} but the batch is {batch}")
            return max(self.shares) if replica is None else self.shares[replica]
        count, rest = divmod(batch, self.rows_at_once)
        if rest or not count:
            raise InputError(f"batch {batch} is not a multiple of {self.round_equation}")
        return count

    def first_row(self, batch: int, replica: int) -> int:
        """Of the batch, where the part of `replica` begins.

        >>> from meshwright.spec.plan import parse_plan
        >>> parse_plan("dp2.mb4.ga3-1").first_row(16, 1), parse_plan("dp2.mb4").first_row(16, 1), parse_plan("dp2.mb4-2").first_row(12, 1)
        (12, 8, 8)
        """
        count = self.micro_batches(batch)
        return sum((self.shares[before] if self.shares else count) * self.size_of(before) for before in range(replica))

    def ranges(self, batch: int, replica: int) -> list[tuple[int, int]]:
        """Of each micro-batch of `replica` its first row and its rows.

        >>> from meshwright.spec.plan import parse_plan
        >>> parse_plan("dp2.mb4-3.ga1-2").ranges(10, 1)
        [(4, 3), (7, 3)]
        """
        first, size = self.first_row(batch, replica), self.size_of(replica)
        return [(first + at * size, size) for at in range(self.micro_batches(batch, replica))]

    @property
    def round_equation(self) -> str:
        """What a batch is a multiple of.

        >>> PlanBatchLayout(dp_replicate=2, micro_batch=4, micro_batch_sizes=(4, 2)).round_equation, PlanBatchLayout(dp_replicate=2, micro_batch=4).round_equation
        ('4+2 = 6', 'dp(2) * micro_batch(4) = 8')
        """
        sizes = "+".join(map(str, self.micro_batch_sizes)) or f"dp({self.dp}) * micro_batch({self.micro_batch})"
        return f"{sizes} = {self.rows_at_once}"

    @property
    def shares_equation(self) -> str:
        """The batch that the shares are of."""
        if self.micro_batch_sizes:
            parts = "+".join(f"{count}*{size}" for count, size in zip(self.shares, self.micro_batch_sizes, strict=True))
        else:
            parts = f"({'+'.join(map(str, self.shares))}) * micro_batch({self.micro_batch})"
        return f"{parts} = {self.rows_shared_out}"


class PlanMemoryPolicy(PlanBatchLayout):
    """Recompute and offload of a plan."""

    recompute: Recompute = Recompute.none
    recompute_layers: int = Field(
        default=0, ge=0, description="the first blocks of each virtual stage that recompute; 0: all of them"
    )
    recompute_rest: Recompute = Field(
        default=Recompute.none, description="of the blocks behind these: none, or operations"
    )
    offload: tuple[Offload, ...] = ()
    offload_share: int = Field(
        default=100, ge=1, le=100, description="of each rank's optimizer states the hundredths that wait elsewhere"
    )
    weights_share: int = Field(
        default=100, ge=1, le=100, description="of each rank's weights the hundredths that wait elsewhere"
    )
    offload_layers: int = Field(
        default=0, ge=0, description="the first blocks of each virtual stage whose activations wait; 0: all of them"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_before(cls, given: Any) -> Any:
        return upgrade_offload_fields(given) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _computes_again(self) -> PlanMemoryPolicy:
        if self.recompute_layers and self.recompute not in PER_BLOCK_RECOMPUTE:
            raise ValueError(
                f"recompute_layers {self.recompute_layers} counts blocks that recompute as a whole or by operation: write recompute layer or operations"
            )
        whole = self.recompute == Recompute.full and self.recompute_layers > 0
        if self.recompute_rest not in ((Recompute.none, Recompute.sac) if whole else (Recompute.none,)):
            raise ValueError(
                f"recompute_rest {self.recompute_rest} is of the blocks behind the first ones that recompute as a whole: write rc-full8+sac"
            )
        return self

    @model_validator(mode="after")
    def _waits(self) -> PlanMemoryPolicy:
        if list(self.offload) != sorted(set(self.offload), key=list(Offload).index):
            raise ValueError(
                f"offload {[str(what) for what in self.offload]} names each of {', '.join(Offload)} at most once, in this order"
            )
        for what, places in EXCLUSIVE_OFFLOADS.items():
            if set(places) <= set(self.offload):
                raise ValueError(f"offload names {what} twice: on the host, or in files")
        away = [what for what in self.offload if what in PARAMETER_OFFLOADS]
        if away and self.zero < 3:
            raise ValueError(
                f"off-{away[0]}: weights that wait elsewhere come up layer by layer as those of z3 do: write z3 (one rank too: dp1.z3)"
            )
        if Offload.gradients in self.offload and (self.zero < 2 or not offloads_states(self.offload)):
            raise ValueError(
                "off-gradients: their sums wait where the update is, each rank's own: write z2 or z3 and off-optimizer beside it (dp1.z2.off-optimizer.off-gradients)"
            )
        sent = next((what for what in self.offload if what in ACTIVATION_OFFLOADS), None)
        if self.offload_layers and sent is None:
            raise ValueError(
                f"offload_layers {self.offload_layers} counts blocks whose activations wait: write off-activations{self.offload_layers}"
            )
        if self.offload_layers and self.recompute_layers not in (0, self.offload_layers):
            raise ValueError(
                f"off-{sent}{self.offload_layers}: of a stage the same first blocks recompute and send activations away, "
                f"not {self.recompute_layers} and {self.offload_layers}; recompute all alike, or as many"
            )
        return self

    @model_validator(mode="after")
    def _waits_in_part(self) -> PlanMemoryPolicy:
        if self.offload_share < 100 and not offloads_states(self.offload):
            raise ValueError(
                f"offload_share {self.offload_share} is of the optimizer's states: write off-optimizer{self.offload_share}, or with -disk"
            )
        if self.weights_share < 100 and not offloads_weights(self.offload):
            raise ValueError(
                f"weights_share {self.weights_share} is of the weights: write off-parameters{self.weights_share}, or with -disk"
            )
        return self

    def share_of(self, what: Offload) -> int:
        """Hundredths of it that wait.

        >>> from meshwright.spec.plan import parse_plan
        >>> plan = parse_plan("dp2.z3.off-optimizer60.off-parameters-disk50.off-activations8")
        >>> [plan.share_of(what) for what in plan.offload]
        [60, 50, 100]
        """
        field = OFFLOAD_AMOUNT_FIELDS.get(what, "")
        return int(getattr(self, field)) if field.endswith("_share") else 100

    def recompute_at(self, place: int) -> Recompute:
        """What the block of this place in its virtual stage computes again."""
        return self.recompute if not self.recompute_layers or place < self.recompute_layers else self.recompute_rest

    def puts_off(self, place: int) -> bool:
        """Whether the gradients of the weights of such a block wait for W where its stage has one: else what was made
        again or fetched would wait too."""
        return self.recompute_at(place) not in PER_BLOCK_RECOMPUTE and not self.sends(place)

    def sends(self, place: int) -> bool:
        """Whether the activations of the block of this place in its virtual stage wait elsewhere."""
        return offloads_activations(self.offload) and (not self.offload_layers or place < self.offload_layers)


def upgrade_offload_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a plan, or pins, as they are written now: `offload_share` was that of the weights where these waited
    alone.

    >>> upgrade_offload_fields({"offload": ["parameters"], "offload_share": 50}), upgrade_offload_fields({"offload": ["optimizer"], "offload_share": 50})
    ({'offload': ['parameters'], 'weights_share': 50}, {'offload': ['optimizer'], 'offload_share': 50})
    """
    listed = given.get("offload", ())
    offload: list[Any] = [what for what in listed if isinstance(what, str)] if isinstance(listed, list | tuple) else []
    alone = offloads_weights(offload) and not offloads_states(offload)
    if not alone or given.get("offload_share", 100) == 100 or given.get("weights_share", 100) != 100:
        return dict(given)
    return {
        **{name: value for name, value in given.items() if name != "offload_share"},
        "weights_share": given["offload_share"],
    }


def micro_batches_by_speed(speeds: Sequence[float], count: int) -> tuple[int, ...]:
    """`count` micro-batches over replicas of these speeds, at least one each. Each goes to whoever would be done with
    it first, which is optimal.

    >>> micro_batches_by_speed([1.0, 2.0], 24), micro_batches_by_speed([1.0, 1.0, 1.0], 8), micro_batches_by_speed([1.0, 100.0], 4)
    ((8, 16), (3, 3, 2), (1, 3))
    """
    held = [1] * len(speeds)
    for _ in range(count - len(speeds)):
        first = min(range(len(speeds)), key=lambda replica: (held[replica] + 1) / speeds[replica])
        held[first] += 1
    return tuple(held)
