"""The build pass that determines the structure of the model."""

from __future__ import annotations

from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.example_inputs import ExampleInputs, make_example
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.layer_rules.rule import registered_rules
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.deferred_init import check_unchanged_after_recording, deferred_init_of
from meshwright.runtime.tensor_parallel.layers import with_full_logits
from meshwright.spec.plan import Plan

registered_rules()  # imports the rules of layers once, where the fork server imports this module, not in every rank


@build_pass(reads=("model", "base", "hints"), writes=("deferred", "example", "graph"))
def analyze(build: Build) -> None:
    """Analyses the model, and makes example inputs.

    Raises:
        InputError: A parameter was changed after its initialisation was deferred.
    """
    build.deferred = deferred_init_of(build.model)
    check_unchanged_after_recording(build.model, build.deferred)
    build.example = make_example(build.model, build.hints.get("example"))
    graph = _analyze_model(build.model, build.base.plan, build.hints.get("anatomy"), build.example)
    build.graph = graph if build.hints.get("loss") is None else with_full_logits(build.model, graph)


def _analyze_model(model: nn.Module, plan: Plan, known: ModelGraph | None, example: ExampleInputs) -> ModelGraph:
    """Returns the structure of the model for `plan`. `known`: the structure from an earlier analysis, if any.

    Tensor parallelism needs regions whose splits were verified with real values. So if the splits in `known` were not
    verified in this way, the analysis runs again.
    """
    if known is None or (plan.tp > 1 and known.unsupported.get("proof")):
        known = analyze_model(
            model,
            use_random_weights=True,
            example=example,
            splits=plan.tp > 1,
            sequence=plan.sequence_parallel,
            gathers=plan.zero == 3,
        )
    return known.for_tp(plan.tp)
