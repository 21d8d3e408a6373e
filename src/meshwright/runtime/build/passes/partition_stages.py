"""The build pass that assigns the layers of the model to pipeline stages."""

from __future__ import annotations

from meshwright.runtime.build.passes.prepare_model import without_kv_cache
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.stages.partition import partition_model


@build_pass(reads=("model", "base", "hints", "example", "graph"), writes=("partition",))
def partition_stages(build: Build) -> None:
    """Assigns the layers to stages. Runs the data-flow analysis if the plan needs it.

    Raises:
        InputError: The model cannot be divided into the stages of the plan.
    """
    own_loss = build.hints.get("loss") is not None
    with without_kv_cache(build.model):
        build.partition = partition_model(build.model, build.graph, build.base.plan, build.example, own_loss)
