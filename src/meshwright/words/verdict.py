"""Whether a plan fits, in words with the margin. Three verdicts: it fits; it is tight, because an allocator that fragments badly may take
more; it does not fit, on its device or on its host alone."""

from __future__ import annotations

from meshwright.spec.estimate import Estimate, Memory
from meshwright.words.say import Sentence, name, tell

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def verdict(estimate: Estimate) -> Sentence:
    """The verdict with its margin in bytes and as a share of what a rank can take."""
    margin = abs(estimate.spare)
    values = {"spare": margin, "share": margin / estimate.limit if estimate.limit else 0.0}
    if estimate.is_crowded:
        return tell("verdict.crowded", **values, over=estimate.crowded)
    return tell(f"verdict.{estimate.verdict}", **values)


def largest_kind(memory: Memory) -> tuple[Sentence, float]:
    """The kind of memory that takes most, and its bytes."""
    kind = max(KINDS, key=lambda kind: getattr(memory, kind))
    return name("memory", kind), getattr(memory, kind)
