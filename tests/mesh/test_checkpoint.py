"""Any layout to any layout, bit for bit; what the trainer gave comes back; wrong requests are one sentence."""

from __future__ import annotations

import os
import random
import stat

import pytest
import torch
from checkpoint_worlds import (
    empty,
    held,
    layouts,
    quick_folder,
    raising,
    random_tensor,
    run_world,
    same_bits,
    save_world,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from meshwright.checkpoint.load import iter_full_tensors, load_checkpoint
from meshwright.checkpoint.reshard import CopyRange, plan_copies, slice_shard
from meshwright.checkpoint.retention import list_checkpoints, newest_checkpoint, prune_checkpoints
from meshwright.checkpoint.save import SaveFailed, save_checkpoint
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.core.errors import InputError
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.plan import Plan

DTYPES = ("bfloat16", "float16", "float32", "float64", "int64", "uint8")
SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def _tensors(shapes, dtypes, seed):
    return {
        f"model/layer.{index}": random_tensor(shape, dtypes[index % len(dtypes)], seed + index)
        for index, shape in enumerate(shapes)
    }


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**31))
def test_any_layout_loads_under_any_other_bit_for_bit(shapes, dtype, before, after, seed):
    with quick_folder() as folder:
        _any_to_any(folder, shapes, dtype, before, after, seed)


@pytest.mark.soak
@settings(max_examples=500, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**31))
def test_500_more_layouts_load_under_any_other_bit_for_bit(shapes, dtype, before, after, seed):
    with quick_folder() as folder:
        _any_to_any(folder, shapes, dtype, before, after, seed)


def _any_to_any(folder, shapes, dtype, before, after, seed):
    tensors = _tensors(shapes, (dtype, "float32"), seed)
    dice = random.Random(seed)
    path = save_world(folder, 7, tensors, layouts(tensors, before, dice))
    assert verify_checkpoint(path) == []
    for pieces in layouts(tensors, after, dice):
        wanted = empty(pieces)
        load_checkpoint(path, wanted)
        for piece, tensor in wanted:
            assert same_bits(tensor, slice_shard(tensors[piece.name], piece)), piece
    for name, full in iter_full_tensors(path):
        assert same_bits(full, tensors["model/" + name])


def test_every_type_and_every_bit_pattern_comes_back(tmp_path):
    tensors = {
        f"model/{dtype}": random_tensor((5, 3), dtype, 1)
        for dtype in (*DTYPES, "int32", "int16", "int8", "bool", "float8_e4m3fn")
    }
    tensors["model/scalar"] = torch.tensor(3.5)
    tensors["model/nothing"] = torch.empty(0, 4)
    path = save_world(tmp_path, 1, tensors, layouts(tensors, 2, random.Random(1)))
    for name, full in iter_full_tensors(path):
        assert same_bits(full, tensors["model/" + name]) and full.shape == tensors["model/" + name].shape


def test_what_replicas_share_is_written_once_and_evenly(tmp_path):
    full = random_tensor((1000,), "float32", 1)
    pieces = [ShardMetadata(f"model/{index}", (1000,), "float32", None, (), 0, 1000) for index in range(8)]
    path = save_world(tmp_path, 1, {piece.name: full for piece in pieces}, [pieces] * 4)
    sizes = [
        sum(tensor.numel() for tensor in load_file(path / f"rank-{rank:05d}.safetensors").values()) for rank in range(4)
    ]
    assert sizes == [2000] * 4


def test_state_and_random_states_come_back_and_local_ones_only_under_the_same_plan(tmp_path):
    state = {
        "run": {"step": 3, "loss_scale": 65536.0},
        "groups": [{"lr": 0.1 + 0.2, "betas": [0.9, 0.95]}],
        "none": None,
    }
    local = {"torch": torch.get_rng_state()}
    piece = ShardMetadata("model/w", (4,), "float32", None, (), 0, 4)
    path = save_checkpoint(tmp_path, 3, [(piece, torch.ones(4))], state, plan=Plan(), local=local)
    same = load_checkpoint(path, [], plan=Plan())
    assert (
        same.state == state
        and same.step == 3
        and same.plan == "dp1"
        and torch.equal(same.local["torch"], local["torch"])
    )
    assert load_checkpoint(path, [], plan=Plan(zero=1)).local is None


def test_a_folder_is_for_its_owner_alone(tmp_path):
    path = save_checkpoint(tmp_path / "run" / "checkpoints", 3, [], {})
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path, path.parent, path.parent.parent)] == [0o700] * 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert (path.parent / "latest").read_text() == "step-00000003\n"


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ((ShardMetadata("model/v", (4,), "float32", None, (), 0, 4), torch.zeros(4)), "has no tensor 'model/v'"),
        (
            (ShardMetadata("model/w", (5,), "float32", None, (), 0, 5), torch.zeros(5)),
            r"shape \[4\], this model's is \[5\]",
        ),
        (
            (ShardMetadata("model/w", (4,), "float64", None, (), 0, 4), torch.zeros(4, dtype=torch.float64)),
            "is float32, but this job uses float64",
        ),
    ],
)
def test_what_does_not_match_is_one_sentence(tmp_path, wanted, sentence):
    path = save_checkpoint(
        tmp_path, 1, [(ShardMetadata("model/w", (4,), "float32", None, (), 0, 4), torch.ones(4))], {}
    )
    with pytest.raises(InputError, match=sentence) as caught:
        load_checkpoint(path, [wanted])
    assert "\n" not in str(caught.value)


def test_a_cast_is_made_only_when_asked_for(tmp_path):
    path = save_checkpoint(
        tmp_path,
        1,
        [(ShardMetadata("model/w", (4,), "bfloat16", None, (), 0, 4), torch.full((4,), 1.5, dtype=torch.bfloat16))],
        {},
    )
    target = torch.zeros(4)
    load_checkpoint(path, [(ShardMetadata("model/w", (4,), "float32", None, (), 0, 4), target)], cast=True)
    assert torch.equal(target, torch.full((4,), 1.5))


def test_one_rank_that_cannot_load_is_an_error_on_all(tmp_path):
    path = save_checkpoint(
        tmp_path, 1, [(ShardMetadata("model/w", (4,), "float32", None, (), 0, 4), torch.ones(4))], {}
    )

    def work(ranks):
        name = "model/x" if ranks.rank == 2 else "model/w"
        load_checkpoint(path, [(ShardMetadata(name, (4,), "float32", None, (), 0, 4), torch.zeros(4))], ranks=ranks)

    results = run_world(4, work)
    assert all(isinstance(result, InputError) and "rank 2: " in str(result) for result in results)


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([ShardMetadata("model/w", (8,), "float32", 0, ((0, 3),), 0, 3),
                ShardMetadata("model/w", (8,), "float32", 0, ((4, 8),), 0, 4)], "no shard contains index 3"),
        ([ShardMetadata("model/w", (8,), "float32", None, (), 0, 3),
                ShardMetadata("model/w", (8,), "float32", None, (), 4, 8)], "no shard contains element 3"),
        ([ShardMetadata("model/w", (8,), "float32", None, (), 0, 8),
                ShardMetadata("model/w", (8, 1), "float32", None, (), 0, 8)], "ranks disagree"),
    ],
)  # fmt: skip
def test_ranks_that_together_hold_no_whole_tensor_save_nothing(tmp_path, pieces, sentence):
    def work(ranks):
        piece = pieces[ranks.rank]
        save_checkpoint(tmp_path, 1, [(piece, torch.zeros(piece.stop - piece.start))], {}, ranks=ranks)

    results = run_world(2, work)
    assert all(isinstance(result, SaveFailed) and sentence in str(result) for result in results)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("state", [{"a": float("nan")}, {"a": torch.ones(1)}, {1: 2}, {"a": [object()]}])
def test_a_state_that_json_would_change_is_refused(tmp_path, state):
    with pytest.raises(SaveFailed, match="state \\$"):
        save_checkpoint(tmp_path, 1, [], state)
    assert os.listdir(tmp_path) == []


def test_newest_is_the_one_saved_last_even_after_going_back(tmp_path):
    for step in (100, 200, 150):
        save_checkpoint(tmp_path, step, [], {})
    assert newest_checkpoint(tmp_path).name == "step-00000150"
    save_checkpoint(tmp_path, 200, [], {"second": True})
    assert newest_checkpoint(tmp_path).name == "step-00000200" and load_checkpoint(
        newest_checkpoint(tmp_path), []
    ).state == {"second": True}
    assert len(list_checkpoints(tmp_path)) == 3 and newest_checkpoint(tmp_path / "none") is None


def test_pruning_keeps_the_newest_and_never_removes_the_last_valid_one(tmp_path):
    for step in range(5):
        save_checkpoint(
            tmp_path, step, [(ShardMetadata("model/w", (4,), "float32", None, (), 0, 4), torch.ones(4))], {}
        )
    assert [path.name for path in prune_checkpoints(tmp_path, 3)] == ["step-00000001", "step-00000000"]
    for path in list_checkpoints(tmp_path)[:2]:
        (path / "rank-00000.safetensors").write_bytes(b"")
    assert prune_checkpoints(tmp_path, 1) == [tmp_path / "step-00000003"]
    said = []
    assert newest_checkpoint(tmp_path, say=said.append).name == "step-00000002"
    assert len(said) == 1 and "step-00000004 is skipped" in said[0] and "model/w" in said[0]
    with pytest.raises(InputError, match="at least one"):
        prune_checkpoints(tmp_path, 0)


def test_where_no_checkpoint_is_valid_a_run_does_not_begin_anew_in_silence(tmp_path):
    path = save_checkpoint(tmp_path, 1, [], {})
    (path / "manifest.json").unlink()
    with pytest.raises(InputError, match="none of the 1 checkpoints"):
        newest_checkpoint(tmp_path, say=lambda sentence: None)


def test_layouts_of_the_same_tensors_by_unlike_worlds_hold_the_same_bits(tmp_path):
    tensors = _tensors([(24, 10), (7,), (4, 6, 5)], ("float32", "bfloat16"), 3)
    dice = random.Random(5)
    first = save_world(tmp_path / "a", 1, tensors, layouts(tensors, 8, dice))
    again = layouts(tensors, 3, dice)

    def work(ranks):
        wanted = empty(again[ranks.rank])
        load_checkpoint(first, wanted, ranks=ranks)
        return save_checkpoint(tmp_path / "b", 1, wanted, {}, ranks=ranks)

    second = raising(run_world(3, work))[0]
    assert all(same_bits(full, tensors["model/" + name]) for name, full in iter_full_tensors(second))
    assert held(again[0], tensors)


def test_saved_pieces_with_a_gap_fill_nothing():
    saved = [ShardMetadata("w", (9,), "uint8", None, (), 0, 3), ShardMetadata("w", (9,), "uint8", None, (), 5, 9)]
    assert plan_copies(ShardMetadata("w", (9,), "uint8", None, (), 1, 8), saved) is None
    assert plan_copies(ShardMetadata("w", (9,), "uint8", 0, ((5, 7), (0, 2)), 1, 4), saved) == [
        CopyRange(1, 1, 0, 1),
        CopyRange(0, 0, 1, 2),
    ]
