"""The systems side by side: each takes the same model and gives a function that does one step on the same global batch.

A step returns (weight x mean loss, weight) of its rank, so that the driver adds ranks outside the clock. Every system
has the same weights at
the start, AdamW with the same settings, float32, one thread a rank, no gradient clipping (ours computes the norm of the
gradient all the
same: its records hold it). Where nobody says which kernels AdamW runs by, torch loops over operations and ours takes
the fused ones; `fused`
gives them to all. Each is set up as its own documentation does.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

OTHERS = {"accelerate": "pip install accelerate", "deepspeed": "DS_BUILD_OPS=0 pip install deepspeed"}
"""Peers that torch does not bring, and how they come."""

Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], tuple[float, float]]


@dataclass(frozen=True)
class Sizes:
    """The workload. The default is the reference one: 20.45 M parameters, 1,024 tokens a step."""

    layers: int = 8
    hidden: int = 384
    heads: int = 6
    ffn: int = 1024
    vocab: int = 8192
    sequence: int = 128
    batch: int = 8


@dataclass(frozen=True)
class Setting:
    """What a system is set up for. `source` of the model: 'huggingface' or 'own'."""

    sizes: Sizes
    source: str
    fused: bool = False
    lr: float = 3e-4

    @property
    def world(self) -> int:
        return dist.get_world_size()

    def model(self) -> nn.Module:
        """The model with its starting weights, the same at every call and on every rank."""
        sizes = self.sizes
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if self.source == "own":
                from meshwright.models.llama import Llama, LlamaConfig

                return Llama(
                    LlamaConfig(
                        sizes.layers, sizes.hidden, sizes.heads, sizes.heads, sizes.ffn, sizes.vocab, sizes.sequence
                    )
                )
            from transformers import LlamaConfig as Config
            from transformers import LlamaForCausalLM

            return LlamaForCausalLM(
                Config(
                    hidden_size=sizes.hidden,
                    intermediate_size=sizes.ffn,
                    num_hidden_layers=sizes.layers,
                    num_attention_heads=sizes.heads,
                    num_key_value_heads=sizes.heads,
                    vocab_size=sizes.vocab,
                    max_position_embeddings=sizes.sequence,
                    tie_word_embeddings=False,
                    use_cache=False,
                )
            )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, fused=self.fused or None)

    def mine(self, batch: Batch) -> Batch:
        """This rank's share of a batch under plain data parallelism."""
        each = self.sizes.batch // self.world
        first = dist.get_rank() * each
        return {name: value[first : first + each] for name, value in batch.items()}


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, mine: Callable[[Batch], Batch]) -> Step:
    """The ordinary loop around a model that takes care of its own communication."""

    def step(batch: Batch) -> tuple[float, float]:
        loss = model(**mine(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), 1.0

    return step


def one_process(setting: Setting) -> Step:
    """Rank 0 trains alone on the whole batch; the others wait."""
    if dist.get_rank():
        return lambda batch: (0.0, 0.0)
    model = setting.model()
    return _plain(model, setting.optimizer(model.parameters()), lambda batch: batch)


def ddp(setting: Setting) -> Step:
    model = nn.parallel.DistributedDataParallel(setting.model())
    return _plain(model, setting.optimizer(model.parameters()), setting.mine)


def ddp_zero1(setting: Setting) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(setting.model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=setting.lr, fused=setting.fused or None
    )
    return _plain(model, optimizer, setting.mine)


def fsdp2(setting: Setting, reshard: bool) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (setting.world,))
    model = setting.model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _plain(model, setting.optimizer(model.parameters()), setting.mine)


def tensor_parallel(setting: Setting) -> Step:
    """DTensor tensor parallelism over 2 ranks; more ranks are FSDP2 groups (gradients sharded) around it, as torchtitan
    lays them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    groups = setting.world // 2
    mesh = dist.init_device_mesh("cpu", (groups, 2), mesh_dim_names=("dp", "tp"))
    model = setting.model()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    if groups > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    optimizer = setting.optimizer(model.parameters())
    each = setting.sizes.batch // groups
    first = (dist.get_rank() // 2) * each

    def step(batch: Batch) -> tuple[float, float]:
        ids, labels = (batch[name][first : first + each] for name in ("input_ids", "labels"))
        with loss_parallel():
            loss = shifted_loss(model(input_ids=ids).logits, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        return value.item(), 1.0

    return step


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of a causal model whose labels are its input ids."""
    return F.cross_entropy(logits.flatten(0, 1), F.pad(labels[:, 1:], (0, 1), value=-100).flatten(), ignore_index=-100)


class Part(nn.Module):
    """The layers of one pipeline stage, with the embedding before the first and the head after the last."""

    def __init__(self, model: nn.Module, stage: int, stages: int) -> None:
        super().__init__()
        body = model.model
        count = len(body.layers) // stages
        self.rotary = getattr(body, "rotary", None) or body.rotary_emb
        self.huggingface = hasattr(body, "rotary_emb")
        self.layers = nn.ModuleList(body.layers[stage * count : (stage + 1) * count])
        self.embed = body.embed_tokens if stage == 0 else None
        self.norm, self.head = (body.norm, model.lm_head) if stage == stages - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        if self.huggingface:
            positions = self.rotary(x, torch.arange(x.shape[1])[None])
            for layer in self.layers:
                x = layer(x, position_embeddings=positions)
        else:
            positions = self.rotary(x)
            for layer in self.layers:
                x = layer(x, positions)
        return self.head(self.norm(x)) if self.head is not None else x


def pipelining(setting: Setting) -> Step:
    """torch's own 1F1B over all ranks, twice as many micro-batches as ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), setting.world
    part = Part(setting.model(), rank, world)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=micro_batches(setting), loss_fn=shifted_loss)
    optimizer = setting.optimizer(part.parameters())

    def step(batch: Batch) -> tuple[float, float]:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"])
        elif rank == world - 1:
            schedule.step(target=batch["labels"], losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        return (torch.stack(losses).mean().item(), 1.0) if losses else (0.0, 0.0)

    return step


def micro_batches(setting: Setting) -> int:
    """Of a pipeline over all ranks."""
    return min(2 * setting.world, setting.sizes.batch)


def accelerate_ddp(setting: Setting) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = setting.model()
    model, optimizer = accelerator.prepare(model, setting.optimizer(model.parameters()))

    def step(batch: Batch) -> tuple[float, float]:
        loss = model(**setting.mine(batch)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), 1.0

    return step


def deepspeed(setting: Setting, stage: int) -> Step:
    """On gloo, with torch's AdamW as all others. Its one operator for cores sums in shared memory, for inference alone;
    yet it is compiled when
    communication begins, a minute without a word, and a compilation that was cut leaves a lock that every later start
    waits on for ever."""
    import deepspeed as ds
    from deepspeed.ops import __compatible_ops__ as operators

    operators["deepspeed_shm_comm"] = False
    ds.init_distributed(dist_backend="gloo", verbose=False)
    model = setting.model()
    config = {
        "train_micro_batch_size_per_gpu": setting.sizes.batch // setting.world,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    engine, *_ = ds.initialize(
        model=model, optimizer=setting.optimizer(model.parameters()), config=config, dist_init_required=False
    )

    def step(batch: Batch) -> tuple[float, float]:
        loss = engine(**setting.mine(batch)).loss
        engine.backward(loss)
        engine.step()
        return loss.item(), 1.0

    return step


def ours(setting: Setting, plan: str) -> Step:
    from meshwright.train.trainer import parallelize

    trainer = parallelize(setting.model(), setting.optimizer, plan)
    return lambda batch: (trainer.step(batch).loss, 1.0)


@cache
def is_here(peer: str) -> bool:
    """Whether one of OTHERS can be imported; it is from now on, so that ranks that are forked have it warm."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        importlib.import_module(peer)
    except Exception:  # whatever an environment of its own lacks, the others are measured
        return False
    return True


@dataclass(frozen=True)
class System:
    """`rivals` are names of systems that do the same by other means, for ours."""

    name: str
    make: Callable[[Setting], Step]
    rivals: tuple[str, ...] = ()


def _ours(name: str, plan: str, *rivals: str) -> System:
    return System(f"ours, {name}", lambda setting: ours(setting, plan), rivals)


DDP = System("torch DDP", ddp)


def replicated(world: int, batch: int) -> list[System]:
    """Data parallelism that keeps weights and gradients whole on every rank; optimizer states may be sharded."""
    own = f"dp{world}.mb{batch // world}"
    found = [DDP, System("one process", one_process), System("DDP + ZeroRedundancyOptimizer", ddp_zero1)]
    if is_here("accelerate"):
        found.append(System("accelerate DDP", accelerate_ddp))
    if is_here("deepspeed"):
        found.append(System("DeepSpeed ZeRO-1", lambda setting: deepspeed(setting, 1)))
    return [
        *found,
        _ours("ZeRO 0", own, DDP.name),
        _ours("ZeRO-1", f"{own}.z1", "DDP + ZeroRedundancyOptimizer", "DeepSpeed ZeRO-1"),
    ]


def sharded(world: int, batch: int) -> list[System]:
    """Data parallelism that shards gradients, or gradients and weights."""
    own = f"dp{world}.mb{batch // world}"
    found = [
        DDP,
        System("FSDP2, ZeRO-2 form", lambda setting: fsdp2(setting, False)),
        System("FSDP2, ZeRO-3", lambda setting: fsdp2(setting, True)),
    ]
    if is_here("deepspeed"):
        found.append(System("DeepSpeed ZeRO-3", lambda setting: deepspeed(setting, 3)))
    return [
        *found,
        _ours("ZeRO-2", f"{own}.z2", "FSDP2, ZeRO-2 form"),
        _ours("ZeRO-3", f"{own}.z3", "FSDP2, ZeRO-3", "DeepSpeed ZeRO-3"),
    ]


def divided(world: int, batch: int) -> list[System]:
    """Everything that divides the model: tensors or layers."""
    groups = world // 2
    tensor = System(f"DTensor tp2{' x FSDP2' if groups > 1 else ''}", tensor_parallel)
    stages = System(f"torch pipelining 1F1B, pp{world}", pipelining)
    around = f"dp{groups}.z2." if groups > 1 else ""
    return [
        DDP,
        tensor,
        _ours(f"tp2{' x ZeRO-2' if groups > 1 else ''}", f"{around}tp2.mb{batch // groups}", tensor.name),
        stages,
        _ours(f"pp{world}", f"pp{world}.mb{max(1, batch // (2 * world))}", stages.name),
    ]
