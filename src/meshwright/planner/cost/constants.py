"""Lists every number of the cost model that is not a fact of a catalog entry, with its source. Formulas contain no
numbers of their own.

A device's peak, bandwidth, links and matrix efficiency come from the cluster; calibration replaces them there.
"""

from __future__ import annotations

from meshwright.spec.layout import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from meshwright.spec.layout import MAX_INFLIGHT_REDUCE as MAX_INFLIGHT_REDUCE
from meshwright.spec.layout import SWAP_BUFFERS as SWAP_BUFFERS

ALLOCATOR_OVERHEAD = 1.12
"""Reserved over allocated bytes. 26 measured stages of Mist's tuned plans (Dazz993/Mist expected_summary.json): mean
1.118."""

SAFE_ALLOCATOR_OVERHEAD = 1.22
"""The largest of the same 26 stages is 1.225, the smallest 1.058: below this factor a plan fits with a margin, above it
is tight."""

USABLE_MEMORY_FRACTION = 0.98
"""Share of a device's memory that a process can take: 79.15 to 79.35 of 80 GiB in BigScience's nvidia-smi logs, less a
reserve."""

P2P_BUFFERS = 4
"""Hidden states that a pipeline rank holds for its neighbours: one received ahead, its gradient, one sent each way."""

P2P_BUFFERS_SHARED_MEMORY = 2
"""The same where ranks read each other's memory: nothing is received ahead, and what was sent one way is free for the
other."""

MEMORY_BANDWIDTH_EFFICIENCY = 0.9
"""Of a device's memory bandwidth, in large transfers (calculon systems/a100_80g.json: 0.90 at 100 MB)."""

SUSTAINED_MATMUL_FRACTION = 0.83
"""Of a device's best matrix rate that the products of a whole step keep up: ordinary shapes, warm devices, powers and
clocks. The one
fitted constant: the median over Megatron's published A100 steps (arXiv 2104.04473 table 1, 2205.05198 table 5), which
lie within 0.79 to 0.96."""

MATMUL_RAMP_SECONDS = 3e-6
"""Seconds that a matrix product loses to start and end. calculon's A100 table of efficiencies (0.95 from 128 GFLOP,
0.90 from 16, 0.60
from 1) is peak plus 2 to 3 us a product."""

MATMUL_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
"""Tiles of a matrix product and the share of the best rate that they reach (NVIDIA, Matrix Multiplication Background,
figure 6)."""

SPLIT_K_WAVE_FRACTION = 0.7
"""Of a turn, for products with fewer tiles than processors: cutting the inner dimension fills the rest but for the sum
of the parts."""

KERNEL_LAUNCH_SECONDS = 10e-6
"""Seconds of the host for one kernel of eager PyTorch with autograd: below this the device waits for the host (7 us
without autograd in
autoparallel's docs; a micro-batch of nanotron takes 4.5 ms a layer on H100 however small it is, Ultra-Scale
playbook)."""

CPU_OP_SECONDS = 5e-6
"""The same where the host itself computes: no driver."""

KERNELS_PER_MATRIX = 5
"""Kernels of a forward pass for each weight matrix, the element-wise ones between them included: 36 for the 7 of a
Llama block."""

CPU_KERNELS_PER_MATRIX = 3
"""The same on a host device, where views cost nothing."""

CPU_OPS_PER_STAGE_PASS = 300
"""Operations that one micro-batch adds to a stage on a CPU, outside its layers, forward and backward. They are masks
and positions, hooks, flat buffers, the Python code of the schedule, and messages. Processor time of steps of 1 to 16
micro-batches, 2, 4 and 8 blocks, 1 and 2 stages: 1.4 to 3 ms each at 4.5 us an operation."""

ATTENTION_EFFICIENCY = 0.75
"""Of the matrix efficiency that fused attention reaches: FlashAttention-2 (arXiv 2307.08691, figure 4) 190 to 225 of
312 TFLOP/s on an A100,
of which 271 are reached by plain matrix products."""

BACKWARD_FORWARD_RATIO = 2.0
"""Backward over forward in FLOPs and in bytes of a layer: a gradient for the input and one for the weights."""

ATTENTION_BACKWARD_RATIO = 2.5
"""Of fused attention, which multiplies five times backward and twice forward (arXiv 2307.08691, section 3.1)."""

GRAD_ACCUMULATION_PASSES = 2
"""Of each micro-batch over the held gradients: read and write, at least."""

FP8_CAST_PASSES = 2.0
"""Elements of the compute type that move for each operand of an 8-bit product: read for the largest, read, written,
written transposed at half size."""

COLLECTIVE_LAUNCH_SECONDS = 300e-6
"""Seconds of the host for one collective of tensor ranks, called through autograd, and the operations around it (the
rest of those 4.5 ms)."""

TP_ALL_REDUCES_PER_BLOCK = 2
"""Sums over the tensor ranks in one block and direction, attention and feed-forward (Megatron-LM, arXiv 1909.08053,
figure 4). Sequence
parallelism gathers and scatters the same bytes (arXiv 2205.05198, section 4.2.2)."""

VOCAB_LOSS_ALL_REDUCES = 3
"""All-reduces of one float32 a token in a vocabulary-parallel loss: largest logit, sum of exponentials, logit of the
label."""

LOSS_ELEMENT_BYTES = 4
"""Bytes of one of them."""

OVERLAP_SLOWDOWN = 0.13
"""Compute takes 1.13 times as long while a collective overlaps with it (Galvatron overlap_coefficient.json, A100:
1.1256)."""

OPTIMIZER_STATE_PASSES = 2
"""Times that the optimizer passes over each master weight and state: read and write. Gradients are read twice (norm,
update)."""

EXPERT_IMBALANCE = 1.25
"""Tokens of the busiest expert rank over the mean: the capacity factor at which Switch Transformer trains (arXiv
2101.03961, section 3.1)."""

RING_KV_BLOCKS_IN_FLIGHT = 2
"""Blocks of keys and values on their way through a context rank: the one that came and its gradient (arXiv 2310.01889,
section 3)."""

RING_KV_BLOCKS_LOCAL = 4
"""Extra local blocks: keys and values as one message, and a part of their gradients, once as computed and once as
added."""

RING_QUERY_TENSORS = 4.5
"""Additional tensors of a query's width: the gradients of the block, of the output and of queries, and the gradient of
queries from the current part."""

ULYSSES_QUERY_TENSORS = 6
"""The same where heads are exchanged: a gradient before and behind its exchange, and the message."""

SHARED_UNSHARD_SECONDS = 5e-4
"""Seconds in which ranks of one host open a unit of ZeRO 3 whose weights lie there once: they meet (90 us of processor
time with 4 ranks), and read what
others have just written. 20 openings of 7 MiB a step took 12 ms more than ZeRO 2 without its gather."""

CP_SHARED_BUFFERS = 2
"""Messages of attention across ranks that share memory which lie there at once: one that others still read, and the
next."""

CPU_UPDATE_PARAMS_PER_SECOND = 4e9
"""Parameters that the processors of one node update in a second: CPU-Adam takes 1.03 s for 4 B and 2.57 s for 10 B
(ZeRO-Offload, arXiv
2101.06840, table 4). Where `probe` has measured it, that counts instead."""

CPU_ADDS_PER_UPDATE = 4
"""Elements that a host adds to a sum while it updates one: 6 bytes pass its memory where AdamW moves 26 and computes
(bf16 gradients)."""

PINNED_MEMORY_OVERHEAD = 1.44
"""Bytes that torch takes of a host for each byte of pinned memory that is asked for: it gives it out in powers of two
(ATen/core/CachingHostAllocator.h), which
is 1 / ln 2 times as much where all sizes are as likely."""

BOUNCE_BUFFER_BYTES = 2 << 20
"""Bytes by which what blocks keep goes from a core's memory to a file: the runtime's own
(runtime/offload/activation_store.py)."""

PIPELINE_FILL_FACTOR = 2.0
"""Of sqrt(wire x hops), what filling the pipeline of a collective costs with pieces of the best size: the theory's 2,
which measured all-gathers of
256 MiB on 8 to 128 H100 keep to within 15 % (Ultra-Scale playbook)."""

COLLECTIVE_START_SECONDS = 6e-6
"""Seconds until a turn of a collective is under way: twice that and the hops make the 40 us of a small all-reduce over
8 devices, 17 over 2."""

MIN_SWITCH_REDUCE_RANKS = 5
"""Ranks from which NCCL lets the switch add (NVLS): rings are quicker up to 4 (measured on H200 and B200)."""

TREE_BANDWIDTH_FRACTION = 0.45
"""Of a ring's bandwidth that double trees reach between nodes: all-reduces of 256 MiB on 8 and 16 nodes take 5.3 and
6.3 ms (Ultra-Scale playbook;
NCCL's own tables say 0.9)."""

MIN_BUCKET_BYTES = 2**18
"""Bytes below which a collective between nodes is mostly its start, whatever the formula says."""

COMPILE_SECONDS = 19.4
"""Seconds of torch.compile for one kind of block on an accelerator: a Llama 3 8B that shares the code of its blocks,
4.6 to trace and 14.8 to
generate (vllm-project/vllm, pull request 11005), forward alone; a run says what it took itself."""

CPU_COMPILE_SECONDS = 37.0
"""The same on a processor, C++ compiler included, forward and backward: 36.3 processor seconds for 2 and 37.0 for 8
blocks of a Llama of width
64, torch 2.13."""

GLOO_REDUCE_BUFFERS = 2
"""Whole buffers that a reduction holds on a host device, where it is an all-to-all into a second one."""

MIN_IN_PLACE_ELEMENTS = 1 << 16
"""Elements from which on products add to the gradient of a matrix on cores. Source: runtime/wgrad/accumulation.py."""
