"""Batches whose ranks hold unequal numbers of valid labels: who still has the loss and the gradient of one device?

The batch is padded: each row has a length of its own, and labels beyond it are -100. One process takes the mean over
all valid labels. DDP and
FSDP2, used as their documentation shows, average the ranks' means, which is another loss as soon as the ranks' counts
differ; what they
report as the loss is the mean of the ranks' losses. All systems start from the same weights and train a few steps on
the same batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.peers import default_source, machine, write
from bench.ranks import run
from bench.systems import Batch, Setting, Sizes

SMALL = Sizes(layers=2, hidden=64, heads=4, ffn=128, vocab=512, sequence=64, batch=8)
Gradients = dict[str, torch.Tensor]
Step = Callable[[Batch], tuple[float, Gradients]]


def padded(sizes: Sizes, index: int) -> Batch:
    """Rows of unlike length; short rows draw from fewer tokens than long ones, as short texts do."""
    generator = torch.Generator().manual_seed(index)
    lengths = torch.randint(sizes.sequence // 8, sizes.sequence + 1, (sizes.batch,), generator=generator)
    ids = torch.stack(
        [torch.randint(max(2, int(length) * 4), (sizes.sequence,), generator=generator) for length in lengths]
    )
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"input_ids": ids, "labels": labels}


def _native(setting: Setting, model: nn.Module, mine: Callable[[Batch], Batch]) -> Step:
    optimizer = setting.optimizer(model.parameters())

    def step(batch: Batch) -> tuple[float, Gradients]:
        loss = model(**mine(batch)).loss
        loss.backward()
        gradients = {
            name.removeprefix("module."): (
                value.grad.full_tensor() if hasattr(value.grad, "full_tensor") else value.grad
            ).clone()
            for name, value in model.named_parameters()
        }
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if mine(batch) is not batch:
            dist.all_reduce(mean)
            mean /= setting.world
        return mean.item(), gradients

    return step


def one_process(setting: Setting) -> Step:
    return _native(setting, setting.model(), lambda batch: batch)


def ddp(setting: Setting) -> Step:
    return _native(setting, nn.parallel.DistributedDataParallel(setting.model()), setting.mine)


def fsdp2(setting: Setting) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (setting.world,))
    model = setting.model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _native(setting, model, setting.mine)


def ours(plan: str) -> Callable[[Setting], Step]:
    def make(setting: Setting) -> Step:
        from meshwright.train.trainer import parallelize

        trainer = parallelize(setting.model(), setting.optimizer, plan)

        def step(batch: Batch) -> tuple[float, Gradients]:
            _, _, gradients = trainer.gradients(batch)
            return trainer.step(batch).loss, gradients or {}

        return step

    return make


def systems(world: int, batch: int) -> dict[str, Callable[[Setting], Step]]:
    own = f"dp{world}.mb{batch // world}"
    return {
        "one process": one_process,
        "torch DDP": ddp,
        "FSDP2": fsdp2,
        "ours, ZeRO 0": ours(own),
        "ours, ZeRO-3": ours(f"{own}.z3"),
        "ours, micro-batches of 1": ours(f"dp{world}.z1"),
        "ours, tensor parallel": ours(f"{f'dp{world // 2}.' if world > 2 else ''}tp2"),
        "ours, pipeline": ours(f"{f'dp{world // 2}.' if world > 2 else ''}pp2"),
    }


def measure(setting: Setting, steps: int, only: list[str]) -> list[dict[str, Any]]:
    """On every rank; rank 0's answer counts, for it has the full gradients of every system."""
    batches = [padded(setting.sizes, index) for index in range(steps)]
    truth: list[tuple[float, Gradients]] = []
    table = []
    for name, make in systems(setting.world, setting.sizes.batch).items():
        if only and truth and not any(word in name for word in only):
            continue
        step = make(setting)
        found = [step(batch) for batch in batches]
        truth = truth or found
        (_, first), (_, exact) = found[0], truth[0]
        difference = (
            torch.stack([(first[key] - exact[key]).norm() for key in exact if key in first]).norm()
            if first
            else torch.zeros(())
        )
        table.append(
            {
                "system": name,
                "first_loss": found[0][0],
                "first_loss_error": abs(found[0][0] - truth[0][0]) / truth[0][0],
                "gradient_error": (difference / torch.stack([value.norm() for value in exact.values()]).norm()).item(),
                "largest_loss_error": max(
                    abs(mine - right) / right for (mine, _), (right, _) in zip(found, truth, strict=True)
                ),
                "gradients_compared": sum(key in first for key in exact),
                "gradients": len(exact),
            }
        )
    return table


def markdown(title: str, table: list[dict[str, Any]]) -> str:
    lines = [
        f"### {title}",
        "",
        "| system | first loss | its error | error of the first gradient | largest loss error |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['system']} | {row['first_loss']:.6f} | {row['first_loss_error']:.1e} | {row['gradient_error']:.1e} "
        f"| {row['largest_loss_error']:.1e} |"
        for row in table
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.labels", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--source", choices=["huggingface", "own"], default=default_source())
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of systems; one process always runs")
    parser.add_argument("--out", default="labels")
    chosen = parser.parse_args(arguments)
    setting = Setting(SMALL, chosen.source, lr=3e-3)
    report: dict[str, Any] = {
        "machine": machine(),
        "workload": {**asdict(SMALL), "source": chosen.source},
        "tables": {},
    }
    texts = []
    for world in chosen.ranks:
        table = run(world, measure, setting, chosen.steps, chosen.only)[0]
        assert all(row["gradients_compared"] == row["gradients"] for row in table), (
            "a gradient is missing from the comparison"
        )
        report["tables"][str(world)] = table
        texts.append(markdown(f"{world} ranks", table))
        print(texts[-1] + "\n", flush=True)
    if chosen.out != "-":
        write(
            chosen.out,
            "Unequal numbers of valid labels per rank",
            report,
            texts,
            f"Errors are relative to one process, over {chosen.steps} steps.",
        )


if __name__ == "__main__":
    sys.exit(main())
