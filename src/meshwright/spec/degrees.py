"""Into how many parts a plan divides a job: the degree of each axis and the ZeRO stage, and the numbers of ranks that follow from them."""

from __future__ import annotations

import math

from pydantic import Field

from meshwright.base.codec import Noun


class Degrees(Noun):
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

        >>> Degrees(dp_replicate=2, dp_shard=2, cp=2, zero=1).copies, Degrees(dp_replicate=2, cp=2).copies
        (2, 4)
        """
        return self.dp * self.cp // self.shards

    @property
    def expert_tensor(self) -> int:
        """Tensor ranks that share one expert. Expert ranks are taken from dp_shard x cp; tensor ranks that must join hold whole experts.

        >>> Degrees(tp=2, ep=4, dp_shard=8, zero=1).expert_tensor, Degrees(tp=8, ep=8).expert_tensor
        (2, 1)
        """
        return self.tp // (self.ep // math.gcd(self.ep, self.dp_shard * self.cp)) if self.ep > 1 else self.tp
