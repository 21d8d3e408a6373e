"""Hugging Face's LlamaForCausalLM, unmodified, from a configuration, trained from scratch on text that every machine
has.

    torchrun --nproc-per-node 2 examples/huggingface_pretrain.py --plan pp2
    torchrun --nproc-per-node 2 examples/huggingface_pretrain.py --plan tp2.sp

The blocks, the tied or untied head and the pairs of column and row layers are found in the model. At the end the
weights are saved in the
form that `LlamaForCausalLM.from_pretrained` reads. Needs: pip install 'meshwright[huggingface]'
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.data.dataset import open_dataset
from meshwright.data.loader import BatchLoader
from meshwright.spec.workload import DataConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="dp2.z3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for the trained weights")
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group()

    data = open_dataset(DataConfig(source="stdlib", tokenizer="bytes"), sequence=128)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    trainer = mw.parallelize(
        model, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3), plan=options.plan, clip=1.0
    )

    loader = BatchLoader(data, batch=8, seed=1)
    for step in range(options.steps):
        record = trainer.step(loader.rows(step))
        if trainer.mesh.rank == 0 and record.step % 5 in (0, 1):
            print(f"step {record.step}  loss {record.loss:.4f}  gradient norm {record.gradient_norm:.3f}", flush=True)
    held_out = trainer.evaluate(loader.held_out(16))

    weights = trainer.full_state_dict()
    if weights is not None:
        print(f"held-out loss {held_out:.4f} under {options.plan}")
        if options.out:
            whole = LlamaForCausalLM(config)
            whole.load_state_dict(weights, strict=not config.tie_word_embeddings)
            whole.save_pretrained(options.out)
            print(f"weights in {options.out}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
