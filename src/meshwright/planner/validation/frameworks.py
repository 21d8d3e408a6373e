"""Describes the frameworks with which the published measurements were made (benchmark_cases.py). The properties are
those of each framework's code, with sources. No property is fitted to a measurement.

A row uses the first framework in FRAMEWORKS whose pattern matches the column `system` of the row. If the row states a
property (attention kernel, recompute, compilation, sequence parallelism), this value takes precedence over that of the
framework.

`FrameworkKernels` describes which tensors the kernels of other frameworks save for backward, and how many bytes these
kernels move through memory. Sources: Korthikanti et al. (arXiv 2205.05198), table 2, for fused kernels with dropout. In
table 2, s is the tokens, b the batch, h the hidden size and a the number of heads. A layer saves 10 s b h + 24 s b h
bytes. Attention that is not fused saves 5 a s^2 b bytes more. For all other operations the rules of autograd apply
(planner/inputs/activation_formulas.py).

The table has the saved elements and the moved elements per token, in elements of the compute dtype unless bytes are
stated. Widths are numbers of features: h of the hidden state, q of all query heads, k of all key heads, f inside the
feed-forward. The plan of a row with torch.compile has compiled blocks: they save what fused operations save, and move
what these operations move (`LayerSpec.fused_moved`).

| operation | fused: saves, moves | not fused: saves, moves |
|---|---|---|
| norm of width h | h, 2 h | as in this project's runtime |
| rotation of q and k | 0, 2 (q + k) | 0, 10 (q + k) |
| gelu of width f | f, 2 f | f, 2 f and for the bias 2 f |
| gated product of width f | 2 f, 3 f | 3 f, 5 f |
| residual | 0, 3 h | 0, 3 h |
| dropout of width h | h bytes, 0.5 h | h bytes, 2.5 h |
| scores with dropout, per token of context and head | 5 bytes, 6.5 | 5 bytes, 9.75 |
| scores without dropout, per token of context and head | 2 bytes, 4 | 2 bytes, 6 |
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from meshwright.planner.cost.cost_context import RuntimeModel, UpdateMessages
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.validation.tables import MeasurementRow
from meshwright.spec.model import LayerSpec, ModelSpec


class FrameworkKernels(NamedTuple):
    """The kernels of a framework. `norm`, `rotation`, `product` (gated or gelu) and `residual`: whether these
    operations are fused. `flash`: whether attention is one fused kernel. `dropout`: whether there is dropout. `loss` is
    the elements per logit that the forward of the loss moves through memory."""

    norm: bool = True
    rotation: bool = True
    product: bool = True
    residual: bool = True
    flash: bool = True
    dropout: bool = False
    loss: float = 8.0
    operand: float = 1.0
    """Saved elements of the compute dtype per input element of a matrix product. The value is 0.5 if an 8-bit product
    saves its 8-bit input (Transformer Engine), and 1 if it saves the input before conversion."""
    passing: float = 1.0
    """Transient elements of the compute dtype per logit while the loss runs. The value is 4 if logits are first
    converted to float32: 8 transient bytes, in addition to the 4 saved bytes of a log-probability."""
    chunked: bool = False
    """Whether logits stay in the compute dtype, and the loss converts them to float32 chunk by chunk."""
    logits: float = 0.0
    """Additional saved bytes per logit, for copies that the loss makes."""
    compiled: bool = False
    """Whether blocks are compiled, so that one kernel computes norm, rotation, product or residual sum."""
    again: bool = False
    """Whether selective recompute by operation is used, which saves the block's input, the attention output and the
    output of every second matrix product."""
    vocabulary: int = 1
    """The vocabulary is padded to a multiple of this number times the tensor ranks."""
    labelled: float = 1.0
    """Fraction of the tokens whose logits are computed. The value is below 1 for masked language models whose head
    computes only masked positions."""


def framework_model_spec(name: str, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> ModelSpec:
    """Returns the model spec of an architecture under the kernels of a framework."""
    spec = model_spec(name, sizes)
    return spec.but(layers=tuple(_framework_layer(layer, sizes, kernels) for layer in spec.layers))


def _framework_layer(layer: LayerSpec, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> LayerSpec:
    if layer.name == "block":
        return _framework_block(layer, sizes, kernels)
    if layer.name == "head":
        return _framework_head(layer, sizes, kernels)
    if layer.name == "front" and kernels.dropout:
        return layer.but(fixed_whole=layer.fixed_whole + sizes.hidden, moved=layer.moved + 2.5 * sizes.hidden)
    if layer.name == "back" and (kernels.norm or kernels.compiled) and layer.fixed_whole:
        return layer.but(
            saved_whole=sizes.hidden, fixed_whole=8.0, moved=2.0 * sizes.hidden, transient=2.0 * sizes.hidden
        )
    return layer


def _framework_head(layer: LayerSpec, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> LayerSpec:
    part = kernels.labelled
    if kernels.chunked:
        layer = layer.but(fixed_split=layer.fixed_split / 2, transient=layer.transient / 4)
    return layer.but(
        flops=layer.flops * part,
        moved=kernels.loss * sizes.vocab * part,
        fixed_split=(layer.fixed_split + kernels.logits * sizes.vocab) * part,
        transient=kernels.passing * layer.transient * part,
    )


def _framework_block(layer: LayerSpec, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> LayerSpec:
    h, q, k = sizes.hidden, sizes.query_width, sizes.key_width
    experts = layer.routed > 0
    f = _feed_forward_width(sizes, experts)
    moved = _moved_elements(sizes, kernels, experts)
    if kernels.compiled:
        kernels = kernels._replace(norm=True, rotation=True, product=True, residual=True)
    eager_norm = sizes.norm == "rms" and not kernels.norm
    whole = (sizes.norms + 2.0 * kernels.operand) * h
    fixed_whole = 8.0 * sizes.norms + (sizes.norms * (2.0 * h) if eager_norm else 0.0)
    split = 2.0 * q + 2.0 * k
    split += ((2.0 if kernels.product else 3.0) if sizes.gated else 1.0) * f + kernels.operand * f
    fixed_whole += (2.0 * h if kernels.dropout else 0.0) + (8.0 * sizes.experts if experts else 0.0)
    whole += 2.0 * sizes.top_k * h if experts else 0.0
    core = {"core_fixed": 4.0 * sizes.heads, "core_context": 0.0, "context_moved": 0.0}
    flops = layer.attention_flops
    if not kernels.flash:
        core = {
            "core_fixed": 0.0,
            "core_context": (5.0 if kernels.dropout else 2.0) * sizes.heads,
            "context_moved": (4.0 + 2.5 * kernels.dropout) * sizes.heads * (1.0 if kernels.residual else 1.5),
        }
        flops = 4.0 * q
    fused = dict.fromkeys((name for name in LayerSpec.model_fields if name.startswith("fused_")), 0.0)
    fused["fused_moved"] = moved - _moved_elements(sizes, kernels, experts)
    return (
        layer.but(
            attention_flops=flops,
            moved=moved,
            saved_split=split,
            saved_whole=whole,
            fixed_split=core["core_fixed"],
            fixed_whole=fixed_whole,
            **core,
            **fused,
            transient=h + (2 if sizes.gated else 1) * f,
        )
        if not kernels.again
        else layer.but(
            attention_flops=flops,
            moved=moved,
            saved_split=2.0 * q + k + f,
            saved_whole=2.0 * h,
            fixed_split=core["core_fixed"],
            fixed_whole=0.0,
            **core,
            **fused,
            transient=whole + split + h + f,
        )
    )


def _feed_forward_width(sizes: ArchitectureSizes, experts: bool) -> float:
    return float(sizes.moe_ffn * (sizes.top_k + sizes.shared_experts) if experts else sizes.ffn)


def _moved_elements(sizes: ArchitectureSizes, kernels: FrameworkKernels, experts: bool) -> float:
    """Returns the elements per token that the forward of an eager block moves under `kernels`."""
    h, q, k, f = sizes.hidden, sizes.query_width, sizes.key_width, _feed_forward_width(sizes, experts)
    moved = sizes.norms * h * (12.0 if sizes.norm == "rms" and not kernels.norm else 2.0) + 2 * 3.0 * h
    if sizes.pos == "rope":
        moved += (2.0 if kernels.rotation else 10.0) * (q + k)
    moved += 2.0 * (q + 2 * k)
    if sizes.gated:
        moved += (3.0 if kernels.product else 5.0) * f
    else:
        moved += (2.0 if kernels.product else 4.0) * f
    if kernels.dropout:
        moved += 1.0 * h if kernels.residual else 5.0 * h
    return moved + (8.0 * sizes.top_k * h if experts else 0.0)


MEGATRON_VOCABULARY = 128
"""`FrameworkKernels.vocabulary` of Megatron-LM and its descendants (NVIDIA/Megatron-LM
megatron/training/arguments.py:2441, deepspeedai/Megatron-DeepSpeed megatron/tokenizer/tokenizer.py:58)."""


FUSED_LOSS_COPY = 4.0
"""Bytes per logit of a float32 copy that torch.compile makes in the fused loss of Megatron-LM, because a sum reads the
logits that the loss overwrites (NVIDIA/Megatron-LM megatron/core/fusions/fused_cross_entropy.py:26-33 explains this and
avoids it; the runs are older)."""


class Framework(NamedTuple):
    """A framework: name, pattern for the column `system`, source of the properties, and its runtime and kernels. `bias`
    and `learned`: whether plain GPT models of this framework have biases and learned positions."""

    name: str
    pattern: str
    source: str
    practice: RuntimeModel
    kernels: FrameworkKernels
    bias: bool = False
    learned: bool = False
    balanced: bool = False
    """Whether blocks are split into stages by FLOPs, including those of the head. Otherwise stages have equal numbers
    of blocks."""
    selective: str = "core"
    """The operations that `selective` recompute recomputes in this framework: the attention core (`core`), every second
    matrix product and the operations around it (`op`), or only gelu (`gelu`)."""


CUDNN_ATTENTION_SPEEDUP = 1.5
"""Rate of cuDNN's attention on Hopper divided by the rate of FlashAttention-2. In forward, cuDNN reaches between 500
and 550 TFLOP/s, and FlashAttention-2 reaches 350 TFLOP/s (arXiv 2407.08608, figure 5)."""

CHUNKED_LOSS_PATTERN = r"chunked cross entropy|activation checkpointing \(cumulative\)"
"""Matches the notes of the configurations in torchtune's table that use the chunked loss. Each row of torchtune's table
adds one option to the previous row. The chunked loss is added before recompute, so the pattern also matches the row
that adds recompute."""

FLASH1_ATTENTION_SPEED = 0.55
"""Rate of FlashAttention-1 divided by the rate of FlashAttention-2. Version 2 is about twice as fast (arXiv
2307.08691). In the tables, `flash-attn` without a number means version 1."""

EAGER_KERNELS = FrameworkKernels(norm=False, rotation=False, product=False, residual=False, loss=7.0, passing=4.0)
MEGATRON_RUNTIME = RuntimeModel(gradient=4, reduced=4, reduce_hidden=False)
MEGATRON_CORE_RUNTIME = RuntimeModel(
    gather_hidden=True, attention=CUDNN_ATTENTION_SPEEDUP, tensor_hidden=0.5, dgrad_hidden=True
)

OVERLAPPED_DGRAD_SOURCES = r"2205\.05198"
"""Matches the sources of runs with Megatron-LM after 2 September 2021 (NVIDIA/Megatron-LM, commit 16c90445e7). Since
then its backward overlaps the reduction of input gradients, and the second gather of inputs, with weight gradients
(megatron/core/tensor_parallel/layers.py:675-708). The code of arXiv 2104.04473 is older."""

FRAMEWORKS = (
    Framework(
        "Megatron-Core",
        r"Megatron-Bridge|NeMo",
        "NeMo and Megatron-Bridge performance recipes: distributed optimizer with overlapped reduction and gather, "
        "gradients stored and reduced in bf16 (grad_reduce_in_fp32 off), Transformer Engine, cuDNN attention, "
        "tensor-parallel communication overlapped in chunks; experts with forced balance and one copy of a token per "
        "node (moe_router_force_load_balancing and moe_flex_dispatcher_backend in NVIDIA-NeMo/Megatron-Bridge, "
        "src/megatron/bridge/perf_recipes/qwen/h100/qwen3_moe.py); the host waits for the tokens of each expert unless "
        "experts drop and pad (NVIDIA/Megatron-LM megatron/core/transformer/moe/token_dispatcher.py:921-958)",
        MEGATRON_CORE_RUNTIME._replace(node_copies=True),
        FrameworkKernels(vocabulary=MEGATRON_VOCABULARY),
        learned=True,
        bias=True,
    ),
    Framework(
        "Megatron-Core",
        r"Megatron-Core",
        "Megatron-LM README (H100, weak scaling): distributed optimizer with overlapped reduction and gather, "
        "Transformer Engine, "
        "cuDNN attention, tensor-parallel communication overlapped in chunks, float32 main gradients",
        MEGATRON_CORE_RUNTIME._replace(gradient=4, reduced=4),
        FrameworkKernels(vocabulary=MEGATRON_VOCABULARY),
        learned=True,
        bias=True,
    ),
    Framework(
        "Megatron-DeepSpeed",
        r"Megatron-DeepSpeed",
        "BigScience chronicles: fused softmax, gradients reduced after backward; DeepSpeed stores bf16 gradients and a "
        "flat float32 buffer of them (deepspeedai/DeepSpeed deepspeed/runtime/bf16_optimizer.py:176), and refuses "
        "ZeRO 2 and 3 with a pipeline (deepspeed/runtime/pipe/engine.py:76)",
        RuntimeModel(reduce_hidden=False),
        FrameworkKernels(flash=False, dropout=True, vocabulary=MEGATRON_VOCABULARY),
        bias=True,
        learned=True,
    ),
    Framework(
        "Megatron-LM",
        r"Megatron-LM",
        "arXiv 2104.04473 and 2205.05198, and the code of these years: fused softmax, bias-gelu and bias-dropout-add, "
        "dropout 0.1, unfused attention, float32 main gradients (18 bytes a parameter), one all-reduce after backward",
        MEGATRON_RUNTIME,
        FrameworkKernels(flash=False, dropout=True, vocabulary=MEGATRON_VOCABULARY),
        bias=True,
        learned=True,
    ),
    Framework(
        "nanotron",
        r"nanotron",
        "huggingface/nanotron, branch nouamane/bench2, with which the Ultra-Scale tables were made: flash-attention 2, "
        "fused norm and rotation, silu and product not fused (src/nanotron/models/llama.py:201); float32 accumulators; "
        "bf16 gradients are freed after each micro-batch (optim/gradient_accumulator.py:228); DDP with its buckets "
        "only with several data ranks and without ZeRO (trainer.py:797), its all-reduce overlapped with the last "
        "backward; with ZeRO-1 one all-reduce of all gradients after backward (trainer.py:532) and one all-gather of "
        "all weights after the update (optim/zero.py:234), whose result is copied slice by slice (distributed.py:214); "
        "logits sharded by vocabulary: bf16, and two copies in float32 (parallel/tensor_parallel/functional.py:43); "
        "backward gathers inputs again (tp_recompute_allgather, config/parallelism_config.py:37, which "
        "scaling_benchmarks.py does not change) while it computes gradients of inputs (functional.py:289), and reduces "
        "these while it computes weight gradients (functional.py:318)",
        RuntimeModel(gradient=4, bucketed=2, reduced=4, dgrad_hidden=True, messages=UpdateMessages.whole),
        FrameworkKernels(product=False, loss=10.0, logits=6.0),
        balanced=True,
    ),
    Framework(
        "FSDP",
        r"llm-foundry|Composer",
        "llm-foundry: FSDP1 with flash attention, low-precision LayerNorm, eager gelu, no biases, learned positions, "
        "no dropout; gradients "
        "reduced in bf16 (PURE) or float32 (DEFAULT, the H100 tables)",
        RuntimeModel(),
        FrameworkKernels(product=False, residual=False, loss=7.0),
        learned=True,
    ),
    Framework(
        "torchtitan",
        r"torchtitan",
        "torchtitan: FSDP2 with float32 shards, bf16 gather, float32 reduction; SDPA; compiled block by block where "
        "stated; selective recompute by operation, which recomputes every second product; with a pipeline, weights "
        "stay gathered (pytorch/torchtitan torchtitan/distributed/fsdp.py:124-133), and gradients are reduced after "
        "the last backward of a step (pytorch/pytorch torch/distributed/pipelining/stage.py:845-847); all-reduce over "
        "replicas in a stream of its own (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:657)",
        RuntimeModel(reduced=4, once_per_step=True, replicas_hidden=True),
        EAGER_KERNELS,
        selective="op",
    ),
    Framework(
        "Lightning FSDP",
        r"Lightning|TinyLlama",
        "TinyLlama README: FSDP, flash-attention 2, fused norm, swiglu, rotation and cross-entropy",
        RuntimeModel(),
        FrameworkKernels(loss=3.0),
    ),
    Framework(
        "InternEvo",
        r"InternEvo",
        "InternEvo training performance page: flash attention, fused norm, hybrid ZeRO-1, bf16 gradients; by default "
        "reductions overlap with backward and updated weights do not overlap (configs/7B_sft.py:97-98); backward "
        "all-reduces buckets over all data ranks at any shard size "
        "(InternLM/InternEvo internlm/solver/optimizer/hybrid_zero_optim.py:300 and 518, utils.py:117); each rank "
        "broadcasts the weights that it owns after the update (hybrid_zero_optim.py:809-829)",
        RuntimeModel(replicas_hidden=True, messages=UpdateMessages.owners),
        FrameworkKernels(),
    ),
    Framework(
        "HAI-LLM",
        r"HAI-LLM",
        "DeepSeek-V3 (arXiv 2412.19437), sections 3.2 and 3.3: ZeRO-1, one copy of a token per node, all-to-all of "
        "experts hidden behind the compute of the opposite micro-batch (DualPipe), norms and up-projections recomputed",
        RuntimeModel(attention=CUDNN_ATTENTION_SPEEDUP, node_copies=True, dispatch_hidden=1.0, gather_hidden=True),
        FrameworkKernels(),
    ),
    Framework(
        "torchtune",
        r"torchtune",
        "torchtune README: pure bf16, weights, gradients and states; eager modules of torch; gradients freed after the "
        "update (pytorch/torchtune recipes/full_finetune_single_device.py:635)",
        RuntimeModel(master=0, fleeting=True),
        EAGER_KERNELS,
    ),
    Framework(
        "Hugging Face",
        r"HF Trainer",
        "transformers modules, not compiled; DeepSpeed with bf16 gradients",
        RuntimeModel(),
        EAGER_KERNELS,
    ),
    Framework(
        "llm.c",
        r"llm\.c",
        "llm.c: CUDA without a framework, cuDNN attention, gelu recomputed, ZeRO-1 after backward; one kernel reads "
        "the logits and writes their gradients in place (karpathy/llm.c llmc/fused_classifier.cuh); vocabulary padded "
        "to 128 (train_gpt2.cu, padded_vocab_size)",
        RuntimeModel(reduce_hidden=False, launch=0.1),
        FrameworkKernels(loss=1.0, vocabulary=128),
        bias=True,
        learned=True,
        selective="gelu",
    ),
    Framework(
        "OneFlow",
        r"OneFlow",
        "OneFlow-GPT of DLPerf: a compiled graph, fused softmax, dropout, reduction overlapped with backward",
        RuntimeModel(launch=0.3),
        FrameworkKernels(flash=False, dropout=True),
        bias=True,
        learned=True,
    ),
    Framework(
        "DDP",
        r"DDP|DeepSpeed transformer",
        "NVIDIA DeepLearningExamples BERT: DDP, half precision by AMP, unfused attention, dropout, head only on masked "
        "positions (20 of 128, 80 of 512), vocabulary padded to 8 (NVIDIA/DeepLearningExamples "
        "PyTorch/LanguageModeling/BERT/run_pretraining.py, prepare_model_and_optimizer)",
        RuntimeModel(),
        FrameworkKernels(flash=False, dropout=True, residual=False, product=True, labelled=0.156, vocabulary=8),
        bias=True,
        learned=True,
    ),
    Framework(
        "Alpa",
        r"Alpa",
        "Alpa: XLA fuses element-wise operations, attention is separate matrix products; the whole step is one "
        "compiled program; gradients are reduced only after the last micro-batch (alpa-projects/alpa "
        "alpa/pipeline_parallel/computation.py:349, alpa/mesh_executable.py:885-894)",
        RuntimeModel(launch=0.3, once_per_step=True),
        FrameworkKernels(flash=False),
        bias=True,
        learned=True,
    ),
)


def _megatron_transformer_engine(flags: dict[str, Any]) -> Framework:
    """Returns the description of Megatron-LM with Transformer Engine under the command-line options `flags`. Missing
    options have Megatron's defaults (dropout 0.1, biases, no overlap)."""
    return Framework(
        "Megatron-Core",
        "",
        "Megatron-LM tests/functional_tests: model_config.yaml",
        RuntimeModel(
            gradient=4,
            reduced=4,
            reduce_hidden=bool(flags.get("overlap-grad-reduce")),
            gather_hidden=bool(flags.get("overlap-param-gather")),
            attention=CUDNN_ATTENTION_SPEEDUP,
            dgrad_hidden=True,
        ),
        FrameworkKernels(
            flash=flags.get("attention-backend") != "unfused",
            dropout=flags.get("hidden-dropout") != 0.0,
            vocabulary=MEGATRON_VOCABULARY,
            logits=FUSED_LOSS_COPY * bool(flags.get("cross-entropy-loss-fusion")),
        ),
        bias=not flags.get("disable-bias-linear"),
        learned=flags.get("position-embedding-type", "learned_absolute") == "learned_absolute",
    )


EAGER_TORCH = Framework(
    "plain",
    "",
    "a framework that is not in FRAMEWORKS: eager PyTorch modules, reduction overlapped with backward; with a "
    "pipeline, gradients are reduced after the last backward of a step, as in torch "
    "(torch/distributed/pipelining/stage.py:845)",
    RuntimeModel(fleeting=True, once_per_step=True),
    EAGER_KERNELS,
    bias=True,
    learned=True,
)


def identify_framework(row: MeasurementRow) -> Framework:
    """Returns the framework of `row`, changed by the properties that the row states. Rows of an unknown framework use
    EAGER_TORCH."""
    word = row.text("system")
    found = next((system for system in FRAMEWORKS if re.search(system.pattern, word)), EAGER_TORCH)
    if (flags := row.flags).get("transformer-impl") == "transformer_engine":
        found = _megatron_transformer_engine(flags)
    kernels, practice = found.kernels, found.practice
    if found.name == "Megatron-LM" and re.search(OVERLAPPED_DGRAD_SOURCES, row.text("source_ref")):
        practice = practice._replace(dgrad_hidden=True)
    if "tokendrop" in row.text("model"):  # experts get a fixed number of tokens
        practice = practice._replace(routing_waits=False)
    stated = row.text("attn_impl").lower()
    if stated == "flash-attn":
        practice = practice._replace(attention=FLASH1_ATTENTION_SPEED)
    if stated:
        kernels = kernels._replace(flash="flash" in stated or "sdpa" in stated)
    if row.text("compile") == "1":
        kernels = kernels._replace(compiled=True, loss=5.0)
    if row.text("prec_class") == "fp8":
        practice = practice._replace(products="fp8")
        kernels = kernels._replace(operand=0.5 if found.name == "Megatron-Core" else 1.0)
    if "DEFAULT (" in row.text("notes") or "mixed_precision=DEFAULT" in row.text("notes"):
        practice = practice._replace(reduced=4)
    if row.text("activation_ckpt") == "selective" and found.selective == "op":
        practice = practice._replace(repeated=(0.5, 1.0))
        kernels = kernels._replace(again=True)
    if re.search(CHUNKED_LOSS_PATTERN, row.text("notes")):
        kernels = kernels._replace(chunked=True)
    if found.name == "Megatron-DeepSpeed" and row.text("prec_class") == "bf16":
        practice = practice._replace(gradient=6)
    if found.name == "nanotron" and row.text("zero_stage") == "1":
        practice = practice._replace(reduce_hidden=False)
    return found._replace(kernels=kernels, practice=practice)
