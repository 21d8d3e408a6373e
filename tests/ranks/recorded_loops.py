"""Training loops of other engines that `meshwright.recording` records: correct ones, and with a planted fault.

Each loop runs on every rank of a gloo world and writes its recording to a folder. `Setting.fault` names the fault; the
correct loop has none.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd, reduce_scatter_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from meshwright.interop.recording.recorder import recording
from meshwright.interop.recording.sequence import SequenceShard

VOCABULARY, HIDDEN, LENGTH, STEPS = 37, 16, 12, 2


class Setting(NamedTuple):
    """How a loop trains. `dtype` is that of the weights; `low` a dtype of autocast, or of mixed precision in FSDP2."""

    fault: str = ""
    seed: int = 0
    dtype: str = "float32"
    low: str = ""
    micro_batches: int = 2
    tied: bool = False
    dropout: float = 0.0
    inner: float = 0.0
    optimizer: str = "AdamW"
    clip: float = 0.0
    layers: int = 2
    kind: str = ""
    tensors: bool = False


class Attention(nn.Module):
    """Causal attention; a rank may have a part of the heads."""

    def __init__(self, hidden: int, heads: int = 4) -> None:
        super().__init__()
        self.width, self.causal = hidden // heads, True
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A block of a transformer, with its norms first. `inner` is the dropout rate inside the MLP."""

    def __init__(self, hidden: int, dropout: float, inner: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout, self.inner = nn.Dropout(dropout), nn.Dropout(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(self.inner(F.gelu(self.up(self.norm2(x))))))


class TinyModel(nn.Module):
    """A small language model. `tied`: whether the head is the embedding. `places` are the positions of the ids, by
    default all in order. `cut` divides the sequence of the residual stream over tensor-parallel ranks, `join` is the
    opposite."""

    def __init__(self, layers: int, tied: bool, dropout: float, inner: float) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Layer(HIDDEN, dropout, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.places: torch.Tensor | None = None
        self.cut: Any = nn.Identity()
        self.join: Any = nn.Identity()
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device) if self.places is None else self.places
        x = self.cut(self.embedding(ids) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.join(self.norm(x)))


def build(setting: Setting) -> TinyModel:
    """The model of a setting on one device, with norms and biases that are not constant."""
    torch.manual_seed(setting.seed)
    model = TinyModel(setting.layers, setting.tied, setting.dropout, setting.inner)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.shape[0] == VOCABULARY else 1).add_(torch.randn(parameter.shape) * 0.05)
    return model.to(getattr(torch, setting.dtype))


def batch_of(setting: Setting, step: int, place: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and labels of micro-batch `place` of a step. Each has another number of valid labels."""
    random = torch.Generator().manual_seed(100000 * setting.seed + 1000 * step + place)
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=random)
    labels = ids.clone()
    labels[:, : 2 + (place * 3 + step) % 7] = -100
    return ids, labels


def sum_of_losses(logits: torch.Tensor, labels: torch.Tensor, shift: int = 1, ignored: int = -100) -> torch.Tensor:
    """The cross entropy of the next token, added up."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows, targets = logits[:, : LENGTH - shift].flatten(0, 1).to(wide), labels[:, shift:].flatten()
    return F.cross_entropy(rows, targets, reduction="sum", ignore_index=ignored)


def loss_of(logits: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The loss of one device."""
    return sum_of_losses(logits, batch["labels"]), int((batch["labels"][:, 1:] != -100).sum())


def optimizer_of(setting: Setting, model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """The optimizer of a setting."""
    return getattr(torch.optim, setting.optimizer)(model.parameters(), lr=lr)


# --- data parallel: plain replicas, DDP, FSDP1, FSDP2 ---------------------------------------------


def wrap(setting: Setting, model: TinyModel) -> nn.Module:
    """The model in the wrapper `setting.kind`."""
    world = dist.get_world_size()
    if setting.kind == "DDP":
        if setting.fault == "excluded parameter":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.1.up.weight"])
        return DistributedDataParallel(model)
    if setting.kind.startswith("FSDP1"):
        policy = ModuleWrapPolicy({Layer})
        original, device = setting.kind == "FSDP1 orig", torch.device("cpu")
        return FullyShardedDataParallel(model, None, None, None, policy, use_orig_params=original, device_id=device)
    if setting.kind == "FSDP2":
        low = getattr(torch, setting.low) if setting.low else None
        policy2 = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy2)
        fully_shard(model, mesh=mesh, mp_policy=policy2)
    return model


def reduce_by_hand(model: nn.Module, world: int) -> None:
    """The gradients of plain replicas, averaged."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def data_parallel(folder: str, setting: Setting) -> None:
    """Trains replicas on different micro-batches."""
    rank, world, fault = dist.get_rank(), dist.get_world_size(), setting.fault
    replica = setting._replace(seed=setting.seed + rank) if fault == "not broadcast" else setting
    model = wrap(setting, build(replica))
    if fault == "stale weight":
        plant_stale_rows(model, build(setting).embedding.weight.detach())
    torch.manual_seed(100 + rank)
    optimizer = optimizer_of(setting, model, 3e-2 if fault == "learning rate" and rank else 1e-2)
    autocast = setting.low and setting.kind != "FSDP2"
    low = torch.autocast("cpu", getattr(torch, setting.low)) if autocast else nullcontext()
    with recording(folder, model, steps=STEPS, tensors=setting.tensors) as recorder:
        for step in range(STEPS):
            if fault != "not zeroed":
                optimizer.zero_grad()
            data = [batch_of(setting, step, rank * setting.micro_batches + at) for at in range(setting.micro_batches)]
            count = torch.tensor(sum(int((labels[:, 1:] != -100).sum()) for _, labels in data))
            dist.all_reduce(count)
            for at, (ids, labels) in enumerate(data):
                recorder.batch(labels=labels)
                last = at == setting.micro_batches - 1 and fault != "no reduction"
                quiet = model.no_sync() if setting.kind == "DDP" and not last else nullcontext()
                with quiet:
                    with low:
                        logits = model(ids)
                    loss = local_loss(setting, logits, labels, int(count))
                    if not (fault == "skipped micro-batch" and rank == 1 and at == 0):
                        loss.backward()
            if not setting.kind and fault != "no reduction":
                reduce_by_hand(model, world)
            if fault == "divided twice":
                for parameter in model.layers[1].parameters():
                    parameter.grad /= world
            clip(setting, model, rank)
            optimizer.step()


def plant_stale_rows(model: TinyModel, first: torch.Tensor) -> None:
    """Lets the embedding read the rows of the shard of the last of two ranks from the first weights."""
    rows = (torch.arange(VOCABULARY) >= -(-VOCABULARY // 2)).unsqueeze(1)

    def lookup(ids: torch.Tensor) -> torch.Tensor:
        weight = model.embedding.weight
        return F.embedding(ids, weight + torch.where(rows, first - weight, 0.0).detach())

    model.embedding.forward = lookup


def local_loss(setting: Setting, logits: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """The loss of one micro-batch, for gradients that are averaged over ranks."""
    rank, world, fault = dist.get_rank(), dist.get_world_size(), setting.fault
    if fault == "mean of means":
        return sum_of_losses(logits, labels) / int((labels[:, 1:] != -100).sum()) / setting.micro_batches
    if fault == "padding counted":
        return sum_of_losses(logits, labels.clamp(min=0), ignored=-1) * world / count
    loss = sum_of_losses(logits, labels, 2 if fault == "label shift" and rank == 1 else 1) * world / count
    return loss / setting.micro_batches if fault == "scaled twice" else loss


def clip(setting: Setting, model: nn.Module, rank: int) -> None:
    """Clips the gradients as `setting` requests."""
    if setting.fault == "clip norm":  # FSDP2: the norm of the local shards only
        found = [parameter.grad._local_tensor for parameter in model.parameters()]
        norm = torch.stack([each.norm() for each in found]).norm()
        from torch.nn.utils import clip_grads_with_norm_

        clip_grads_with_norm_(model.parameters(), setting.clip, norm)
    elif setting.clip and setting.kind.startswith("FSDP1"):
        model.clip_grad_norm_(setting.clip)
    elif setting.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)


# --- context parallel ------------------------------------------------------------------------------


def context_parallel(folder: str, setting: Setting) -> None:
    """Trains on parts of each sequence; every rank gathers the keys and values. Kind 'zigzag': a rank has an early and
    a late part."""
    rank, world, fault = dist.get_rank(), dist.get_world_size(), setting.fault
    model, chunks = build(setting), torch.arange(LENGTH).chunk(2 * world)
    both = (rank, 2 * world - 1 - rank) if setting.kind == "zigzag" else (2 * rank, 2 * rank + 1)
    places = torch.cat([chunks[at] for at in both])
    if fault != "positions":
        model.places = places
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, places)
    for layer in model.layers:
        layer.attention.forward = partial(attend_to_all, layer.attention, torch.cat(parts), places)
    torch.manual_seed(100 if fault == "equal masks" else 100 + rank)
    optimizer = optimizer_of(setting, model)
    shard = SequenceShard(1, None, places if setting.kind == "zigzag" else None)
    with recording(folder, model, steps=STEPS, sequence=shard) as recorder:
        for step in range(STEPS):
            optimizer.zero_grad()
            data = [batch_of(setting, step, at) for at in range(setting.micro_batches)]
            count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in data)
            for ids, labels in data:
                shifted = F.pad(labels[:, 1:], (0, 1), value=-100)[:, places]
                recorder.batch(labels=shifted)
                loss = F.cross_entropy(model(ids[:, places]).flatten(0, 1), shifted.flatten(), reduction="sum") / count
                loss.backward()
            if fault != "no reduction":
                reduce_by_hand(model, 1)
            optimizer.step()


def attend_to_all(attention: Attention, order: torch.Tensor, places: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Causal attention of the positions `places` to all. `order` are the positions of the gathered keys."""
    q, k, v = (
        each(x).unflatten(-1, (-1, attention.width)).transpose(1, 2) for each in (attention.q, attention.k, attention.v)
    )
    k, v = (all_gather_single_autograd(each.contiguous(), 2, dist.group.WORLD) for each in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=order <= places.unsqueeze(1))
    return attention.out(y.transpose(1, 2).flatten(2))


def loss_of_shifted(logits: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The loss of one device for labels that the loop has shifted."""
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), int((labels != -100).sum())


# --- expert parallel -------------------------------------------------------------------------------


class Mixture(nn.Module):
    """A language model of one mixture of four experts. `group`: ranks that each store a part of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, 4)
        self.experts = nn.ParameterDict({"up": torch.randn(4, HIDDEN, 32) / 4, "down": torch.randn(4, 32, HIDDEN) / 6})
        self.head, self.group = nn.Linear(HIDDEN, VOCABULARY), None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).flatten(0, 1)
        gates = self.router(x).softmax(-1)
        if self.group is not None:
            both = all_gather_single_autograd(torch.cat([x, gates], 1), 0, self.group)
            mine = HIDDEN + torch.arange(len(self.experts["up"])) + dist.get_rank() * len(self.experts["up"])
            x_all, gates = both[:, :HIDDEN], both[:, mine]
        else:
            x_all = x
        inner = F.gelu(torch.einsum("th,ehf->tef", x_all, self.experts["up"]))
        y = torch.einsum("tef,efh,te->th", inner, self.experts["down"], gates)
        if self.group is not None:
            y = reduce_scatter_single_autograd(y, "sum", 0, self.group)
        return self.head(x + y).unflatten(0, ids.shape)


def build_mixture(setting: Setting) -> Mixture:
    """The mixture on one device."""
    torch.manual_seed(setting.seed)
    return Mixture()


def expert_parallel(folder: str, setting: Setting) -> None:
    """Trains on different micro-batches; every rank has a part of the experts and sees the tokens of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_mixture(setting)
    model.group = dist.group.WORLD
    for name, full in model.experts.items():
        model.experts[name] = nn.Parameter(full.detach().chunk(world)[rank].clone())
    optimizer = optimizer_of(setting, model)
    with recording(folder, model, steps=STEPS, shards={"experts.*": 0}) as recorder:
        for step in range(STEPS):
            optimizer.zero_grad()
            data = [batch_of(setting, step, at) for at in range(world * setting.micro_batches)]
            count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in data)
            for ids, labels in data[rank::world]:
                recorder.batch(labels=labels)
                (sum_of_losses(model(ids), labels) / count).backward()
            for name, parameter in model.named_parameters():
                if not name.startswith("experts"):
                    dist.all_reduce(parameter.grad)
                elif setting.fault == "divided twice":
                    parameter.grad /= world
            optimizer.step()


# --- tensor parallel with DTensor -----------------------------------------------------------------


def tensor_parallel(folder: str, setting: Setting) -> None:
    """Trains with DTensor. Kinds: 'sequence' is sequence parallelism of norms, '2d' is FSDP2 over it."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing here writes to the logits
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("dp", "tp")) if "2d" in setting.kind else ((1, world), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build(setting)
    sequence = "sequence" in setting.kind
    plan: dict[str, Any] = {}
    for at in range(setting.layers):
        row = partial(RowwiseParallel, output_layouts=Shard(1)) if sequence else RowwiseParallel
        each: dict[str, Any] = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
        each |= {"attention.out": row(), "down": row()}
        if sequence:
            each |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
            gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            each |= {"attention": PrepareModuleInput(**gathered), "up": ColwiseParallel(input_layouts=Shard(1))}
        plan |= {f"layers.{at}.{name}": style for name, style in each.items()}
    if sequence:
        plan |= {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        plan |= {"positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))}
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        plan |= {"norm": SequenceParallel(), "head": head}
    parallelize_module(model, mesh["tp"], plan)
    if "2d" in setting.kind:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = optimizer_of(setting, model)
    replica, replicas = mesh.get_local_rank("dp"), shape[0]
    with recording(folder, model, steps=STEPS) as recorder:
        for step in range(STEPS):
            optimizer.zero_grad()
            every = [batch_of(setting, step, at) for at in range(replicas * setting.micro_batches)]
            data = every[replica * setting.micro_batches :][: setting.micro_batches]
            count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in every)
            for ids, labels in data:
                recorder.batch(labels=labels)
                (sum_of_losses(model(ids), labels) * replicas / count).backward()
            if setting.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
            optimizer.step()


# --- tensor parallel by hand, as Megatron-LM ------------------------------------------------------


class CopyToRanks(torch.autograd.Function):
    """The identity, whose gradient is all-reduced."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    """An all-reduce, whose gradient is the identity."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def gather(x: torch.Tensor) -> torch.Tensor:
    """The slices of all ranks, joined along the sequence."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def own(x: torch.Tensor) -> torch.Tensor:
    """The slice of this rank."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class GatherSequence(torch.autograd.Function):
    """Gathers the sequence. `sums`: whether the gradient is reduce-scattered, otherwise it is cut."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, sums: bool) -> torch.Tensor:
        context.sums = sums
        return gather(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        if context.sums:
            dist.all_reduce(gradient)
        return own(gradient), None


class ScatterSequence(torch.autograd.Function):
    """Cuts the sequence, after a sum over ranks if `sums`. The gradient is gathered."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, sums: bool) -> torch.Tensor:
        context.sums = sums
        x = x.clone()
        if sums:
            dist.all_reduce(x)
        return own(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.sums:
            return gather(gradient), None
        full = gradient.new_zeros(gradient.shape[0], gradient.shape[1] * dist.get_world_size(), *gradient.shape[2:])
        own_rows = gradient.shape[1] * dist.get_rank()
        full[:, own_rows : own_rows + gradient.shape[1]] = gradient
        return full, None


class ColumnLinear(nn.Linear):
    """A linear layer whose output is divided over ranks."""

    sequence, faulty = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = GatherSequence.apply(x, True) if self.sequence else x if self.faulty else CopyToRanks.apply(x)
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Linear):
    """A linear layer whose input is divided over ranks."""

    sequence, fault = False, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "doubled bias":
            return SumOverRanks.apply(F.linear(x, self.weight, self.bias))
        y = F.linear(x, self.weight)
        if self.fault != "no reduction of outputs":
            y = ScatterSequence.apply(y, True) if self.sequence else SumOverRanks.apply(y)
        return y + self.bias


TENSOR_SHARDS = {
    **{f"layers.*.attention.{name}.{kind}": 0 for name in "qkv" for kind in ("weight", "bias")},
    **{f"layers.*.up.{kind}": 0 for kind in ("weight", "bias")},
    **{f"layers.*.{name}.weight": 1 for name in ("attention.out", "down")},
}


def shard_by_hand(setting: Setting, model: TinyModel, sequence: bool) -> TinyModel:
    """The model with column- and row-parallel layers of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for at, layer in enumerate(model.layers):
        for owner, name, kind in (
            *((layer.attention, each, ColumnLinear) for each in ("q", "k", "v")),
            (layer.attention, "out", RowLinear),
            (layer, "up", ColumnLinear),
            (layer, "down", RowLinear),
        ):
            linear = getattr(owner, name)
            wrong = setting.fault == "wrong shard" and (at, name) == (0, "up")
            column = kind is ColumnLinear
            with torch.no_grad():
                shards = linear.weight.chunk(world, 0 if column else 1)
                linear.weight = nn.Parameter(shards[0 if wrong else rank].clone())
                if column:
                    linear.bias = nn.Parameter(linear.bias.chunk(world)[rank].clone())
            if setting.kind == "attributes":  # as Megatron-Core marks its parameters
                for parameter in (linear.weight, *((linear.bias,) if column else ())):
                    parameter.tensor_model_parallel, parameter.partition_dim = True, 0 if column else 1
            linear.__class__ = kind
            linear.sequence = sequence
    last = model.layers[-1]
    last.up.faulty = setting.fault == "no reduction of input gradients"
    last.down.fault = setting.fault if setting.fault == "no reduction of outputs" else ""
    model.layers[0].attention.out.fault = setting.fault if setting.fault == "doubled bias" else ""
    last.attention.causal = not (setting.fault == "not causal" and rank == 1)
    if sequence:
        model.cut, model.join = CutSequence(), JoinSequence()
    return model


class CutSequence(nn.Module):
    """The residual stream of this rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScatterSequence.apply(x, False)


class JoinSequence(nn.Module):
    """The residual stream of all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return GatherSequence.apply(x, False)


class SplitDropout(nn.Dropout):
    """Dropout with a seed for each rank, or the same on all ranks."""

    def __init__(self, p: float, offset: int) -> None:
        super().__init__(p)
        self.generator_state: Any = None
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.p:
            return x
        shared = torch.get_rng_state()
        torch.manual_seed(int(torch.randint(1 << 30, ())) + self.offset)
        y = super().forward(x)
        torch.set_rng_state(shared)
        torch.rand(())
        return y


def tensor_parallel_by_hand(folder: str, setting: Setting) -> None:
    """Trains as Megatron-LM does. Kind 'sequence': the sequence of the residual stream is divided."""
    sequence, fault, rank = "sequence" in setting.kind, setting.fault, dist.get_rank()
    model = shard_by_hand(setting, build(setting), sequence)
    for layer in model.layers:
        layer.dropout = SplitDropout(setting.dropout, rank if sequence or fault == "unequal masks" else 0)
        layer.inner = SplitDropout(setting.inner, 0 if fault == "equal masks" else rank)
    torch.manual_seed(7)
    optimizer = optimizer_of(setting, model)
    norm = model.layers[1].norm2
    for parameter in norm.parameters() if fault == "reduced after every micro-batch" else ():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    shards = None if setting.kind == "attributes" else TENSOR_SHARDS
    with recording(folder, model, steps=STEPS, shards=shards, group=dist.group.WORLD) as recorder:
        for step in range(STEPS):
            optimizer.zero_grad()
            data = [batch_of(setting, step, at) for at in range(setting.micro_batches)]
            count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in data)
            for ids, labels in data:
                recorder.batch(labels=labels)
                (sum_of_losses(model(ids), labels) / count).backward()
            if sequence:
                for name, parameter in model.named_parameters():
                    cut = any(each in name for each in ("norm", "embedding", "positions", "out.bias", "down.bias"))
                    own = fault in ("norm not reduced", "reduced after every micro-batch")
                    if cut and not (own and name.startswith("layers.1.norm2")):
                        dist.all_reduce(parameter.grad)
            optimizer.step()


# --- pipeline -------------------------------------------------------------------------------------


class Stage(nn.Module):
    """The layers of one rank, with the names of the full model."""

    def __init__(self, model: TinyModel, rank: int, world: int) -> None:
        super().__init__()
        if rank == 0:
            self.embedding, self.positions = model.embedding, model.positions
        mine = range(len(model.layers) * rank // world, len(model.layers) * (rank + 1) // world)
        self.layers = nn.ModuleDict({str(at): model.layers[at] for at in mine})
        if rank == world - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def pipeline(folder: str, setting: Setting) -> None:
    """Trains with torch.distributed.pipelining; the schedule is `setting.kind`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = Stage(build(setting), rank, world)
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    count = [0]

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return sum_of_losses(logits, labels) / count[0]

    make = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[setting.kind]
    schedule = make(stage, setting.micro_batches, loss_fn=loss, scale_grads=setting.fault == "scaled twice")
    optimizer = optimizer_of(setting, module)
    with recording(folder, module, steps=STEPS):
        for step in range(STEPS):
            optimizer.zero_grad()
            data = [batch_of(setting, step, at) for at in range(setting.micro_batches)]
            ids, labels = (torch.cat(each) for each in zip(*data, strict=True))
            count[0] = int((labels[:, 1:] != -100).sum())
            if rank == 0:
                schedule.step(ids)
            else:
                schedule.step(target=labels)
            optimizer.step()


def pipeline_by_hand(folder: str, setting: Setting) -> None:
    """Trains two stages, all forwards before all backwards. `tied`: the head is the embedding of the first stage."""
    rank, fault = dist.get_rank(), setting.fault
    full = build(setting)
    module = Stage(full, rank, 2)
    optimizer = optimizer_of(setting, module)
    if fault == "stale tied weight" and rank == 1:
        rest = [parameter for parameter in module.parameters() if parameter is not module.head.weight]
        optimizer = torch.optim.AdamW(rest, lr=1e-2)
    with recording(folder, module, steps=STEPS):
        for step in range(STEPS):
            optimizer.zero_grad()
            data = [batch_of(setting, step, at) for at in range(setting.micro_batches)]
            count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in data)
            kept = []
            for ids, labels in data:
                if rank == 0:
                    kept.append(module(ids))
                    dist.send(kept[-1].detach(), 1)
                else:
                    x = torch.empty(2, LENGTH, HIDDEN, dtype=getattr(torch, setting.dtype))
                    dist.recv(x, 0)
                    x.requires_grad_()
                    kept.append((x, sum_of_losses(module(x), labels) / count))
            for at, each in enumerate(kept):
                if rank == 0:
                    gradient = torch.empty_like(each)
                    dist.recv(gradient, 1)
                    if not (fault == "skipped micro-batch" and at == 1):
                        each.backward(gradient)
                else:
                    each[1].backward()
                    dist.send(each[0].grad, 0)
            if setting.tied:
                weight = module.embedding.weight if rank == 0 else module.head.weight
                if fault != "tied gradients not reduced":
                    dist.all_reduce(weight.grad)
            optimizer.step()
