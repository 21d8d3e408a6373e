"""Long sequences: the ranks share each sequence instead of sharing the batch, so that a sequence may be as long as all
of them can hold.

    torchrun --nproc-per-node 2 examples/long_context.py --plan cp2
    torchrun --nproc-per-node 2 examples/long_context.py --plan cp2.ulysses
    torchrun --nproc-per-node 4 examples/long_context.py --plan cp4.ulysses2
    torchrun --nproc-per-node 4 examples/long_context.py --plan cp2.tp2.rc-full
    python examples/long_context.py --plan dp1

All print the same losses, up to the last digits of float32; each of two ranks keeps half of the activations. The model
is an ordinary
one that calls torch's scaled_dot_product_attention and knows nothing of ranks. Documents share a row: positions that
begin anew at each one
keep attention inside of it, also where it lies across ranks.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.models.registry import build_reference_model


def batches(count: int, rows: int, length: int):
    """Rows of bytes of the standard library's own source, three documents a row."""
    folder = Path(json.__file__).parent
    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))), dtype=torch.uint8
    ).long()
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
        ids = torch.stack([text[start : start + length] for start in starts])
        places = torch.arange(length) % (length // 3)
        labels = ids.masked_fill(places == 0, -100)  # the first byte of a document follows from nothing
        yield {"input_ids": ids, "labels": labels, "position_ids": places.expand(rows, -1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="cp2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence", type=int, default=1536)
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    torch.manual_seed(1)
    model = build_reference_model(
        {
            "kind": "llama",
            "layers": 2,
            "hidden": 64,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 192,
            "vocab": 256,
            "seq": options.sequence,
        }
    )
    trainer = mw.parallelize(
        model, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3), plan=options.plan, clip=1.0
    )
    for batch in batches(options.steps, rows=2, length=options.sequence):
        record = trainer.step(batch)  # the whole sequence on every rank; each computes its two pieces
        if trainer.mesh.rank == 0 and record.step % 3 == 1:
            waited = record.exposed.get("context", 0.0)
            print(
                f"step {record.step}  loss {record.loss:.5f}  {record.seconds:.2f} s, {waited:.2f} of them waiting "
                "for pieces",
                flush=True,
            )
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
