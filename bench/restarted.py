"""What torchrun restarts, for bench/recovery.py: torch DDP with a checkpoint every so many steps, as its tutorials
write it. One rank."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from meshwright.models.registry import build_reference_model


def main(folder: Path, sizes: dict[str, object], steps: int, every: int, rows: int, sequence: int) -> None:
    dist.init_process_group("gloo")
    rank, world, saved = dist.get_rank(), dist.get_world_size(), folder / "checkpoint.pt"
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = DistributedDataParallel(build_reference_model(sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    begun = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begun = state["step"]
    for step in range(begun + 1, steps + 1):
        ids = torch.randint(
            0, 256, (rows // world, sequence), generator=torch.Generator().manual_seed(step * world + rank)
        )
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        if rank == 0:
            with (folder / "records.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "at": time.time()}) + "\n")
            if step % every == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                    folder / "saving.pt",
                )
                os.replace(folder / "saving.pt", saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:7]))
