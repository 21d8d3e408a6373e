"""The build pass that creates the communication groups that depend on the model, and the final parallel context."""

from __future__ import annotations

from dataclasses import replace

from meshwright.runtime.build.passes.prepare_model import without_kv_cache
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.topology import GroupFactory
from meshwright.runtime.context_parallel.attention import make_context_state
from meshwright.runtime.expert_parallel.groups import make_ep_groups
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.preflight.evaluation_checks import evaluation_analysis


@build_pass(
    reads=("model", "base", "example", "partition"),
    writes=("context", "experts", "sequence", "evaluation", "tied_groups"),
)
def create_groups(build: Build) -> None:
    """Creates the groups of expert ranks, of context ranks, and of stages that share parameters. All ranks run it.

    Raises:
        InputError: The model cannot compute on a slice of the sequence.
    """
    base, graph = build.base, build.partition.graph
    factory = GroupFactory(base.topology, base.device, base.groups)
    build.experts = make_ep_groups(base, factory, graph)
    with without_kv_cache(build.model):
        build.sequence = make_context_state(build.model, graph, base, factory, build.example)
        build.evaluation = evaluation_analysis(base.plan, build.model, graph, build.example)
    build.tied_groups = _tied_groups(base, factory, build.partition.shared_stages)
    build.context = replace(base, groups=factory.groups)


def _tied_groups(
    base: ParallelContext, factory: GroupFactory, shared_stages: set[tuple[int, ...]]
) -> dict[tuple[int, ...], CommGroup | None]:
    """Returns for each set of stages in `shared_stages` the group that sums the gradients of their shared parameters.

    For the set of the first and the last stage, the group consists of the ranks of these two stages, and is None on
    ranks of other stages. For any other set, the group consists of all pipeline ranks. If one rank runs all stages of
    the set, the group is None.
    """
    plan = base.plan
    first_and_last = (0, plan.stages - 1)
    ends = factory.embedding() if first_and_last in shared_stages else None
    groups: dict[tuple[int, ...], CommGroup | None] = {}
    for stages in shared_stages:
        is_one_rank = len({plan.stage_to_rank(stage) for stage in stages}) == 1
        groups[stages] = None if is_one_rank else ends if stages == first_and_last else base.group("pp")
    return groups
