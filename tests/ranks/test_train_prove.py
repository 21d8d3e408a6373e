"""`meshwright train --prove` as a person runs it: what is said, what is recorded, and what a run that goes on does not
repeat."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from equality import ROWS, SEQUENCE, make_batch, make_optimizer
from pool import RankFailure
from test_proof import trainer_of
from test_train_run import furnished, losses, train
from torch import nn

from meshwright.runtime.backend import CpuBackend
from meshwright.runtime.batch_loss import comparison_rows
from meshwright.runtime.loss import Batch
from meshwright.spec.record import CHEAP_PROOF_SECONDS, ProofCost, ProofMode, ProofResult
from meshwright.train.proof.reference_run import ReferenceRun
from meshwright.train.trainer import parallelize

OWN = """
import torch
from torch import nn


class Mine(nn.Module):
    shift_labels = True

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(258, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.head = nn.Linear(32, 258)

    def forward(self, input_ids, labels=None):
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)
"""
JOB = """
model: {model}
workload: {{sequence: 32, batch: 8, steps: 4, precision: fp32, optimizer: {{lr: 3.0e-3}}}}
data: {{source: text.txt, tokenizer: bytes}}
cluster: {{name: "local:2"}}
plan: {{name: {plan}}}
run: {{checkpoint_every: 2{run}}}
"""
PROVEN = "proven equal to one device before step 1"


def proofs_of(place: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "runs" / run / "proofs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A folder with a module of one's own."""
    place = furnished(
        tmp_path_factory.mktemp("own"), text, JOB.format(model='{module: "mine:Mine"}', plan="dp2.z3.mb1", run="")
    )
    (place / "mine.py").write_text(OWN)
    return place


@pytest.mark.soak
def test_a_module_of_ones_own_is_proven_once_and_a_run_that_goes_on_repeats_no_proof(own: Path) -> None:
    code, _, said = train(own, "first", "--prove")
    assert code == 0, said
    assert said.count(PROVEN) == 1 and "predicted)" in said, said
    first = proofs_of(own, "first")
    assert [proof["step"] for proof in first] in (
        [0, 1],
        [0],
    )  # the second where the first was cheap, and nobody is told
    assert all(proof["equal"] and proof["parameters"] == 19 and proof["loss"] < 1e-6 for proof in first)
    assert first[-1]["sizes"] == {"input_ids 2, labels 2": [[16, 32], [16, 32]]}
    code, _, said = train(own, "first", "--prove", "--steps", "8")
    assert code == 0, said
    assert "proven equal" not in said and sorted(losses(own, "first")) == list(range(9)), said
    assert proofs_of(own, "first") == first


@pytest.mark.soak
def test_a_run_may_be_proven_every_so_many_steps(own: Path) -> None:
    (own / "job.yaml").write_text(JOB.format(model='{module: "mine:Mine"}', plan="dp2.z1.mb1", run=", prove: 2"))
    code, _, said = train(own, "every", "--steps", "6")
    assert code == 0, said
    assert said.count(PROVEN) == 1
    assert {proof["step"] for proof in proofs_of(own, "every")} - {1} == {
        0,
        2,
        4,
    }  # before the second step too where that is cheap


@pytest.mark.soak
def test_a_hugging_face_folder_is_proven(tmp_path: Path, text: Path) -> None:
    place = furnished(tmp_path, text, JOB.format(model="{path: model}", plan="tp2.mb1", run=""))
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=512,
        num_key_value_heads=2, max_position_embeddings=64
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(place / "model")
    code, _, said = train(place, "first", "--prove")
    assert code == 0, said
    assert said.count(PROVEN) == 1, said
    assert {(proof["equal"], proof["parameters"]) for proof in proofs_of(place, "first")} == {(True, 21)}


FORWARD = ReferenceRun.forward


def dear(seconds: float) -> tuple[list[str], bool]:
    """What is said where a proof was priced so, and whether one ran."""
    trainer, lines = trainer_of("llama", "dp2", prove="auto"), list[str]()
    trainer.prover.say, trainer.prover.predicted = lines.append, ProofCost(seconds=seconds, step=0.5)
    for step in range(3):
        trainer.step(make_batch("llama", step))
    return lines, trainer.prover.proven


def test_auto_says_in_a_line_that_a_proof_is_too_dear_and_trains(ranks: Any) -> None:
    for lines, is_proven in ranks.run(2, dear, 90.0):
        assert not is_proven and len(lines) == 1, lines
        assert lines[0].startswith(
            "the plan is not proven on these ranks: a proof would take about 1 min 30 s, more than 1% of the first "
            "1,000 steps"
        )
    for lines, is_proven in ranks.run(2, dear, 4.0):
        assert is_proven and lines[0].startswith(PROVEN)


def after_resume(steps: int) -> list[str]:
    """What is said in a process that resumes a run after `steps` steps, under a plan that no proof has compared."""
    trainer, lines = trainer_of("llama", "dp2", prove="start"), list[str]()
    trainer.prover.say, trainer.steps = lines.append, steps
    for step in range(3):
        trainer.step(make_batch("llama", step))
    return lines


def test_a_proof_after_a_resume_names_the_step_of_the_run(ranks: Any) -> None:
    for lines in ranks.run(2, after_resume, 95):
        assert [line.split(": ")[0] for line in lines] == ["proven equal to one device before step 96"]


def with_memory_for(tokens: int, mode: ProofMode) -> tuple[list[str], ProofResult | None]:
    """What is said and proven if the reference has memory for rows of `tokens` tokens."""

    def forward(run: ReferenceRun, batch: Batch, scale: float) -> tuple[float, int]:
        if batch["input_ids"].shape[1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB")
        return FORWARD(run, batch, scale)

    trainer, lines = trainer_of("llama", "dp2.z1", prove=mode), list[str]()
    trainer.prover.say = lines.append
    with mock.patch.object(ReferenceRun, "forward", forward):
        for step in range(2):
            trainer.step(make_batch("llama", step))
    return lines, trainer.prover.last


def test_a_proof_reads_fewer_tokens_if_rank_0_has_too_little_memory(ranks: Any) -> None:
    for lines, proof in ranks.run(2, with_memory_for, SEQUENCE // 2, "start"):
        assert proof.equal and proof.contents[0].endswith(f"the first {SEQUENCE // 2} tokens of each"), proof
        assert lines[0].startswith(PROVEN), lines


def after_proof(tokens: int) -> list[bool]:
    """Whether the engine and its model are in memory after a trainer that was proven is dropped."""

    def forward(run: ReferenceRun, batch: Batch, scale: float) -> tuple[float, int]:
        found = FORWARD(run, batch, scale)
        if batch["input_ids"].shape[1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    def seen() -> list[weakref.ref[Any]]:
        trainer = trainer_of("llama", "dp1.mb1", prove="start")
        assert trainer.prove(make_batch("llama", 0)).equal
        trainer.close()
        return [weakref.ref(trainer.engine), weakref.ref(trainer.engine.model)]

    with mock.patch.object(ReferenceRun, "forward", forward):
        left = seen()
    gc.collect()
    return [each() is not None for each in left]


def test_a_proof_leaves_nothing_of_a_dropped_trainer_in_memory(ranks: Any) -> None:
    assert ranks.run(1, after_proof, SEQUENCE) == [[False, False]]
    assert ranks.run(1, after_proof, SEQUENCE // 2) == [[False, False]]


class Features(nn.Module):
    """A model of rows of 64 features, which are no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x).relu())
        return found


def priced(is_sequence: bool, seconds: float) -> tuple[list[str], ProofResult | None]:
    """What is said and proven in a loop of one's own, where a proof of whole rows takes `seconds` by estimate."""
    if is_sequence:
        trainer, batch = trainer_of("llama", "dp2.z1", prove="auto"), make_batch("llama", 0)
    else:
        torch.manual_seed(0)
        batch = {"x": torch.randn(ROWS, 64)}
        trainer = parallelize(
            Features(), make_optimizer, "dp2.z1", loss=lambda y, _: y.square().mean(), example=batch, prove="auto"
        )
    lines = list[str]()
    trainer.prover.say = lines.append
    elements = sum(shape.numel() for shape in trainer.engine.shapes.values())
    rows = min(ROWS, comparison_rows(trainer.plan, trainer.engine.batch_loss))
    work = 2 * 8 * elements * rows * next(iter(batch.values())).shape[1]
    with mock.patch.multiple(CpuBackend, nominal_fp32_flops=work / seconds, nominal_flops=1e15):
        trainer.step(batch)
    return lines, trainer.prover.last


def test_a_proof_that_takes_too_long_reads_fewer_tokens_but_whole_rows_of_features(ranks: Any) -> None:
    for lines, proof in ranks.run(2, priced, True, 1.5 * CHEAP_PROOF_SECONDS):
        assert proof.contents[0].endswith(f"the first {SEQUENCE // 2} tokens of each"), lines
    for lines, proof in ranks.run(2, priced, False, 1.5 * CHEAP_PROOF_SECONDS):
        assert proof is None and lines[0].startswith("the plan is not proven on these ranks"), lines


def test_auto_says_that_a_proof_does_not_fit_and_trains_and_start_refuses(ranks: Any) -> None:
    said = "plan dp2.z1: rank 0 has too little memory to compute 8 tokens of each row"
    for lines, proof in ranks.run(2, with_memory_for, 0, "auto"):
        assert proof is None and len(lines) == 1 and lines[0].startswith(f"the plan is not proven: {said}"), lines
    with pytest.raises(RankFailure, match=said):
        ranks.run(2, with_memory_for, 0, "start")
