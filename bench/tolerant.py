"""What torchft keeps running, for bench/recovery.py: torch DDP over replica groups of one rank, as its example of DDP
writes it, and what starts anew
a group that has died. It runs under a Python that has torchft; torch and this project are enough otherwise.

`python bench/tolerant.py FOLDER SIZES STEPS ROWS SEQUENCE RANKS` starts the lighthouse and the groups; with a rank
behind it is one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

PORTS = 29400
"""The first of the ports that are tried for the lighthouse and for the store of each group."""


def group(folder: Path, sizes: dict[str, object], steps: int, rows: int, sequence: int, rank: int, ranks: int) -> None:
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

    from meshwright.models.registry import build_reference_model

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = build_reference_model(sizes)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"group-{rank}",
        timeout=timedelta(seconds=10),
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while (step := manager.current_step()) < steps:
        ids = torch.randint(
            0, 256, (rows // ranks, sequence), generator=torch.Generator().manual_seed(step * ranks + rank)
        )
        optimizer.zero_grad()
        logits = wrapped(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        if manager.current_step() > step and manager.participating_rank() == 0:
            with (folder / "records.jsonl").open("a") as file:
                file.write(
                    json.dumps(
                        {"step": manager.current_step(), "at": time.time(), "groups": manager.num_participants()}
                    )
                    + "\n"
                )


def free_ports(count: int) -> list[int]:
    import socket

    found: list[int] = []
    for port in range(PORTS, PORTS + 1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) and len(found) < count:
                found.append(port)
    return found


def keep(folder: Path, ranks: int) -> None:
    """The lighthouse, and groups that are started anew as soon as they have died."""
    lighthouse, *stores = free_ports(1 + ranks)
    light = [
        str(Path(sys.executable).parent / "torchft_lighthouse"),
        "--bind",
        f"127.0.0.1:{lighthouse}",
        "--min_replicas",
        "1",
    ]
    subprocess.Popen(light)
    time.sleep(1.0)
    environment = {
        **os.environ,
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse}",
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }

    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *sys.argv, str(rank)], env={**environment, "MASTER_PORT": str(stores[rank])}
        )

    groups = [start(rank) for rank in range(ranks)]
    while True:
        groups = [start(rank) if process.poll() is not None else process for rank, process in enumerate(groups)]
        time.sleep(0.02)


if __name__ == "__main__":
    place, sizes, *numbers = sys.argv[1:]
    steps, rows, sequence, ranks, *rank = map(int, numbers)
    if rank:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
        group(Path(place), json.loads(sizes), steps, rows, sequence, rank[0], ranks)
        del store
    else:
        keep(Path(place), ranks)
