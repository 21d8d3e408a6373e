"""Replicas that go their own ways for some steps and meet then: for sites so far apart that gradients cannot cross in every step.

Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models (arXiv 2311.08105): inner AdamW, outer SGD with
Nesterov momentum over what the replicas moved on average; its settings (lr 0.7, momentum 0.9) are the defaults.
"""

from __future__ import annotations

from pydantic import Field

from meshwright.base.codec import Noun


class Local(Noun):
    """Each of `replicas` reads its own part of every batch and updates by itself; after every `steps` they agree on new weights."""

    replicas: int = Field(ge=2)
    steps: int = Field(default=50, ge=1)
    lr: float = Field(default=0.7, gt=0, description="of the outer optimizer: 1 without momentum is the mean of the replicas")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of the outer optimizer, Nesterov's")
