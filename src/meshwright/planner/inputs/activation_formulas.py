"""Computes the activations that each layer of a known architecture saves for backward, and the elements that it moves
through memory, by closed formulas. architecture.py writes the results to the model spec, from which the cost model
reads them. The formulas count the tensors that eager PyTorch with fused attention saves.

Guarantees: for the reference models and Hugging Face's Llama, GPT-2, Qwen 3, NeoX and BERT, the formulas count exactly
the bytes of all storages that autograd saves. A test compares the formulas with autograd.

The formulas follow these rules of autograd:

- A matrix product saves its input. The input is saved once, even if several products read it. Attention saves q, k, v,
  its output and a log-sum-exp of 4 bytes per head.
- RMSNorm in float32 saves a float32 input (4 bytes), the normed input in the compute dtype, and 1/rms. LayerNorm saves
  its input, mean and 1/std.
- silu and gelu save their input, relu saves its output, and an element-wise product saves both factors. GPT-2's gelu
  consists of several operations and saves four tensors.
- A sum saves nothing, so a residual connection saves only the tensors that the next norm saves.
- With selective recompute (analysis/recompute_tape.py), the outputs of norms, activation functions, rotations and
  copies are recomputed. The inputs of the recompute are the outputs of matrix products and attention, and the two sums
  of the residual stream. The input of a float32 norm is saved in the compute dtype.
- A compiled block does not save recomputable outputs that no matrix product reads, except 1/rms.

A compiled block moves fewer elements (`fused_moved`): one kernel reads the input of a chain of operations once, and
writes its output once. Per token, with h features of the hidden state, q of the queries, k of the keys and f inside the
feed-forward:

| operations | eager | compiled |
|---|---|---|
| RMSNorm in float32 | 12 h | 2 h |
| rotation | 10 (q + k) | 2 (q + k) |
| activated gate times up | 5 f | 3 f |
| sum of the residual stream | 3 h | 3 h |

Expert layers are not compiled, so their gates move as many elements as in eager blocks. torch's Inductor counts the
same traffic for the kernels that it generates (tests/mesh/test_compiled_activations.py).

`transient` is the peak memory that the backward of a layer needs in addition to the saved activations. For a block,
`transient` is one tensor of the hidden size plus gradients of the feed-forward width: two for a gated product or a
composite gelu, otherwise one. Tensor parallelism divides the tensors after a column-parallel weight; sequence
parallelism divides all other tensors. Attention without a fused kernel (ALiBi in some libraries) also saves the
probabilities (sequence x heads per token). The formulas do not count these. Dropout is off in the reference models;
otherwise each dropout mask would add one element.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes

GATE_TENSOR = "activated gate"


class SavedTensorSize(NamedTuple):
    """The size of one saved tensor: `elements` per token in the compute dtype, or `fixed` bytes per token in another
    dtype.

    `what` describes the tensor. `split`: whether tensor parallelism shards the tensor. `derived`: whether selective
    recompute recomputes the tensor, in which case `instead` elements per token in the compute dtype are saved in its
    place. `fused`: whether a compiled block does not save the tensor.
    """

    what: str
    elements: float = 0.0
    fixed: float = 0.0
    split: bool = False
    derived: bool = False
    instead: float = 0.0
    fused: bool = False


class LayerActivations(TypedDict):
    """The fields of `LayerSpec` that describe activations and memory traffic, per token."""

    moved: float
    saved_split: float
    saved_whole: float
    fixed_split: float
    fixed_whole: float
    transient: float
    derived_split: float
    derived_whole: float
    derived_fixed_split: float
    derived_fixed_whole: float
    derived_moved: float
    fused_moved: float
    fused_split: float
    fused_gates: float
    fused_whole: float
    fused_fixed_split: float
    fused_fixed_whole: float


def layer_activations(
    saved: list[SavedTensorSize], moved: float, transient: float, again: float = 0.0, fused_moved: float = 0.0
) -> LayerActivations:
    """Returns the fields of a layer that saves the tensors `saved`.

    `moved` is the elements per token that the layer moves through memory, of which a compiled block does not move
    `fused_moved`. `transient` is as in the module docstring, in elements per token. `again` is the elements per token
    that selective recompute moves. `again` and `fused_moved` are 0 for layers outside blocks, because these layers are
    neither recomputed nor compiled.
    """
    derived = [entry for entry in saved if entry.derived and again]
    fused = [entry for entry in derived if entry.fused]
    return LayerActivations(
        moved=moved,
        saved_split=sum(entry.elements for entry in saved if entry.split),
        saved_whole=sum(entry.elements for entry in saved if not entry.split),
        fixed_split=sum(entry.fixed for entry in saved if entry.split),
        fixed_whole=sum(entry.fixed for entry in saved if not entry.split),
        transient=transient,
        derived_split=sum(entry.elements - entry.instead for entry in derived if entry.split),
        derived_whole=sum(entry.elements - entry.instead for entry in derived if not entry.split),
        derived_fixed_split=sum(entry.fixed for entry in derived if entry.split),
        derived_fixed_whole=sum(entry.fixed for entry in derived if not entry.split),
        derived_moved=again,
        fused_moved=fused_moved,
        fused_split=sum(entry.elements - entry.instead for entry in fused if entry.split),
        fused_gates=sum(entry.elements for entry in fused if entry.what == GATE_TENSOR),
        fused_whole=sum(entry.elements - entry.instead for entry in fused if not entry.split),
        fused_fixed_split=sum(entry.fixed for entry in fused if entry.split),
        fused_fixed_whole=sum(entry.fixed for entry in fused if not entry.split),
    )


def norm_saved(
    sizes: ArchitectureSizes, width: float, split: bool = False, groups: float = 1.0
) -> list[SavedTensorSize]:
    """Returns the tensors that a norm saves. The norm has `width` features per token in `groups` separately normed
    groups. `split`: whether tensor parallelism shards these tensors. The output of the norm is not included, because
    the next matrix product saves this tensor."""
    if sizes.norm == "rms":
        return [
            SavedTensorSize(
                "norm: input in float32", fixed=4 * width, split=split, derived=True, instead=width, fused=True
            ),
            SavedTensorSize("norm: normed input", width, split=split, derived=True, fused=True),
            SavedTensorSize("norm: 1/rms", fixed=4 * groups, split=split, derived=True),
        ]
    return [
        SavedTensorSize("norm: input", width, split=split),
        SavedTensorSize("norm: mean and 1/std", fixed=8 * groups, split=split),
    ]


def attention_saved(sizes: ArchitectureSizes) -> list[SavedTensorSize]:
    """Returns the tensors that self-attention saves for backward."""
    h, q, k = sizes.hidden, sizes.query_width, sizes.key_width
    saved = [SavedTensorSize("input of query, key, value", h, derived=sizes.kind != "bert")]
    if sizes.qk_norm:
        saved += norm_saved(sizes, q, True, sizes.heads) + norm_saved(sizes, k, True, sizes.kv_heads)
    if sizes.mla is not None:
        part = sizes.mla
        q, k = sizes.heads * (part.nope + part.rope), sizes.heads * (part.nope + part.rope)
        ranks = part.q_lora + part.kv_lora
        saved += [SavedTensorSize("low-rank projections before and after their norms", 2 * ranks, fixed=4 * ranks)]
        saved += [
            SavedTensorSize("query, key, value", q + k + sizes.heads * part.v, split=True),
            SavedTensorSize("output", sizes.heads * part.v, split=True),
        ]
    else:
        made = sizes.qk_norm or sizes.kind == "neox"  # queries and keys are computed from tensors that are saved anyway
        saved += [
            SavedTensorSize("query", q, split=True, derived=made),
            SavedTensorSize("key", k, split=True, derived=made),
        ]
        saved += [SavedTensorSize("value", k, split=True), SavedTensorSize("output", q, split=True)]
    if sizes.kind == "neox":
        saved += [
            SavedTensorSize("query and key before rotation, in the fused projection", 2 * q, split=True),
            SavedTensorSize("contiguous copy of the output", q, split=True, derived=True),
        ]
    return [*saved, SavedTensorSize("log-sum-exp", fixed=4 * sizes.heads, split=True)]


def feed_forward_saved(sizes: ArchitectureSizes, width: float) -> list[SavedTensorSize]:
    """Returns the tensors that the feed-forward saves between its input and its last matrix product. Each of them has
    `width` features per token."""
    saved = {
        "swiglu": ("gate", GATE_TENSOR, "up", "product"),
        "geglu": ("gate", GATE_TENSOR, "up", "product"),
        "gelu": ("input of gelu", "output of gelu"),
        "gelu_new": ("input of gelu", "half of it", "tanh", "1 + tanh", "output of gelu"),
        "relu": ("output of relu",),
        "relu2": ("output of relu", "its square"),
    }[sizes.mlp]
    given, read = ("gate", "up", "input of gelu", "output of relu"), ("product", "output of gelu", "its square")
    return [
        SavedTensorSize(what, width, split=True, derived=what not in given, fused=what not in (*given, *read))
        for what in saved
    ]


def expert_saved(sizes: ArchitectureSizes) -> list[SavedTensorSize]:
    """Returns the tensors that an expert layer saves per token: those of its `top_k` experts and of the shared experts,
    the dispatched tokens, and the float32 scores of the router."""
    sent = sizes.top_k * sizes.hidden
    saved = feed_forward_saved(sizes, sizes.moe_ffn * (sizes.top_k + sizes.shared_experts))
    return [
        *saved,
        SavedTensorSize("tokens sent and returned", 2 * sent),
        SavedTensorSize("scores of the router", fixed=8 * sizes.experts),
    ]


def routed_saved_elements(sizes: ArchitectureSizes) -> float:
    """Returns the elements per token that are saved inside the routed experts, without the shared experts."""
    return sum(entry.elements for entry in feed_forward_saved(sizes, sizes.moe_ffn * sizes.top_k))


class AttentionWidths(TypedDict):
    """The elements per token of the tensors that attention reads."""

    query_width: float
    key_value_width: float


def attention_widths(sizes: ArchitectureSizes) -> AttentionWidths:
    """Returns the elements per token of the queries, and of keys and values together."""
    if sizes.mla is None:
        return AttentionWidths(query_width=float(sizes.query_width), key_value_width=2.0 * sizes.key_width)
    part = sizes.mla
    key = sizes.heads * (part.nope + part.rope)
    return AttentionWidths(query_width=float(key), key_value_width=float(key + sizes.heads * part.v))


def block_activations(sizes: ArchitectureSizes, experts: bool) -> LayerActivations:
    """Returns the activations of one block: attention, feed-forward, and norms. `experts`: whether the feed-forward is
    an expert layer."""
    h, q, k = sizes.hidden, sizes.query_width, sizes.key_width
    width = sizes.moe_ffn * (sizes.top_k + sizes.shared_experts) if experts else sizes.ffn
    saved = attention_saved(sizes)
    for _ in range(sizes.norms):
        saved += norm_saved(sizes, h)
    saved.append(SavedTensorSize("input of the feed-forward", h, derived=True))
    if sizes.kind == "neox":
        saved.append(SavedTensorSize("both norms read one input", -h))
    if sizes.norms == 1:
        saved.append(SavedTensorSize("attention and feed-forward read one input", -h, derived=True))
    saved += expert_saved(sizes) if experts else feed_forward_saved(sizes, width)
    rotated = 10 * (q + k) if sizes.pos == "rope" else 0
    again = (sizes.norms - (sizes.kind == "bert")) * norm_moved(sizes, h) + (5 if sizes.gated else 2) * width
    moved = sizes.norms * norm_moved(sizes, h) + rotated + 6 * h + (5 if sizes.gated else 2) * width
    if sizes.qk_norm or sizes.kind == "neox":
        again += rotated
    fused_moved = sizes.norms * (norm_moved(sizes, h) - FUSED_PASSES * h) + (8 * (q + k) if rotated else 0)
    fused_moved += 2 * width if sizes.gated and not experts else 0
    return layer_activations(
        saved,
        moved,
        transient=h + (2 if sizes.gated or sizes.mlp == "gelu_new" else 1) * width,
        again=again,
        fused_moved=fused_moved,
    )


FUSED_PASSES = 2
"""Elements that one fused kernel moves per element of its input and output: one read and one write."""


def norm_moved(sizes: ArchitectureSizes, width: float) -> float:
    """Returns the elements per token that a norm reads and writes. LayerNorm is one kernel; RMSNorm in float32 is six
    kernels."""
    return 12 * width if sizes.norm == "rms" else 2 * width


def embedding_moved(sizes: ArchitectureSizes) -> float:
    """Returns the elements per token that the embedding moves through memory."""
    return 2.0 * sizes.hidden


def pre_block_activations(sizes: ArchitectureSizes) -> LayerActivations:
    """Returns the activations of the layer between the embedding and the first block."""
    saved = norm_saved(sizes, sizes.hidden) if sizes.embedding_norm else []
    return layer_activations(saved, moved=(3 + 2 * sizes.embedding_norm) * sizes.hidden, transient=sizes.hidden)


def post_block_activations(sizes: ArchitectureSizes) -> LayerActivations:
    """Returns the activations of the layer between the last block and the head: the final norm. In BERT this layer is
    the transform of the masked-language head. It also saves the input of its matrix product and the input of gelu."""
    h = sizes.hidden
    if sizes.kind == "bert":
        saved = [
            SavedTensorSize("input of the transform", h),
            SavedTensorSize("input of gelu", h),
            *norm_saved(sizes, h),
        ]
        return layer_activations(saved, moved=4 * h, transient=2 * h)
    return layer_activations(
        norm_saved(sizes, h), moved=norm_moved(sizes, h), transient=(5 if sizes.norm == "rms" else 2) * h
    )


def head_activations(sizes: ArchitectureSizes) -> LayerActivations:
    """Returns the activations of the head. The vocabulary product saves its input. The loss saves log-probabilities in
    float32, the labels, and a mask of the valid labels.

    The logits exist until the loss has read them. Backward converts the log-probabilities to the gradient in place.
    """
    v = sizes.vocab
    saved = [
        SavedTensorSize("input of the head", sizes.hidden),
        SavedTensorSize("log-probabilities in float32", fixed=4 * v, split=True),
        SavedTensorSize("labels and mask of valid labels", fixed=10),
    ]
    return layer_activations(saved, moved=4 * v, transient=v)
