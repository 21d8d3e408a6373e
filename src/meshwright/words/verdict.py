"""Whether a plan fits, in words with the margin. Three verdicts: it fits; it is tight, because an allocator that fragments badly may take
more; it does not fit."""

from __future__ import annotations

from meshwright.spec.estimate import Estimate, Memory
from meshwright.words.say import Sentence, name, tell

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def verdict(estimate: Estimate) -> Sentence:
    """The verdict with its margin in bytes and as a share of what a rank can take."""
    over = abs(estimate.spare)
    return tell(f"verdict.{estimate.verdict}", spare=over, share=over / estimate.limit if estimate.limit else 0.0)


def largest_kind(memory: Memory) -> tuple[Sentence, float]:
    """The kind of memory that takes most, and its bytes."""
    kind = max(KINDS, key=lambda kind: getattr(memory, kind))
    return name("memory", kind), getattr(memory, kind)
