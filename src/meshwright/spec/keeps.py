"""What the ranks of a plan keep between forward and backward, what they make again instead, and what of all that they hold waits elsewhere.

Blocks are told apart by their place in their virtual stage: the first so many do more than those behind them. Where only some blocks recompute and only
some send their activations away, these are the same first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from meshwright.spec.choices import ACTIVATIONS, COUNTED, IN_BLOCKS, PARAMETERS, TWICE, Offload, Recompute, sends, states_wait, weights_wait
from meshwright.spec.rows import Rows


class Keeps(Rows):
    """Recompute and offload of a plan."""

    recompute: Recompute = Recompute.none
    recompute_layers: int = Field(default=0, ge=0, description="the first blocks of each virtual stage that recompute; 0: all of them")
    recompute_rest: Recompute = Field(default=Recompute.none, description="of the blocks behind these: none, or operations")
    offload: tuple[Offload, ...] = ()
    offload_share: int = Field(default=100, ge=1, le=100, description="of each rank's optimizer states the hundredths that wait elsewhere")
    weights_share: int = Field(default=100, ge=1, le=100, description="of each rank's weights the hundredths that wait elsewhere")
    offload_layers: int = Field(
        default=0, ge=0, description="the first blocks of each virtual stage whose activations wait; 0: all of them"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_before(cls, given: Any) -> Any:
        return with_shares(given) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _computes_again(self) -> Keeps:
        if self.recompute_layers and self.recompute not in IN_BLOCKS:
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
    def _waits(self) -> Keeps:
        if list(self.offload) != sorted(set(self.offload), key=list(Offload).index):
            raise ValueError(
                f"offload {[str(what) for what in self.offload]} names each of {', '.join(Offload)} at most once, in this order"
            )
        for what, places in TWICE.items():
            if set(places) <= set(self.offload):
                raise ValueError(f"offload names {what} twice: on the host, or in files")
        away = [what for what in self.offload if what in PARAMETERS]
        if away and self.zero < 3:
            raise ValueError(
                f"off-{away[0]}: weights that wait elsewhere come up layer by layer as those of z3 do: write z3 (one rank too: dp1.z3)"
            )
        if Offload.gradients in self.offload and (self.zero < 2 or not states_wait(self.offload)):
            raise ValueError(
                "off-gradients: their sums wait where the update is, each rank's own: write z2 or z3 and off-optimizer beside it (dp1.z2.off-optimizer.off-gradients)"
            )
        sent = next((what for what in self.offload if what in ACTIVATIONS), None)
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
    def _waits_in_part(self) -> Keeps:
        if self.offload_share < 100 and not states_wait(self.offload):
            raise ValueError(
                f"offload_share {self.offload_share} is of the optimizer's states: write off-optimizer{self.offload_share}, or with -disk"
            )
        if self.weights_share < 100 and not weights_wait(self.offload):
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
        field = COUNTED.get(what, "")
        return int(getattr(self, field)) if field.endswith("_share") else 100

    def recompute_at(self, place: int) -> Recompute:
        """What the block of this place in its virtual stage computes again."""
        return self.recompute if not self.recompute_layers or place < self.recompute_layers else self.recompute_rest

    def puts_off(self, place: int) -> bool:
        """Whether the gradients of the weights of such a block wait for W where its stage has one: else what was made again or fetched would wait too."""
        return self.recompute_at(place) not in IN_BLOCKS and not self.sends(place)

    def sends(self, place: int) -> bool:
        """Whether the activations of the block of this place in its virtual stage wait elsewhere."""
        return sends(self.offload) and (not self.offload_layers or place < self.offload_layers)


def with_shares(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a plan, or pins, as they are written now: `offload_share` was that of the weights where these waited alone.

    >>> with_shares({"offload": ["parameters"], "offload_share": 50}), with_shares({"offload": ["optimizer"], "offload_share": 50})
    ({'offload': ['parameters'], 'weights_share': 50}, {'offload': ['optimizer'], 'offload_share': 50})
    """
    listed = given.get("offload", ())
    offload: list[Any] = [what for what in listed if isinstance(what, str)] if isinstance(listed, list | tuple) else []
    alone = weights_wait(offload) and not states_wait(offload)
    if not alone or given.get("offload_share", 100) == 100 or given.get("weights_share", 100) != 100:
        return dict(given)
    return {**{name: value for name, value in given.items() if name != "offload_share"}, "weights_share": given["offload_share"]}
