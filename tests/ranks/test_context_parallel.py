"""A sequence held in pieces gives the loss and the gradients of one device: by a ring, by exchanged heads, with masks,
beside every other axis."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import equality
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from world_group import between_hosts

from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.models.registry import build_reference_model
from meshwright.spec.plan import parse_plan
from meshwright.train.proof.reference_run import use_float64
from meshwright.train.trainer import parallelize

SAMPLE = [
    ("llama", "cp2.mb4"), ("llama", "dp2.cp2.z1"), ("llama", "dp2.cp2.z2.mb2"), ("llama", "dp2x1.cp2.z3.rc-full"),
    ("llama", "tp2.sp.cp2.ulysses.mb2"), ("llama-tied", "pp2.cp2.z3"), ("gpt2", "tp2.cp2.rc-attn.mb2"),
    ("bert", "cp4.z3"), ("hf-gpt2", "tp2.cp2.mb2"), ("llama", "cp4.ulysses2.z2"),
]  # fmt: skip
"""Each way to attend, each ZeRO stage, each other axis, each kind of model."""

WIDE = [
    ("llama", "cp4"), ("llama", "dp2.cp2.ulysses"), ("gpt2", "cp4.z1.ulysses"), ("bert", "cp2.z3"),
    ("hf-llama", "pp2.cp2.interleaved2"), ("llama", "cp2.rc-full"), ("llama", "cp2.ulysses"), ("llama", "dp2.cp2"),
    ("llama", "dp2.cp2.z3"), ("llama", "dp2x1.cp2.z2"), ("llama", "dp2x2.cp2.z1.mb2"), ("llama", "cp4.ulysses"),
    ("llama", "cp4.z3"), ("llama", "cp8.z1"), ("llama", "tp2.cp2.mb2"), ("llama", "tp2.sp.cp2.z3"),
    ("llama", "pp2.cp2"), ("llama", "pp2.cp2.gpipe.ulysses"), ("llama", "dp2.pp2.cp2.z2"),
    ("llama", "tp2.sp.pp2.cp2.mb2"), ("llama", "dp2.tp2.cp2.z3.rc-full"), ("llama", "cp2.rc-attn.ulysses"),
    ("gpt2", "cp2"), ("gpt2", "pp2.cp2.zbh1"), ("gpt2", "tp2.sp.pp2.cp2.mb2"), ("gpt2", "dp2.cp2.z3.ulysses"),
    ("bert", "cp2"), ("bert", "cp4.ulysses"), ("bert", "dp2.cp2.z2.ulysses"), ("bert", "tp2.sp.cp2.z1"),
    ("llama-tied", "tp2.pp2.cp2"), ("hf-llama", "cp2.z3.rc-full"), ("hf-llama", "cp4.ulysses"), ("hf-gpt2", "cp2"),
    ("hf-gpt2", "tp2.cp2.ulysses.mb4"), ("hf-gpt2", "pp2.cp2.z3"), ("llama", "cp8.ulysses2.z3"),
    ("llama", "cp8.ulysses4"), ("gpt2", "pp2.cp4.ulysses2.z1"), ("llama-tied", "tp2.sp.cp4.ulysses2"),
    ("bert", "dp2.cp4.ulysses2.z2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "plan"), [SAMPLE[0], *(pytest.param(*pair, marks=pytest.mark.soak) for pair in (*SAMPLE[1:], *WIDE))]
)
def test_pieces_of_a_sequence_compute_what_one_device_computes_in_float64(ranks: Any, model: str, plan: str) -> None:
    equality.check(
        equality.alone(model, "fp64", 2),
        ranks.run(parse_plan(plan).world, equality.train, model, plan, "fp64", 2),
        "fp64",
    )


@pytest.mark.soak
@pytest.mark.parametrize(("model", "plan"), [SAMPLE[0], *WIDE])
def test_pieces_of_a_sequence_compute_what_one_device_computes_in_float32(ranks: Any, model: str, plan: str) -> None:
    equality.check(
        equality.alone(model, "fp32", 2),
        ranks.run(parse_plan(plan).world, equality.train, model, plan, "fp32", 2),
        "fp32",
    )


def sent(plan: str, model: str = "llama") -> dict[str, float]:
    """On every rank: what the record of a step says, of ranks that share no memory."""
    with between_hosts():
        trainer = parallelize(
            equality.make_model(model),
            equality.make_optimizer,
            plan,
            precision="fp64",
            anatomy=equality.anatomy_of(model),
        )
        return trainer.step(equality.make_batch("llama", 0)).sent


HIDDEN = equality.ROWS * equality.SEQUENCE * equality.SIZES["hidden"] * 8
"""Bytes of the batch between two blocks."""


def test_records_count_what_rings_send_over_the_network(ranks: Any) -> None:
    """Each layer passes keys and values of half a sequence: once forward, once backward, and two gradients of them."""
    for found in ranks.run(2, sent, "cp2"):
        assert found["context"] == equality.SIZES["layers"] * 4 * 2 * HIDDEN / 2


def test_records_count_what_pipelines_send_over_the_network(ranks: Any) -> None:
    for found in ranks.run(2, sent, "pp2.zbh1"):
        assert found["pipeline"] == HIDDEN


@pytest.mark.soak
def test_records_count_the_gradients_of_a_tied_table_that_both_ends_sum(ranks: Any) -> None:
    for found in ranks.run(2, sent, "pp2", "llama-tied"):
        assert found["data"] >= equality.VOCABULARY * equality.SIZES["hidden"] * 8


# --- models and batches of this file
# ------------------------------------------------------------------------------------------------

ROWS, VOCABULARY = 4, 96
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCABULARY, "seq": 48}


class Small(nn.Module):
    """A decoder of one's own; `way` says how it attends and where it counts positions."""

    shift_labels = True

    def __init__(self, way: str, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(48, width)
        self.blocks = nn.ModuleList(Part(way, width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Part(nn.Module):
    def __init__(self, way: str, width: int) -> None:
        super().__init__()
        self.way = way
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.shift = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(48, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, way = x.shape[1], self.way
        if way == "mixes":  # the token before, times what is zero at first
            x = x + F.pad(x[:, :-1], (0, 0, 1, 0)) * self.shift
        if way == "counts":
            x = x + torch.arange(length).view(1, -1, 1) / 48
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if way == "plain":
            scores = (q @ k.transpose(-1, -2)).masked_fill(
                torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
            )
            y = scores.softmax(-1) @ v
        elif way == "learnt":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:length, :length])
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=0.1 if way == "drops" and self.training else 0.0
            )
        return x + self.out(y.transpose(1, 2).flatten(2))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in ("grouped", "packed"):
        return build_reference_model({**SIZES, "kind": "llama"})
    if name == "packed-gpt2":
        return build_reference_model({**SIZES, "kind": "gpt2", "ffn": 64})
    if name.startswith("hf-"):
        from model_families import build_family

        return build_family(name.removeprefix("hf-").partition("+")[0])
    return Small(name)


def made(name: str) -> nn.Module:
    """In float64 throughout, also where a model of transformers asks for float32."""
    return use_float64(make(name).double()) if name.startswith("hf-") else make(name).double()


def anatomy_of(name: str) -> ModelGraph:
    return equality.read_once(f"{name} of context ranks", functools.partial(make, name))


def batch_of(name: str, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (ROWS, length), generator=generator)
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : row * 3] = -100
    batch = {"input_ids": ids, "labels": labels}
    if name.startswith("packed") or name.endswith("+packed"):
        starts = torch.tensor([[0, 5, 6], [0, 9, 11], [0, 1, 13], [0, 0, 0]])
        places = torch.arange(length).expand(ROWS, -1)
        batch["position_ids"] = places - torch.stack(
            [(places >= starts[:, n : n + 1]) * starts[:, n : n + 1] for n in range(3)]
        ).amax(0)
    if name.endswith("+padded"):
        batch["attention_mask"] = torch.ones(ROWS, length, dtype=torch.long)
        for row in range(ROWS):
            batch["attention_mask"][row, length - 2 * row :] = 0
            labels[row, length - 2 * row - 1 :] = -100
    return batch


def first_gradients(name: str, plan: str, length: int, shared: bool = True) -> Any:
    """On every rank: the loss and, on rank 0, the gradients of one batch; or why the plan is refused."""
    try:
        with between_hosts(not shared):
            known = anatomy_of(name) if name == "grouped" else None
            trainer = parallelize(made(name), equality.make_optimizer, plan, precision="fp64", anatomy=known)
            loss, _, gradients = trainer.gradients(batch_of(name, length))
            trainer.close()
    except InputError as error:
        return str(error)
    return loss, gradients


def one_device(name: str, length: int) -> tuple[float, dict[str, torch.Tensor]]:
    model, batch = made(name), batch_of(name, length)
    labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    logits = model(**batch)
    loss = F.cross_entropy(getattr(logits, "logits", logits).flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    return loss.item(), {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


def compare(ranks: Any, name: str, plan: str, length: int, shared: bool = True) -> None:
    results = ranks.run(parse_plan(plan).world, first_gradients, name, plan, length, shared)
    assert not isinstance(results[0], str), results[0]
    loss, expected = one_device(name, length)
    for found, _ in results:
        assert abs(found / loss - 1) < 1e-10
    for key, gradient in expected.items():
        if float(gradient.norm()) > 1e-12:
            assert equality.difference(results[0][1][key], gradient) < 1e-10, key


# --- what only context ranks do
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "length"),
    [
        ("cp3.z1", 12),
        pytest.param("cp4.ulysses", 16, marks=pytest.mark.soak),
        pytest.param("cp4.ulysses2", 16, marks=pytest.mark.soak),
        pytest.param("cp6.ulysses2", 24, marks=pytest.mark.soak),
    ],
)
def test_three_ranks_and_key_value_heads_fewer_than_ranks_are_exact(ranks: Any, plan: str, length: int) -> None:
    compare(ranks, "grouped", plan, length)


@pytest.mark.parametrize(
    "plan", ["cp4.ulysses2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("cp3", "cp2.ulysses"))]
)
def test_messages_go_round_where_ranks_share_no_memory(ranks: Any, plan: str) -> None:
    compare(ranks, "grouped", plan, 24, shared=False)


SEEN = [
    ("packed-gpt2", "cp2.ulysses"), ("hf-llama+packed", "cp2.z3"), ("hf-mistral", "cp2"), ("hf-llama+padded", "cp2"),
    ("packed", "cp4.ulysses2"), ("hf-llama+packed", "cp4.ulysses2.rc-attn"), ("hf-mistral", "tp2.cp4.ulysses2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("packed", "cp2"),
        ("hf-gemma3+padded", "tp2.cp2.ulysses"),
        *(pytest.param(*pair, marks=pytest.mark.soak) for pair in SEEN),
    ],
)
def test_windows_documents_and_padding_are_seen_across_pieces(ranks: Any, name: str, plan: str) -> None:
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    compare(ranks, name, plan, 16)


@pytest.mark.parametrize(
    ("name", "plan", "length", "said"),
    [
        ("plain", "cp2", 16, "do not call torch's scaled_dot_product_attention"),
        ("mixes", "cp2", 16, "the queries of attention 0 differ"),
        ("counts", "cp2", 16, "the queries of attention 0 differ"),
        ("learnt", "cp2", 16, "cannot split the sequence of Small: attention with a learnt bias"),
        ("drops", "cp2", 16, "does not support dropout inside attention (0.1)"),
        ("grouped", "cp2", 18, "2 * cp(2) = 4 does not divide sequence(18): pad to 20"),
        ("grouped", "cp3.ulysses", 24, "cp(3) does not divide the 4 heads"),
        pytest.param("hf-bloom", "cp2", 16, "do not call torch's scaled_dot_product_attention", marks=pytest.mark.soak),
        ("hf-gemma2", "cp2", 16, "soft-capped"),
    ],
)
def test_what_would_be_wrong_on_a_piece_is_refused_in_one_line_by_every_rank(
    ranks: Any, name: str, plan: str, length: int, said: str
) -> None:
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    results = ranks.run(parse_plan(plan).world, first_gradients, name, plan, length)
    assert len(set(results)) == 1, results
    assert said in results[0]
    assert "\n" not in results[0]


def test_a_loss_of_ones_own_is_refused_with_context_ranks(ranks: Any) -> None:
    assert all("a user-defined loss" in said for said in ranks.run(2, own_loss))


def own_loss() -> str:
    try:
        parallelize(make("grouped"), equality.make_optimizer, "cp2", loss=lambda output, batch: output.logits.mean())
    except InputError as error:
        return str(error)
    return "it ran"


def test_checkpoints_go_from_any_layout_to_context_ranks_and_back(ranks: Any, tmp_path: Path) -> None:
    loss = 0.0
    for number, plan in enumerate(("dp2.z1", "cp2.z3", "pp2.cp2", "dp1")):
        found = ranks.run(parse_plan(plan).world, one_step, plan, str(tmp_path), number)
        assert all(step == found[0] for step in found)
        if number:
            assert abs(found[0][0] / loss - 1) < 1e-10, plan
        loss = found[0][1]


def one_step(plan: str, folder: str, number: int) -> tuple[float, float]:
    """Goes on from the newest checkpoint; the loss on the batch of the step before, and after one more step."""
    trainer = parallelize(
        make("grouped"), equality.make_optimizer, plan, precision="fp64", anatomy=anatomy_of("grouped")
    )
    if number:
        trainer.load(newest(Path(folder)))
    batch = batch_of("grouped", 24)
    before = trainer.evaluate(batch)
    trainer.step(batch)
    trainer.save(Path(folder))
    after = trainer.evaluate(batch)
    trainer.close()
    return before, after


def newest(folder: Path) -> Path:
    return max(path for path in folder.iterdir() if path.name.startswith("step-"))
