"""What compiled blocks keep is what the planner counts, by the compiler's own cut of forward from backward (its code is
not generated here)."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import transformers
from test_activation_bytes import counted, kept_bytes, sizes_of
from test_inputs_huggingface import CONFIGURATIONS
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.models.llama import LlamaBlock, LlamaConfig, RotaryEmbedding
from meshwright.models.registry import build_reference_model
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes, sizes_from_hf_config
from meshwright.runtime import compile
from meshwright.spec.model import LayerSpec

CUTTER = "aot_eager_decomp_partition"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2", "opt", "bert", "roberta")
SLACK = 12.0
"""Bytes a token, of some thousand: a mean that the compiler does not need, and those that a CPU keeps in two bytes
where CUDA takes four."""


def reference(kind: str, layers: int) -> tuple[nn.Module, LayerSpec]:
    sizes = sizes_of(kind, layers)
    return build_reference_model(sizes.model_dump()), next(
        layer for layer in model_spec(kind, sizes).layers if layer.name == "block"
    )


def hugging_face(kind: str, layers: int) -> tuple[nn.Module, LayerSpec]:
    """Without dropout, whose masks the formulas leave out."""
    config: Any = transformers.AutoConfig.for_model(kind, **CONFIGURATIONS[kind])
    config.num_hidden_layers, config.use_cache = layers, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * layers
    for name in [name for name in vars(config) if "drop" in name and isinstance(getattr(config, name), float)]:
        setattr(config, name, 0.0)
    builder = transformers.AutoModelForMaskedLM if kind in ("bert", "roberta") else transformers.AutoModelForCausalLM
    spec = model_spec(kind, sizes_from_hf_config(config.to_dict(), kind))
    return builder.from_config(config), next(layer for layer in spec.layers if layer.name == "block")


def compiled_bytes(model: nn.Module, dtype: torch.dtype, lean: bool) -> float:
    anatomy = analyze_model(model, use_random_weights=True)
    for index in range(anatomy.count):
        block: Any = model.get_submodule(anatomy.block(index))
        block.forward = torch.compile(
            block.forward, backend=compile._backend_for_sac if lean else CUTTER, dynamic=False
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        return kept_bytes(model.train(), dtype)


NAMES = ("llama", "gpt2", "bert", *(f"hf-{kind}" for kind in FAMILIES))
CASES = list(itertools.product(NAMES, (torch.float32, torch.bfloat16), (False, True)))
CHOSEN = [("hf-opt", torch.float32, False), ("hf-gpt_neox", torch.bfloat16, True)]


@pytest.mark.parametrize(
    ("name", "dtype", "lean"), [pytest.param(*case, marks=[pytest.mark.soak] * (case not in CHOSEN)) for case in CASES]
)
def test_a_compiled_block_keeps_what_the_planner_counts(
    name: str, dtype: torch.dtype, lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compile.COMPILER_ENV, CUTTER)
    make = hugging_face if name.startswith("hf-") else reference
    torch._dynamo.reset()  # once: blocks of both models are compiled as one
    kept = [compiled_bytes(make(name.removeprefix("hf-"), layers)[0], dtype, lean) for layers in (1, 2)]
    layer, size = make(name.removeprefix("hf-"), 2)[1], dtype.itemsize
    fixed = {
        what: getattr(layer, f"{what}_fixed_split") + getattr(layer, f"{what}_fixed_whole")
        for what in ("derived", "fused")
    }
    if lean:  # sums such as 1/rms are kept all the same
        dropped = (layer.derived_split + layer.derived_whole) * size + fixed["fused"]
    else:
        dropped = (layer.fused_split + layer.fused_whole) * size + fixed["fused"]
    assert kept[1] - kept[0] == pytest.approx(counted(layer, size) - dropped, abs=SLACK)


def inductor_traffic(block: nn.Module, *given: Any) -> list[float]:
    """Bytes that the generated kernels of a forward and of a backward read and write, by the compiler's own count.
    Matrix products and attention are not generated."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    moved: list[float] = []
    build = GraphLowering._compile_to_module

    def counted_build(graph: Any) -> Any:
        result = build(graph)
        nodes = [node for node in graph.scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
        moved.append(sum(node.get_read_write_buffers_sizes() for node in nodes))
        return result

    with pytest.MonkeyPatch.context() as patched, config.patch(fx_graph_cache=False):
        patched.setattr(GraphLowering, "_compile_to_module", counted_build)
        torch._dynamo.reset()
        torch.compile(block, dynamic=False)(*given).sum().backward()
    return moved


@pytest.mark.soak
@pytest.mark.parametrize("hidden", [256, 512])
def test_a_compiled_block_moves_what_the_planner_counts(hidden: int) -> None:
    """The CPU's kernels write and read the halves of a rotation, which those of CUDA do not."""
    sizes = LlamaConfig(layers=1, hidden=hidden, heads=8, kv_heads=4, ffn=11 * hidden // 4, vocab=64, seq=128)
    formula = ArchitectureSizes(
        kind="llama",
        mlp="swiglu",
        norm="rms",
        pos="rope",
        layers=1,
        hidden=hidden,
        heads=8,
        kv_heads=4,
        ffn=11 * hidden // 4,
        vocab=64,
        seq=128,
    )
    layer = next(each for each in model_spec("llama", formula).layers if each.name == "block")
    x = torch.randn(4, 128, hidden, dtype=torch.bfloat16, requires_grad=True)
    positions = RotaryEmbedding(sizes.head_size, 1e4)(x)
    forward, backward = (each / 2 / 512 for each in inductor_traffic(LlamaBlock(sizes).bfloat16(), x, positions))
    halves = 3 * (1.5 * hidden)
    assert 0.95 < (layer.moved - layer.fused_moved) / (forward - halves) < 1.15
    assert 0.95 < 2 * (layer.moved - layer.fused_moved) / (backward - halves) < 1.15
