"""A training loop of one's own, for a model of one's own. Three lines differ from the loop for one device; they are
marked.

    torchrun --nproc-per-node 2 examples/own_loop.py --plan dp2.z1
    torchrun --nproc-per-node 2 examples/own_loop.py --plan tp2
    torchrun --nproc-per-node 2 examples/own_loop.py --plan pp2
    python examples/own_loop.py --plan dp1

The four print the same losses, up to the last digits of float32.
"""

import argparse
import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshwright as mw


class Block(nn.Module):
    """Attention and a feed-forward part, as anybody would write them: nothing here knows of ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).view(batch, length, -1, x.shape[-1] // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(count: int, rows: int = 8, length: int = 64):
    """The same whole batch on every rank; each takes its part of it."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        starts = torch.randint(len(text) - length - 1, (rows,), generator=generator).tolist()
        window = torch.stack([text[start : start + length + 1] for start in starts])
        yield {"input_ids": window[:, :-1], "labels": window[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="dp2", help="how the model is laid over the ranks")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    torch.manual_seed(1)
    model = Decoder()

    # one device: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = mw.parallelize(model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), plan=options.plan)  # 1

    for batch in batches(options.steps):
        # one device: logits = model(batch["input_ids"]); loss = F.cross_entropy(logits.flatten(0, 1),
        # batch["labels"].flatten());
        #             loss.backward(); optimizer.step(); optimizer.zero_grad()
        record = trainer.step(batch)  # 2
        if trainer.mesh.rank == 0 and record.step % 5 in (0, 1):
            print(f"step {record.step}  loss {record.loss:.5f}", flush=True)

    # one device: weights = model.state_dict()
    weights = trainer.full_state_dict()  # 3: whole tensors on rank 0, None on the others
    if weights is not None:
        print(f"{sum(tensor.numel() for tensor in weights.values()):,} parameters, trained as {options.plan}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
