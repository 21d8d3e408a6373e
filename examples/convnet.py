"""A convolutional network of one's own that classifies drawn shapes, under any plan, with a loss of one's own.

    torchrun --nproc-per-node 2 examples/convnet.py --plan dp2.mb32
    torchrun --nproc-per-node 2 examples/convnet.py --plan dp2.z3.mb32
    torchrun --nproc-per-node 2 examples/convnet.py --plan tp2.mb64

Normalisation is by group, not by batch: batch statistics would depend on how the batch is divided over ranks.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.data.dataset import open_dataset
from meshwright.data.loader import BatchLoader
from meshwright.spec.workload import DataConfig


class Residual(nn.Module):
    """Two convolutions with a norm by group between them: the first one's channels are shared among tensor ranks, the
    second sums over them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm = nn.GroupNorm(8, 2 * width)
        self.narrow = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.relu(self.norm(self.widen(x))))


class Network(nn.Module):
    """Residual blocks and a linear head. It returns what its author likes; the loss function below knows what that
    is."""

    def __init__(self, classes: int, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def smoothed(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A mean over the rows of the batch."""
    return F.cross_entropy(logits, batch["labels"], label_smoothing=0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="dp2.z1.mb32")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group()

    data = open_dataset(DataConfig(source="shapes"), sequence=0, vocabulary=10, objective="images")
    torch.manual_seed(1)
    trainer = mw.parallelize(
        Network(data.vocabulary),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        plan=options.plan,
        loss=smoothed,
    )
    loader = BatchLoader(data, batch=64, seed=1)
    for step in range(options.steps):
        record = trainer.step(loader.rows(step))
        if trainer.mesh.rank == 0 and record.step % 10 in (0, 1):
            print(f"step {record.step}  loss {record.loss:.4f}", flush=True)
    held_out = trainer.evaluate(loader.held_out(256))
    if trainer.mesh.rank == 0:
        print(f"held-out loss {held_out:.4f} under {options.plan}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
