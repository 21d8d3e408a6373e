"""The build pass that makes matrix products use float8 if the precision recipe requires it."""

from __future__ import annotations

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.float8 import apply_float8


@build_pass(reads=("model", "recipe", "partition", "context", "shards"), writes=("float8_casts",))
def low_precision_matmul(build: Build) -> None:
    """Makes linear layers in blocks multiply in float8, if the recipe requires it. Runs after tensor parallelism has
    replaced their forwards, and before blocks are compiled."""
    build.float8_casts = apply_float8(
        build.model, build.partition.graph, build.recipe, build.context, build.shards.shapes
    )
