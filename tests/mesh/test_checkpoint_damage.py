"""Every damage is found and named, with file and tensor; a manifest of any content ends in one sentence and never in a
crash."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil

import pytest
import torch
import xxhash
from checkpoint_worlds import empty, layouts, quick_folder, random_tensor, same_bits, save_world

from meshwright.checkpoint.load import iter_full_tensors, load_checkpoint
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.reshard import slice_shard
from meshwright.checkpoint.retention import newest_checkpoint
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.core.errors import InputError

WORLD = 4
NAMES = ("model/embedding.weight", "model/layer.0.bias", "optimizer/exp_avg/embedding.weight", "model/layer.1.weight")
SHAPES = ((16, 12), (9,), (16, 12), (8, 4, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with two checkpoints, saved under the same layout from unlike tensors."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("saved")
    held = {}
    for step in (100, 200):
        held[step] = {
            name: random_tensor(shape, "float32", step + index)
            for index, (name, shape) in enumerate(zip(NAMES, SHAPES, strict=True))
        }
        save_world(folder, step, held[step], layouts(held[step], WORLD, random.Random(4)))
    return folder, held


def _flip(path, dice):
    data = bytearray(path.read_bytes())
    at = dice.randrange(len(data))
    data[at] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    return at, at + 1


def _zero(path, dice):
    data = bytearray(path.read_bytes())
    at = dice.randrange(len(data))
    end = min(len(data), at + dice.choice((1, 16, 512)))
    if not any(data[at:end]):
        return _flip(path, dice)
    changed = [index for index in range(at, end) if data[index]]
    data[at:end] = bytes(end - at)
    path.write_bytes(data)
    return changed[0], changed[-1] + 1


def _cut_short(path, dice):
    size = path.stat().st_size
    end = dice.randrange(size)
    os.truncate(path, end)
    return end, size


def _lengthen(path, dice):
    with path.open("ab") as file:
        file.write(bytes(dice.choice((1, 8, 4096))))


def _swap(path, dice):
    other = dice.choice([other for other in path.parent.glob("rank-*") if other != path])
    aside = path.with_name("aside")
    path.rename(aside), other.rename(path), aside.rename(other)


def _stale(path, dice):
    shutil.copy(path.parent.parent / "step-00000100" / path.name, path)


def _missing(path, dice):
    path.unlink()


def _names_within(path, span):
    """The tensors whose bytes lie in `span` of a shard, by the file's own header; the header itself is of all of
    them."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    if span[0] < 8 + length:
        return []
    return [
        key.split("|")[0]
        for key, entry in header.items()
        if key != "__metadata__"
        and entry["data_offsets"][0] + 8 + length < span[1]
        and entry["data_offsets"][1] + 8 + length > span[0]
    ]


def _damage_once(saved, folder, seed):
    source, held = saved
    dice = random.Random(seed)
    shutil.copytree(source, folder)
    path = folder / "step-00000200"
    target = path / dice.choice([*(f"rank-{rank:05d}.safetensors" for rank in range(WORLD)), "manifest.json"])
    kinds = [_flip, _flip, _flip, _zero, _cut_short, _lengthen, _missing, _stale]
    kind = dice.choice(kinds + [_swap] * (target.name != "manifest.json"))
    before = target.read_bytes()
    span = kind(target, dice)
    problems = verify_checkpoint(path)
    what = f"seed {seed}: {kind.__name__} of {target.name} {span}"
    assert problems, what
    assert any(target.name in problem for problem in problems), (what, problems)
    assert all("\n" not in problem for problem in problems)
    if span and target.name != "manifest.json" and kind in (_flip, _zero):
        untouched = folder / "untouched"
        untouched.write_bytes(before)
        for name in _names_within(untouched, span):
            assert any(name in problem for problem in problems), (what, name, problems)
    said = []
    assert newest_checkpoint(folder, say=said.append).name == "step-00000100", what
    assert len(said) == 1 and "step-00000200" in said[0]
    for name, full in iter_full_tensors(folder / "step-00000100"):
        assert same_bits(full, held[100]["model/" + name])
    _load_finds_it(path, held[200], what)
    shutil.rmtree(folder)


def _load_finds_it(path, tensors, what):
    """A load of everything by one rank either fails or has every bit right: damage is never loaded."""
    wanted = empty([piece for rank in layouts(tensors, 1, random.Random(1)) for piece in rank])
    try:
        load_checkpoint(path, wanted)
    except InputError:
        return
    assert all(same_bits(tensor, slice_shard(tensors[piece.name], piece)) for piece, tensor in wanted), what


def test_100_random_damages_are_all_found_named_and_passed_over(saved):
    with quick_folder() as folder:
        for seed in range(100):
            _damage_once(saved, folder / str(seed), seed)


@pytest.mark.soak
def test_1200_more_damages_are_all_found_named_and_passed_over(saved):
    with quick_folder() as folder:
        for seed in (*range(100, 300), *range(1000, 2000)):
            _damage_once(saved, folder / str(seed), seed)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (_stale, "is stale: it belongs to step 100, but this checkpoint is of step 200; it holds "),
        (_swap, "contains the shards of rank "),
        (_missing, "is missing"),
    ],
)
def test_what_happened_to_a_file_is_said(saved, tmp_path, kind, sentence):
    shutil.copytree(saved[0], tmp_path / "copy")
    kind(tmp_path / "copy" / "step-00000200" / "rank-00001.safetensors", random.Random(0))
    problems = verify_checkpoint(tmp_path / "copy" / "step-00000200")
    assert any("rank-00001.safetensors" in problem and sentence in problem for problem in problems), problems


def test_a_file_of_an_earlier_save_of_the_same_step_is_stale(saved, tmp_path):
    held = saved[1]
    for name in ("first", "second"):
        save_world(tmp_path / name, 200, held[200], layouts(held[200], WORLD, random.Random(4)))
    shutil.copy(tmp_path / "first" / "step-00000200" / "rank-00002.safetensors", tmp_path / "second" / "step-00000200")
    assert any("of save" in problem for problem in verify_checkpoint(tmp_path / "second" / "step-00000200"))


def test_a_link_in_place_of_a_file_is_not_followed(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    file = tmp_path / "copy" / "step-00000200" / "rank-00000.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert any("rank-00000" in problem for problem in verify_checkpoint(file.parent))


NASTY = (
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**4000, 1.5, 1e308, float("nan"), float("inf"), "",
    "x" * 100_000, "../../../etc/passwd", "/etc/passwd", "rank-00000.safetensors", "rank-99999.safetensors",
    "rank-00000.safetensors\n", "\0", [], {}, [[]], [[0, 2**62]], [[5, 2]], [2**40, 2**40], [0], {"a": 1}, "float32",
    "object", "float64",
)  # fmt: skip


def _mutate(node, dice):
    """One random place of a JSON tree becomes something else."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = dice.choice(keys)
        if isinstance(node[key], dict | list) and dice.random() < 0.85:
            node = node[key]
            continue
        if dice.random() < 0.15:
            del node[key]
        elif isinstance(node[key], int) and dice.random() < 0.4:
            node[key] += dice.choice((-1, 1, 8, -8, 2**33))
        elif isinstance(node, dict) and dice.random() < 0.1:
            node[dice.choice(("extra", "../up", "rank-00000.safetensors"))] = node.pop(key)
        else:
            node[key] = copy.deepcopy(dice.choice(NASTY))
        return


def _write_with_digest(path, text):
    path.write_bytes(b'{"xxh3_128": "%s",\n' % xxhash.xxh3_128(text[1:]).hexdigest().encode() + text[1:])


def _use(path, tensors):
    """Everything that reads a checkpoint; returns what was refused. What is not refused must be right."""
    try:
        wanted = empty([piece for rank in layouts(tensors, 1, random.Random(1)) for piece in rank])
        load_checkpoint(path, wanted)
        assert all(same_bits(tensor, slice_shard(tensors[piece.name], piece)) for piece, tensor in wanted)
        assert all(same_bits(full, tensors["model/" + name]) for name, full in iter_full_tensors(path))
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, str(error)[:3000]
        return str(error)
    finally:
        verify_checkpoint(path)


def _entry(tree, name=NAMES[0]):
    return tree["tensors"][name]


def _shift(part, by):
    part["start"] += by
    part["stop"] += by


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tree: _entry(tree)["pieces"].pop(), "no shard contains"),
        (lambda tree: _entry(tree)["pieces"].clear(), "embedding.weight: "),
        (
            lambda tree: _entry(tree)["pieces"][0].update(offset=_entry(tree)["pieces"][0]["offset"] + 4),
            "embedding.weight",
        ),
        (lambda tree: _entry(tree)["pieces"][0].update(tree["tensors"][NAMES[1]]["pieces"][0]), "embedding.weight: "),
        (lambda tree: tree["tensors"].update(copy=_entry(tree)), "share bytes"),
        (lambda tree: _shift(_entry(tree)["pieces"][0], 2**40), "outside a shard of"),
        (lambda tree: _entry(tree).update(shape=[2**40, 2**40]), "too large for any memory"),
        (lambda tree: _entry(tree).update(shape=[2**30, 2**30]), "embedding.weight: "),
        (lambda tree: _entry(tree).update(dtype="object"), "dtype 'object' is not one of"),
        (lambda tree: _entry(tree).update(split=7), "split along dimension 7"),
        (
            lambda tree: tree["files"].update({"../up.safetensors": tree["files"]["rank-00000.safetensors"]}),
            "is not the name of a checkpoint file",
        ),
        (lambda tree: _entry(tree)["pieces"][0].update(file="/etc/passwd"), "is not in the list of files"),
        (lambda tree: tree.update(version=2), "version"),
        (lambda tree: tree.pop("state"), "needs field 'state'"),
    ],
)
def test_a_manifest_that_contradicts_itself_says_where(saved, tmp_path, change, sentence):
    shutil.copytree(saved[0] / "step-00000200", tmp_path / "copy")
    tree = json.loads(b"{" + (tmp_path / "copy" / "manifest.json").read_bytes().partition(b"\n")[2])
    change(tree)
    _write_with_digest(tmp_path / "copy" / "manifest.json", json.dumps(tree).encode())
    with pytest.raises(InputError) as caught:
        read_manifest(tmp_path / "copy")
    assert sentence in str(caught.value)


def _fuzz(folder, tensors, seeds):
    refused = 0
    path = folder / "step-00000200"
    good = (path / "manifest.json").read_bytes().partition(b"\n")[2]
    for seed in seeds:
        dice = random.Random(seed)
        tree = json.loads(b"{" + good)
        for _ in range(dice.choice((1, 1, 2, 4))):
            _mutate(tree, dice)
        _write_with_digest(path / "manifest.json", json.dumps(tree).encode())
        refused += _use(path, tensors) is not None
    return refused


def _in_little_memory(work, room):
    """`work` in a forked child that may take `room` bytes more than it has."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open("/proc/self/statm") as file:
                now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (now + room, now + room))
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("count", "least"), [(200, 120), pytest.param(1000, 700, marks=pytest.mark.soak)])
def test_mutated_manifests_are_refused_or_harmless_within_little_memory(saved, tmp_path, count, least):
    shutil.copytree(saved[0], tmp_path / "copy")

    def work():
        refused = _fuzz(tmp_path / "copy", saved[1][200], range(count))
        assert refused > least, refused

    assert _in_little_memory(work, 256 * 2**20) == 0


@pytest.mark.soak
def test_10000_more_mutated_manifests_are_refused_or_harmless(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    assert _fuzz(tmp_path / "copy", saved[1][200], range(1000, 11_000)) > 7000


@pytest.mark.parametrize(
    "text",
    [b"{}", b"{", b"{" + b'"a":[' * 100_000, b'{"version":1' + b"0" * 5000 + b"}", b'{"a":1,"a":2}', b"{\xff\xfe}",
        b'{"version":NaN}', b'{"version": 1}'],
    ids=range(8),
)  # fmt: skip
def test_a_manifest_of_nonsense_with_a_right_digest_is_refused(saved, tmp_path, text):
    shutil.copytree(saved[0], tmp_path / "copy")
    path = tmp_path / "copy" / "step-00000200"
    _write_with_digest(path / "manifest.json", text)
    with pytest.raises(InputError) as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_random_bytes_in_place_of_files_are_refused(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    path = tmp_path / "copy" / "step-00000200"
    dice = random.Random(0)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for size in (0, 1, 7, 8, 9, 100, len(good)):
            for head in (b"", (2**63).to_bytes(8, "little"), (50).to_bytes(8, "little"), b'{"xxh3_128": "'):
                file.write_bytes((head + dice.randbytes(size))[: max(size, 1)])
                assert verify_checkpoint(path)
                with pytest.raises(InputError):
                    load_checkpoint(
                        path, empty([piece for rank in layouts(saved[1][200], 1, random.Random(1)) for piece in rank])
                    )
        file.write_bytes(good)
    assert verify_checkpoint(path) == []
