"""The build pass that installs the chunked vocabulary head and the load-balancing loss of experts."""

from __future__ import annotations

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.expert_parallel.load_balancing import make_aux_loss
from meshwright.runtime.loss import install_chunked_head


@build_pass(reads=("model", "hints", "partition", "context", "sequence", "local"), writes=("chunked_head", "aux_loss"))
def install_loss(build: Build) -> None:
    """Replaces the forward of the head, if the plan computes the loss in chunks. Adds hooks to routers, if the model's
    own loss contains a load-balancing term and the user passed no loss function. Runs after the modules of other stages
    are dropped, and before parameters are flattened and blocks are compiled."""
    model, context, graph = build.model, build.context, build.partition.graph
    loss = build.hints.get("loss")
    cut_labels = None if build.sequence is None else build.sequence.cut_labels
    vocabulary_group = context.tp if graph.shards_vocabulary(graph.head) else None
    build.chunked_head = install_chunked_head(model, graph, context.plan, vocabulary_group, loss is not None)
    build.aux_loss = make_aux_loss(model, loss, context, cut_labels)
