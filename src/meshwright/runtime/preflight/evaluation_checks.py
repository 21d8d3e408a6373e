"""Checks the evaluation mode of a model before the first evaluation. The checks of training do not cover it, because a
forward may run other code in evaluation mode.

- Sequence. Under sequence or context parallelism, the analysis of the plan is repeated in evaluation mode, on a copy of
  the model from before sharding (`EvaluationAnalysis`).
- Rows. If the plan divides a batch, one pass of some rows must have the same summed loss as two passes of half the rows
  each (batch_separability.py).

A model that fails a check can be trained under the plan, but not evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.model_copy import copy_to_meta
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.context_parallel.verify import CannotCutSequence, verify_sequence_cut
from meshwright.spec.plan import Plan


@dataclass
class EvaluationAnalysis:
    """The analysis of a model for evaluation under `plan`. `model`: a copy from before sharding."""

    plan: Plan
    model: nn.Module
    graph: ModelGraph
    example: ExampleInputs

    def objection(self) -> str:
        """Returns why the model cannot be evaluated on slices of the sequence, or ''."""
        try:
            if self.plan.sequence_parallel:
                found = analyze_model(self.model, use_random_weights=True, example=self.example, evaluates=True)
                if found.against_sequence:
                    return found.against_sequence
            if self.plan.cp > 1:
                verify_sequence_cut(self.model, self.graph, self.example, evaluates=True)
        except (InputError, CannotCutSequence) as error:
            return str(error)
        return ""


def evaluation_analysis(
    plan: Plan, model: nn.Module, graph: ModelGraph, example: ExampleInputs
) -> EvaluationAnalysis | str:
    """Returns the analysis that must run before the first evaluation, or its result: why the model cannot be evaluated,
    '' if it can. The analysis of a model that cannot be copied runs here."""
    if not (plan.sequence_parallel or plan.cp > 1):
        return ""
    try:
        return EvaluationAnalysis(plan, copy_to_meta(model).model, graph, example)
    except InputError:
        return EvaluationAnalysis(plan, model, graph, example).objection()


def sequence_refusal(plan: Plan, objection: str) -> str:
    """Returns the line that refuses an evaluation under `plan`, '' if there is no `objection`."""
    return objection and Message(
        "plan {plan}: in evaluation mode the model cannot run on slices of the sequence ({objection}): evaluate "
        "without sp and cp, or let evaluation run the code of training",
        plan=plan.name,
        objection=objection,
    )
