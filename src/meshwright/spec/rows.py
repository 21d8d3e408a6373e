"""Which rows of a batch each data replica reads: its micro-batches, their number and their size.

Rule: replica r passes n_r micro-batches of m_r sequences, one replica's rows behind the other's, and the sum of n_r m_r is the batch. Both may differ
by replica: numbers (`shares`) where devices are unlike in speed, sizes (`micro_batch_sizes`) where one size would not fit on all or waste some. The
loss is the sum over all labels over their number, so that neither is seen in it. With unlike sizes and equal numbers all replicas meet in every
micro-batch, which ZeRO 2 and 3 need; unlike numbers meet once a step.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from meshwright.base.errors import InputError
from meshwright.spec.degrees import Degrees


class Rows(Degrees):
    """How a batch is laid over the replicas of a plan."""

    micro_batch: int = Field(default=1, ge=1, description="sequences per pass of one replica; of unlike ones the most")
    micro_batch_sizes: tuple[int, ...] = Field(
        default=(), description="sequences per pass of each data replica; empty: micro_batch on every one"
    )
    shares: tuple[int, ...] = Field(default=(), description="micro-batches of each data replica in a step; empty: equally many")

    @model_validator(mode="after")
    def _sized(self) -> Rows:
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
            raise ValueError("micro-batch sizes: experts on unlike replicas would wait for unlike numbers of tokens; use ep1")
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
        """Micro-batches per step of `replica`, or the most that one has. Raises InputError when `batch` does not divide."""
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

        >>> Rows(dp_replicate=2, micro_batch=4, micro_batch_sizes=(4, 2)).round_equation, Rows(dp_replicate=2, micro_batch=4).round_equation
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
