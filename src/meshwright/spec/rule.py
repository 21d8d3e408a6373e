"""What a person says of a model whose layers were not understood: which of a block's layers tensor ranks share."""

from __future__ import annotations

from pydantic import Field

from meshwright.base.codec import Noun


class Rule(Noun):
    """Paths inside a block: what `columns` give is cut, what `rows` read of it is cut likewise, and their outputs are summed."""

    columns: tuple[str, ...] = Field(min_length=1, description="linear layers cut by their outputs")
    rows: tuple[str, ...] = Field(min_length=1, description="linear layers behind them, cut by their inputs; their outputs are summed")
