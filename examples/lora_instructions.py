"""Instruction tuning of a Hugging Face model by LoRA: only adapters are trained, the frozen weights start from
safetensors, each rank reading
its own part.

    torchrun --nproc-per-node 2 examples/lora_instructions.py --plan tp2
    torchrun --nproc-per-node 2 examples/lora_instructions.py --plan dp2.z3 --steps 30

Nothing is downloaded: a small Llama with random weights, its tokenizer and a chat template are made in a temporary
folder, and the
conversations ask what functions of Python's standard library do. Put a folder of your own there (--model) and it is
fine-tuned instead.
The adapter is saved as peft reads it, and answers a question. Needs: pip install 'meshwright[huggingface,peft]'

The same from the command line: meshwright train --model FOLDER --lora rank=8 --set data.source=chat.jsonl
"""

import argparse
import ast
import json
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.checkpoint.huggingface import export_adapter
from meshwright.data.dataset import open_dataset
from meshwright.data.loader import BatchLoader
from meshwright.data.tokens import train_bpe
from meshwright.spec.job import ModelSource
from meshwright.spec.workload import DataConfig, LoraConfig
from meshwright.train.model import attach_lora, build_model

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversations() -> list[dict]:
    """What each documented function of a few modules of the standard library does."""
    found = []
    for name in ("argparse", "shutil", "statistics", "textwrap", "inspect", "random", "calendar", "tarfile"):
        tree = ast.parse(Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            says = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if says:
                ask = {"role": "user", "content": f"What does {name}.{node.name} do?"}
                found.append({"messages": [ask, {"role": "assistant", "content": says.splitlines()[0]}]})
    return found


def make_model(folder: Path, texts: list[str]) -> None:
    """A small Llama in Hugging Face's form: configuration, weights, tokenizer, chat template."""
    tokenizer = json.loads(train_bpe(texts, 1000))
    for number, word in enumerate(("<|im_start|>", "<|im_end|>"), 1000):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": word, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, max_position_embeddings=256, eos_token_id=1001, **sizes)
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="dp2.z3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--model", type=Path, help="folder with config.json, safetensors and a tokenizer with a chat template"
    )
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group()

    place: list = [tempfile.mkdtemp() if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if place[0] is not None:
        chats = conversations()
        (Path(place[0]) / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        if options.model is None:
            make_model(Path(place[0]), [message["content"] for chat in chats for message in chat["messages"]])
    if dist.is_initialized():
        dist.broadcast_object_list(place)
    work = Path(place[0])
    folder = options.model or work

    data = open_dataset(
        DataConfig(source=str(work / "chat.jsonl"), tokenizer=str(folder)), sequence=256, positions=True
    )
    lora = LoraConfig(rank=8, alpha=16)
    model = build_model(
        ModelSource(name="model", folder=str(folder)), seed=1
    )  # without memory: its weights are read when it is cut
    attach_lora(model, lora, seed=1)  # or wrap it by peft yourself
    trainer = mw.parallelize(
        model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), plan=options.plan, clip=1.0
    )
    trainer.load_weights(folder)

    loader = BatchLoader(data, batch=8, seed=1)
    if trainer.mesh.rank == 0:
        print(data.describe())
    for step in range(options.steps):
        record = trainer.step(loader.rows(step))
        if trainer.mesh.rank == 0 and record.step % 5 in (0, 1):
            print(f"step {record.step}  loss {record.loss:.4f}", flush=True)
    saved = trainer.save(work / "checkpoints")

    if trainer.mesh.rank == 0:
        held = trainer.bytes()
        print(
            f"a rank holds {held['parameters']:,} bytes of weights, {held['gradients']:,} of gradients, "
            f"{held['optimizer']:,} of optimizer states"
        )
        export_adapter(saved, work / "adapter", lora, str(folder), {})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        whole = AutoModelForCausalLM.from_pretrained(folder)
        whole.load_adapter(str(work / "adapter"))
        ask = [{"role": "user", "content": "What does shutil.copy do?"}]
        question = tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = whole.generate(**question, max_new_tokens=12, do_sample=False)
        print(
            f"adapter in {work / 'adapter'}; it answers: "
            f"{tokenizer.decode(answer[0, question['input_ids'].shape[1] :])!r}"
        )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
