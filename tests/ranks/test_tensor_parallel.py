"""Tensor parallelism computes what one device computes: loss and every gradient, on real ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from world_group import Collectives, between_hosts, world_comm_group

from meshwright import analysis
from meshwright.analysis.graph import ModelGraph, local_shard
from meshwright.core.errors import InputError
from meshwright.models.registry import build_reference_model
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.loss import count_valid_labels, sum_cross_entropy
from meshwright.runtime.tensor_parallel import chunks, collectives
from meshwright.runtime.tensor_parallel.column import ColumnLinear, RegionEntryHook, RegionInput
from meshwright.runtime.tensor_parallel.layers import RowLinear, SequenceParallelRegion, partial_grad_names, shard_model

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
CLASSES = (transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel)  # loaded here, before ranks are forked
VOCABULARY = 67  # odd, so that the ranks' shares of it are unequal


def small(kind: str, **changes: object) -> nn.Module:
    sizes = {
        "kind": kind,
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 48,
        "vocab": VOCABULARY,
        "seq": 16,
        "classes": 10,
    }
    return build_reference_model({**sizes, **changes})


def hugging_face(name: str, attention: str, tied: bool = False) -> nn.Module:
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
            intermediate_size=48, tie_word_embeddings=tied, attn_implementation=attention,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, n_inner=48,
        attn_implementation=attention, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Bare(nn.Module):
    """A block without modules for its parts: three columns read one tensor, which a residual reads too; a norm of each
    head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head_norm = nn.LayerNorm(32), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = y + self.out(
            F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(x)))


class BareModel(nn.Module):
    shift_labels = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 32, padding_idx=3)
        self.parts = nn.ModuleList(Bare() for _ in range(2))
        self.out = nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for part in self.parts:
            x = part(x)
        return self.out(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: small("llama", heads=8),
    "llama tied": lambda: small("llama", tied=True, qkv_bias=True),
    "gpt2": lambda: small("gpt2"),
    "bert": lambda: small("bert"),
    "bert untied": lambda: small("bert", tied=False),
    "bare": BareModel,
    "hf llama": lambda: hugging_face("llama", "sdpa"),
    "hf llama tied eager": lambda: hugging_face("llama", "eager", tied=True),
    "hf gpt2": lambda: hugging_face("gpt2", "sdpa"),
    "hf gpt2 eager": lambda: hugging_face("gpt2", "eager"),
}


def batch(shift: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (2, 8), generator=generator)
    labels = tokens.clone()
    labels[0, 5:] = -100
    if not shift:
        labels[1, ::3] = -100
    return tokens, labels


def shift_of(model: nn.Module) -> bool:
    return getattr(model, "shift_labels", True)


def logits_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def cut_sequence(model: nn.Module, found: ModelGraph) -> None:
    """What the pipeline's gates do: enter before the first block, leave behind the last one."""
    region = SequenceParallelRegion(world_comm_group())
    blocks = list(model.get_submodule(str(found.blocks)))
    blocks[0].register_forward_pre_hook(lambda module, args: (region.enter(args[0]), *args[1:]))
    blocks[-1].register_forward_hook(
        lambda module, args, out: (
            region.leave(out) if isinstance(out, torch.Tensor) else (region.leave(out[0]), *out[1:])
        )
    )


def whole_gradients(
    model: nn.Module, found: ModelGraph, shapes: dict[str, torch.Size], sequence_parallel: bool
) -> dict[str, torch.Tensor]:
    """Gradients of the whole parameters, put together from all ranks."""
    ranks = dist.get_world_size()
    partial = partial_grad_names(model, found, sequence_parallel)
    result = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        if name in partial:
            dist.all_reduce(gradient)
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, gradient)
        if name in found.splits:
            places = torch.arange(shapes[name].numel(), dtype=gradient.dtype).view(shapes[name])
            full = torch.full(shapes[name], torch.nan, dtype=gradient.dtype).flatten()
            for rank, share in enumerate(every):
                full[local_shard(places, found.splits[name], rank, ranks).flatten().long()] = share.flatten()
            result[name] = full.view(shapes[name])
        else:
            assert all(torch.equal(every[0], other) for other in every), f"{name} differs between ranks"
            result[name] = every[0]
    return result


def compare(name: str, dtype: torch.dtype, sequence_parallel: bool) -> tuple[float, float, str]:
    """Relative difference to one device: of the loss, and the largest of a gradient, with its name.

    A gradient that is zero but for rounding (the bias of a key) is held against a hundredth of the whole gradient's
    norm.
    """
    torch.manual_seed(1)
    model = MODELS[name]().to(dtype)
    tokens, labels = batch(shift_of(model))
    reference = sum_cross_entropy(logits_of(model(tokens)), labels, shift_of(model))
    reference.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    shapes = {n: p.shape for n, p in model.named_parameters()}
    model.zero_grad()
    found = analysis.analyze_model(model)
    shard_model(model, found, world_comm_group(), sequence_parallel)
    if sequence_parallel:
        cut_sequence(model, found)
    loss = sum_cross_entropy(logits_of(model(tokens)), labels, shift_of(model), world_comm_group())
    loss.backward()
    got = whole_gradients(model, found, shapes, sequence_parallel)
    assert got.keys() == wanted.keys()
    whole = torch.stack([g.norm() for g in wanted.values()]).norm()
    differences = {n: ((got[n] - g).norm() / torch.maximum(g.norm(), 0.01 * whole)).item() for n, g in wanted.items()}
    worst = max(differences, key=lambda n: differences[n] if differences[n] == differences[n] else float("inf"))
    return abs(loss.item() / reference.item() - 1), differences[worst], worst


WAYS = [(2, False), (2, True), (4, False), (4, True)]
EVERY_TIME = ("bare", 2, True)
EVERY = [
    pytest.param(name, *way, marks=() if (name, *way) == EVERY_TIME else pytest.mark.soak)
    for name in MODELS
    for way in WAYS
]
"""`make test` runs one model. `make soak` runs all models in all ways."""


@pytest.mark.parametrize(("name", "world", "sequence_parallel"), EVERY)
def test_loss_and_every_gradient_are_those_of_one_device(
    ranks: Pool, name: str, world: int, sequence_parallel: bool
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        for loss, gradient, worst in ranks.run(world, compare, name, dtype, sequence_parallel):
            assert loss < min(tolerance, 1e-6)
            assert gradient < tolerance, worst


def compare_in_chunks(name: str, sequence_parallel: bool, least: int) -> tuple[float, float, str, int]:
    """`compare` in float64 over gloo, with chunks of at least `least` bytes, and the number of its collectives."""
    with between_hosts(), pytest.MonkeyPatch.context() as patched, Collectives() as counted:
        patched.setattr(chunks, "MIN_TENSOR_CHUNK_BYTES", {"gloo": least})
        return *compare(name, torch.float64, sequence_parallel), counted.count


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    "name", ["bare", *(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "gpt2", "hf gpt2", "hf llama"))]
)
def test_layers_in_chunks_compute_what_one_device_computes(ranks: Pool, name: str, sequence_parallel: bool) -> None:
    """Two regions in each of two blocks, four chunks instead of one: of the sum of each row layer, and of that of the
    input gradients of its column layers. Under sequence parallelism also of the gathers of a region's input in forward,
    and of the gradient of its output."""
    whole = ranks.run(2, compare_in_chunks, name, sequence_parallel, 1 << 20)
    parts = ranks.run(2, compare_in_chunks, name, sequence_parallel, 1)
    for loss, gradient, worst, _ in (*whole, *parts):
        assert loss < 1e-10 and gradient < 1e-10, worst
    more = 3 * 4 * (4 if sequence_parallel else 2)
    assert [one[3] - other[3] for one, other in zip(parts, whole, strict=True)] == [more] * 2


def reductions_before_the_first_wait(sequence_parallel: bool) -> int:
    """How many chunks of a row layer are computed and on their way when the layer first waits."""
    group = world_comm_group(shared=False)
    module = nn.Linear(16, 32, bias=False)
    events: list[str] = []
    start, wait = async_collectives.CollectiveWork.__init__, async_collectives.CollectiveWork.wait
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunks, "MIN_TENSOR_CHUNK_BYTES", {"gloo": 1})
        patched.setattr(
            async_collectives.CollectiveWork, "__init__", lambda *args: (events.append("start"), start(*args))[1]
        )
        patched.setattr(async_collectives.CollectiveWork, "wait", lambda work: (events.append("wait"), wait(work))[1])
        RowLinear(module, True, group, sequence_parallel).forward(torch.randn(2, 8, 16))
    started = events.index("wait")
    assert events == ["start"] * started + ["wait"] * started
    return started


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_all_chunks_of_a_row_layer_are_on_their_way_before_it_waits(ranks: Pool, sequence_parallel: bool) -> None:
    assert ranks.run(2, reductions_before_the_first_wait, sequence_parallel) == [4, 4]


def count_collectives(name: str, sequence_parallel: bool) -> list[tuple[int, int]]:
    """(forward, backward) collectives of the blocks alone, for a model of one block and of three."""
    counts = []
    for layers in (1, 3):
        torch.manual_seed(1)
        model = small(name, layers=layers)
        found, group = analysis.analyze_model(model), world_comm_group(shared=False)
        shard_model(model, found, group, sequence_parallel)
        if sequence_parallel:
            cut_sequence(model, found)
        tokens, labels = batch(model.shift_labels)
        with Collectives() as forward:
            loss = sum_cross_entropy(model(tokens).logits, labels, model.shift_labels, group)
        with Collectives() as backward:
            loss.backward()
        counts.append((forward.count, backward.count))
    return counts


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.soak) for name in ("gpt2", "bert"))])
def test_a_tp_layer_costs_two_all_reduces_forward_and_two_backward(ranks: Pool, name: str) -> None:
    one, three = ranks.run(2, count_collectives, name, False)[0]
    assert (three[0] - one[0], three[1] - one[1]) == (4, 4)
    # forward: the embedding, the maximum and the sum of the loss; backward: the entry of the head
    assert (one[0] - 2, one[1] - 2) == (3, 1)


def test_sequence_parallelism_replaces_an_all_reduce_by_a_gather_and_a_scatter(ranks: Pool) -> None:
    one, three = ranks.run(2, count_collectives, "llama", True)[0]
    regathered = 2 * 2  # backward gathers again the input of each region, which was not kept
    assert (three[0] - one[0], three[1] - one[1]) == (8, 8 + regathered)


def largest_kept(sequence_parallel: bool) -> int:
    """Elements of the largest tensor that a block keeps for backward."""
    model = small("llama")
    found = analysis.analyze_model(model)
    shard_model(model, found, world_comm_group(), sequence_parallel)
    if sequence_parallel:
        cut_sequence(model, found)
    kept: list[int] = []
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(0 if tensor.data_ptr() in own else tensor.numel())
        return tensor

    block = model.get_submodule(found.block(1))
    with torch.no_grad():
        positions = model.model.rotary(torch.zeros(2, 8, 8))
    hidden = torch.randn(2, 4 if sequence_parallel else 8, 32, requires_grad=True)
    block._forward_hooks.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden, positions)
    return max(kept)


def test_sequence_parallelism_keeps_no_whole_hidden_state_in_a_block(ranks: Pool) -> None:
    whole = 2 * 8 * 32
    assert ranks.run(2, largest_kept, False) == [whole] * 2
    assert max(ranks.run(2, largest_kept, True)) < whole


def recompute_differs(name: str, sequence_parallel: bool) -> float:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = MODELS[name]()
        found = analysis.analyze_model(model)
        shard_model(model, found, world_comm_group(), sequence_parallel)
        if sequence_parallel:
            cut_sequence(model, found)
        if recompute:
            for block in model.get_submodule(str(found.blocks)):
                block.forward = again(block.forward)
        tokens, labels = batch(shift_of(model))
        sum_cross_entropy(logits_of(model(tokens)), labels, shift_of(model), world_comm_group()).backward()
        gradients.append([p.grad for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*gradients))


def again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", ["llama", "hf gpt2", "bare"])
@pytest.mark.soak
def test_a_recomputed_layer_gives_the_same_gradients_bit_for_bit(
    ranks: Pool, name: str, sequence_parallel: bool
) -> None:
    assert ranks.run(2, recompute_differs, name, sequence_parallel) == [0.0, 0.0]


def cross(sequence_parallel: bool) -> Callable[[torch.Tensor, CommGroup], torch.Tensor]:
    def entered(x: torch.Tensor, group: CommGroup) -> torch.Tensor:
        result = RegionInput(x, group, sequence_parallel, readers=1).entered
        assert result is not None
        return result

    return entered


WAYS: dict[str, tuple[Callable[..., torch.Tensor], bool, bool]] = {
    "enter": (cross(False), True, False),
    "enter gathering": (cross(True), False, False),
    "leave": (collectives.reduce_from_region, False, True),
    "leave_scattered": (collectives.reduce_scatter_from_region, False, False),
    "scatter_sequence": (collectives.scatter_sequence, True, False),
    "gather_whole": (collectives.gather_replicated, False, True),
}
"""Each with whether its input and its output are the same on all ranks."""


def transposes() -> dict[str, float]:
    """<f(x), y> and <x, f'(y)>, both summed over ranks, for each collective: a wrong backward makes them differ."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    differences = {}
    for name, (function, same_input, same_output) in WAYS.items():
        x = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
        if same_input:
            dist.broadcast(x, 0)
        x.requires_grad_()
        out = function(x * 1, world_comm_group())
        y = torch.randn(out.shape, dtype=torch.float64, generator=generator)
        if same_output:
            dist.broadcast(y, 0)
        out.backward(y.clone())
        sides = torch.stack([(out * y).sum().detach(), (x * x.grad).sum().detach()])
        whole = sides.clone()
        dist.all_reduce(whole)
        left = sides[0] if same_output else whole[0]
        right = sides[1] if same_input else whole[1]
        differences[name] = abs(left - right).item()
    return differences


@pytest.mark.parametrize("world", [2, 4])
def test_backward_of_every_collective_is_its_transpose(ranks: Pool, world: int) -> None:
    for differences in ranks.run(world, transposes):
        assert max(differences.values()) < 1e-12, differences


def test_without_a_group_collectives_hand_their_input_on() -> None:
    x = torch.ones(2, 4, 3)
    for name in ("reduce_from_region", "reduce_scatter_from_region", "scatter_sequence", "gather_replicated"):
        assert getattr(collectives, name)(x, None) is x


def crossing_differs(used: tuple[bool, bool], other: bool, sequence_parallel: bool, joint: bool) -> float:
    """A region of two column layers, of which those `used` reach the loss, and perhaps another reader: against plain
    autograd. `joint`: whether the layers are computed together and in chunks, as on ranks that share no memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunks, "MIN_TENSOR_CHUNK_BYTES", {"gloo": 1})
        return _crossing_differs(used, other, sequence_parallel, world_comm_group(shared=not joint))


def _crossing_differs(used: tuple[bool, bool], other: bool, sequence_parallel: bool, group: CommGroup) -> float:
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(2, 12, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = [torch.randn(ranks * 5, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
    wanted = sum((whole @ weight.T).square().sum() for weight, is_used in zip(weights, used) if is_used)
    wanted = wanted + ranks * whole.exp().sum() if other else wanted
    wanted.backward()
    mine = slice(dist.get_rank() * 5, (dist.get_rank() + 1) * 5)
    layers = nn.ModuleList(nn.Linear(3, 5, bias=False, dtype=torch.float64) for _ in weights)
    entry = RegionEntryHook(group, sequence_parallel, 2)
    for layer, weight in zip(layers, weights):
        layer.weight.data = weight[mine].clone()
        layer.forward = ColumnLinear(layer, entry, linear=True).forward
    hidden = collectives.slice_dim(whole.detach(), group, 1) if sequence_parallel else whole.detach().clone()
    hidden.requires_grad_()
    (entered,), _ = entry(layers, (hidden * 1,), {})
    outputs = [layer(entered) for layer in layers]
    loss = sum(output.square().sum() for output, is_used in zip(outputs, used) if is_used)
    loss = loss + entered.exp().sum() if other else loss
    loss.backward()
    assert whole.grad is not None and hidden.grad is not None
    expected = collectives.slice_dim(whole.grad, group, 1) if sequence_parallel else whole.grad
    return (hidden.grad - expected).abs().max().item()


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    ("used", "other"), [((True, True), False), ((True, True), True), ((True, False), False), ((False, True), True)]
)
def test_a_crossing_sums_the_gradients_of_whoever_read(
    ranks: Pool, used: tuple[bool, bool], other: bool, sequence_parallel: bool, joint: bool
) -> None:
    assert max(ranks.run(2, crossing_differs, used, other, sequence_parallel, joint)) < 1e-12


def vocabulary_loss(width: int, dtype: torch.dtype, spread: float) -> tuple[float, float]:
    """Largest relative difference of loss and of the gradient of the logits to F.cross_entropy on the whole."""
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(3, 6, width, generator=generator, dtype=torch.float64) * spread).to(dtype)
    labels = torch.randint(width, (3, 6), generator=generator)
    labels[1, 2:] = -100
    whole = logits.clone().requires_grad_()
    wanted = F.cross_entropy(
        whole.flatten(0, 1).to(torch.promote_types(dtype, torch.float32)), labels.flatten(), reduction="sum"
    )
    (wanted * 0.5).backward()
    chunk, rank = -(-width // dist.get_world_size()), dist.get_rank()
    mine = slice(rank * chunk, (rank + 1) * chunk)
    local = logits[..., mine].clone().requires_grad_()
    loss = sum_cross_entropy(local, labels, False, world_comm_group())
    (loss * 0.5).backward()
    assert local.grad is not None and whole.grad is not None and local.grad.dtype == dtype
    gradient = (local.grad - whole.grad[..., mine]).abs().max() / whole.grad.abs().max()
    return abs(loss.item() / wanted.item() - 1), gradient.item()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("width", "spread"), [(32, 1.0), (67, 1.0), (67, 300.0), (5, 1.0)])
def test_the_vocab_parallel_loss_is_cross_entropy_for_uneven_shards_too(
    ranks: Pool, world: int, width: int, spread: float
) -> None:
    if -(-width // world) * (world - 1) >= width:
        width += 2  # every rank needs a share
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for loss, gradient in ranks.run(world, vocabulary_loss, width, dtype, spread):
            assert loss < min(tolerance, 1e-5)
            assert gradient < tolerance


def test_the_loss_of_one_device_is_cross_entropy_and_counts_what_it_sums() -> None:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(50, (3, 6), generator=generator)
    labels[1, 2:] = -100
    for shift in (False, True):
        logits = torch.randn(3, 6, 50, generator=generator, dtype=torch.float64, requires_grad=True)
        held, wanted = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
        expected = F.cross_entropy(held.flatten(0, 1), wanted.flatten(), reduction="sum")
        (gradient,) = torch.autograd.grad(expected, logits)
        loss = sum_cross_entropy(logits, labels, shift)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        assert torch.allclose(logits.grad, gradient, atol=1e-14)
        assert count_valid_labels(labels, shift) == (wanted != -100).sum()


def test_a_batch_without_valid_labels_has_loss_and_gradient_zero() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = sum_cross_entropy(logits, torch.full((2, 3), -100), False)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_a_second_backward_through_the_loss_is_refused_and_not_wrong() -> None:
    loss = sum_cross_entropy(torch.randn(2, 5, requires_grad=True), torch.tensor([1, 2]), False)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def refusal(model: str, sequence_parallel: bool, length: int = 8, **sizes: object) -> str:
    torch.manual_seed(1)
    plain = small(model, **sizes)
    before = [tuple(p.shape) for p in plain.parameters()]
    found = analysis.analyze_model(plain)
    try:
        shard_model(plain, found, world_comm_group(), sequence_parallel)
        if sequence_parallel:
            cut_sequence(plain, found)
        plain(torch.zeros(2, length, dtype=torch.long))
    except InputError as error:
        assert length != 8 or before == [tuple(p.shape) for p in plain.parameters()]
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("world", "model", "changes", "message"),
    [
        pytest.param(
            4,
            "llama",
            {"heads": 12, "kv_heads": 3, "hidden": 48},
            "tp(4) must divide kv_heads (3)",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            4,
            "llama",
            {"heads": 2, "kv_heads": 2, "ffn": 50},
            "tp(4) must divide heads (2), ffn (50)",
            marks=pytest.mark.soak,
        ),
        (2, "gpt2", {"ffn": 49}, "tp(2) must divide ffn (49)"),
        (4, "gpt2", {"vocab": 6}, "leaves tensor rank 3 without a part of the vocabulary (6)"),
    ],
)
def test_sizes_that_do_not_divide_are_one_line_on_every_rank_before_anything_changes(
    ranks: Pool, world: int, model: str, changes: dict[str, Any], message: str
) -> None:
    for said in ranks.run(world, refusal_of, model, False, 8, changes):
        assert message in said
        assert "\n" not in said


def refusal_of(model: str, sequence_parallel: bool, length: int, changes: dict[str, Any]) -> str:
    return refusal(model, sequence_parallel, length, **changes)


def test_an_indivisible_sequence_is_refused_on_every_rank_before_a_collective(ranks: Pool) -> None:
    for said in ranks.run(2, refusal_of, "llama", True, 7, {}):
        assert said.startswith("sequence (7) is not a multiple of tp(2)")
    assert ranks.run(2, refusal_of, "llama", False, 7, {}) == ["accepted"] * 2


def bytes_of_logits() -> list[int]:
    model = small("llama")
    shard_model(model, analysis.analyze_model(model), world_comm_group(), False)
    return list(model(batch(True)[0]).logits.shape)


def test_the_whole_logits_are_on_no_rank(ranks: Pool) -> None:
    assert ranks.run(2, bytes_of_logits) == [[2, 8, 34], [2, 8, 33]]
