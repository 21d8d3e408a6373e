"""The proof run: a plan that is one device's is proven equal, whatever it is; the trainer is as before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from equality import anatomy_of, made, make_batch, make_optimizer
from pool import unchecked

from meshwright.core.errors import PlanRefused
from meshwright.spec.precision import Recipe
from meshwright.spec.precision import recipe as named_recipe
from meshwright.spec.record import ProofCost, ProofResult
from meshwright.train.proof.proof_run import ReferenceSide
from meshwright.train.proof.proof_tolerance import STRICT_TOLERANCES
from meshwright.train.trainer import Trainer, parallelize


def trainer_of(name: str, plan: str, precision: str = "fp64", recipe: Recipe | None = None, **beside: Any) -> Trainer:
    return parallelize(
        made(name, precision),
        make_optimizer,
        plan,
        precision=recipe or precision,
        clip=1.0,
        anatomy=anatomy_of(name),
        **{"prove": "start", **beside},
    )


def proof_of(name: str, plan: str, precision: str = "fp64", rows: int = 8) -> tuple[ProofResult, bool]:
    """The proof, and whether the loss of a step behind it is that of a step without it."""
    trainer = trainer_of(name, plan, precision)
    proof = trainer.prove(make_batch(name, 0, rows))
    return proof, trainer.prover.proven


def proof_with_sums_in_bfloat16(scale: float) -> tuple[bool, float]:
    """Whether the proof is equal, and its largest difference. `scale` multiplies a gradient under the plan."""
    trainer = trainer_of("llama", "dp2.z3.mb2", "fp32", recipe=named_recipe("fp32", "bf16"))
    block = trainer.engine.model.get_submodule("model.layers.1")
    block.mlp.register_forward_hook(lambda module, args, output: output + (scale - 1) * (output - output.detach()))
    proof = trainer.prove(make_batch("llama", 0, 8))
    return proof.equal, proof.gradient


def test_gradients_summed_in_bfloat16_may_differ_by_their_rounding_only(ranks: Any) -> None:
    for equal, gradient in ranks.run(2, proof_with_sums_in_bfloat16, 1.0):
        assert equal and 1e-4 < gradient < 0.016
    assert not any(equal for equal, _ in ranks.run(2, proof_with_sums_in_bfloat16, 1.05))


PLANS = (
    ("llama", "dp2"), ("llama", "tp2"), ("llama", "tp2.sp"), ("llama", "pp2"), ("llama", "cp2"), ("llama", "dp2.z1"),
    ("llama", "dp2.z2"), ("llama", "dp2.z3"), ("llama-tied", "pp2"), ("llama-tied", "tp2"), ("gpt2", "tp2"),
    ("gpt2", "dp2.z3"), ("bert", "pp2.gpipe"), ("bert", "tp2"), ("convnet", "dp2"), ("hf-llama", "tp2"),
    ("hf-gpt2", "pp2"), ("llama", "dp1.rc-full"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), PLANS)
@pytest.mark.covering(1)
def test_a_plan_is_proven_equal_in_float64(ranks: Any, name: str, plan: str) -> None:
    world = 1 if plan.startswith("dp1") else 2
    results = ranks.run(world, proof_of, name, plan)
    proofs = [proof for proof, _ in results]
    assert all(proof == proofs[0] for proof in proofs)
    assert proofs[0].equal, proofs[0].to_json()
    assert proofs[0].parameters > 5


def measured(plan: str, gradient: float) -> tuple[ProofResult, list[torch.dtype], float]:
    """The proof in float32, where the strict tolerance of a gradient is `gradient`; the dtype of each run of one
    device's side; the expected seconds, of 2 and 3 more if rounding is measured."""
    trainer, kinds = trainer_of("llama", plan, "fp32"), []
    forward = ReferenceSide.forward

    def recorded(self: ReferenceSide, content: Any, options: Any) -> Any:
        kinds.append(options.dtype)
        return forward(self, content, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STRICT_TOLERANCES, torch.float32, (1e-6, gradient))
        patch.setattr(ReferenceSide, "forward", recorded)
        trainer.prover.predicted = ProofCost(seconds=2.0, rounding=3.0)
        return trainer.prove(make_batch("llama", 0)), kinds, trainer.prover.expected_seconds


def test_float32_beyond_the_strict_tolerance_is_compared_with_float64(ranks: Any) -> None:
    low, high = torch.float32, torch.float64
    for proof, kinds, seconds in ranks.run(2, measured, "tp2", 1e-9):
        assert proof.equal and seconds == 5.0, proof.to_json()
        assert kinds == [low, high, low] * 2 and len(proof.contents) == 2
    for proof, kinds, seconds in ranks.run(2, measured, "tp2", 1e-5):
        assert proof.equal and seconds == 2.0 and kinds == [low, low]


def streamed(name: str, plan: str) -> tuple[ProofResult, dict[str, int]]:
    """The proof where every module outside of the blocks counts as large, and how often one device's side requested
    each weight there."""
    from meshwright.runtime.gather_service import GatherService
    from meshwright.train.proof import reference_run

    trainer, asked = trainer_of(name, plan), Counter[str]()
    request = GatherService.weights

    def counted(self: GatherService, names: Sequence[str], kind: torch.dtype) -> dict[str, torch.Tensor]:
        asked.update(names)
        return request(self, names, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_run, "MAX_PENDING_GRADIENT_ELEMENTS", 1)
        patch.setattr(GatherService, "weights", counted)
        return trainer.prove(make_batch(name, 0)), dict(asked)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("llama", "dp2.z3", marks=pytest.mark.soak),
        pytest.param("llama-tied", "tp2", marks=pytest.mark.soak),
        ("gpt2", "pp2"),
        pytest.param("hf-gpt2", "dp2", marks=pytest.mark.soak),
    ],
)
def test_embeddings_and_heads_are_there_only_while_they_run(ranks: Any, name: str, plan: str) -> None:
    proof, asked = ranks.run(2, streamed, name, plan)[0]
    assert proof.equal and not proof.notes, proof.to_json()
    assert len(asked) == proof.parameters and min(asked.values()) >= 2 * len(proof.contents), (
        asked
    )  # forward, and again in backward


def losses_of(plan: str, prove: Any) -> list[float]:
    trainer = trainer_of("llama", plan, "fp32", prove=prove)
    return [trainer.step(make_batch("llama", step)).loss for step in range(3)]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "plan", ["dp2.z1.mb2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("tp2", "pp2", "dp2.z3"))]
)
def test_a_run_with_proofs_has_the_same_bits_as_one_without(ranks: Any, plan: str, every: int) -> None:
    assert ranks.run(2, losses_of, plan, every) == ranks.run(2, unchecked, losses_of, plan, "never")


def refused(plan: str) -> str:
    """What `step` says of a plan whose ranks have other weights in a norm than one device would."""
    trainer = trainer_of("llama", plan)
    spoil(trainer)
    try:
        trainer.step(make_batch("llama", 0))
    except PlanRefused as error:
        return str(error)
    return ""


def spoil(trainer: Trainer) -> None:
    """The first block multiplies what it returns."""
    block = trainer.engine.model.get_submodule("model.layers.1")
    block.mlp.register_forward_hook(lambda module, args, output: output * 1.001)


@pytest.mark.soak
def test_all_ranks_refuse_a_differing_plan_in_one_line_before_the_first_update(ranks: Any) -> None:
    lines = ranks.run(2, refused, "tp2")
    assert lines[0] == lines[1] and "\n" not in lines[0]
    assert lines[0].startswith("plan tp2: the proof run differs from one device: loss by")
    assert "first at model.layers.1.mlp: its output" in lines[0], lines[0]


def required() -> tuple[bool, str, int]:
    trainer = trainer_of("llama", "dp2.mb4", prove=1000)
    for step in range(3):
        trainer.step(make_batch("llama", step))
    before = trainer.prover.last
    trainer.require_proof("a buffer has moved")
    trainer.step(make_batch("llama", 3))
    proof = trainer.prover.last
    return proof is not before, trainer.prover.reason, proof.step if proof is not None else -1


def test_a_proof_can_be_required_before_the_next_update(ranks: Any) -> None:
    assert ranks.run(2, unchecked, required) == [(True, "a buffer has moved", 3)] * 2
