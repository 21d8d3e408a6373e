"""Lists the constants of the cost model that are not in the catalog, each with its source. All modules of planner/cost
use them; a constant that only one module needs is defined in that module.

The peak rate, bandwidth, links and matrix efficiency of a device come from the cluster description. Calibration
replaces them by measured values.
"""

from __future__ import annotations

from meshwright.spec.layout import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from meshwright.spec.layout import MAX_INFLIGHT_REDUCE as MAX_INFLIGHT_REDUCE
from meshwright.spec.layout import SOFTMAX_PARTS as SOFTMAX_PARTS
from meshwright.spec.layout import SWAP_BUFFERS as SWAP_BUFFERS

ALLOCATOR_OVERHEAD = 1.12
"""Reserved bytes divided by allocated bytes. The value rounds the mean (1.118) over 26 measured stages of Mist's tuned
plans (Dazz993/Mist expected_summary.json)."""

SAFE_ALLOCATOR_OVERHEAD = 1.22
"""Reserved bytes divided by allocated bytes, with a safety margin. A plan that fits with this factor fits. A plan that
fits only with ALLOCATOR_OVERHEAD is tight. The 26 stages of Mist have factors between 1.058 and 1.225."""

CPU_HEAP_OVERHEAD, CPU_RUN_BYTES = 1.6, 60 * 2**20
"""Parts of the RSS of a CPU rank: bytes that free pieces of the heap take, divided by the bytes of activations and
buffers at the peak, and bytes of the data loader, the trace of a step and the validation. glibc 2.36 rarely reuses a
freed block for an aligned block of the same size. Measured: between 0.3
and 2.1 in four runs of `train` (docs/log/memory.md)."""

USABLE_MEMORY_FRACTION = 0.98
"""Fraction of a device's memory that a process can use. BigScience's nvidia-smi logs show between 79.15 and 79.35 of 80
GiB in use. The constant is slightly lower, as a reserve."""

ONEDNN_MIN_MAP = 20480
"""Elements of the input of a convolution above which torch uses oneDNN on a CPU, even for a single image."""

P2P_BUFFERS = 4
"""Number of buffers for pipeline messages on a rank, each with the size of a hidden state: a hidden state that is
received in advance, a gradient of a hidden state, and one message that is sent in each direction."""

P2P_BUFFERS_SHARED_MEMORY = 2
"""Number of buffers for pipeline messages on a rank if ranks read each other's memory. Nothing is received in advance,
and both directions share one send buffer."""

MEMORY_BANDWIDTH_EFFICIENCY = 0.9
"""Fraction of a device's memory bandwidth that large transfers reach (calculon systems/a100_80g.json:
0.90 at 100 MB)."""

SUSTAINED_MATMUL_FRACTION = 0.83
"""Fraction of a device's best matrix rate that the products of a whole step reach, with ordinary shapes, on warm
devices with power and clock limits. This is the only fitted constant. The value is the median over Megatron's published
A100 steps (arXiv 2104.04473 table 1, 2205.05198 table 5). Single steps have values between 0.79 and 0.96."""

MATMUL_RAMP_SECONDS = 3e-6
"""Seconds that a matrix product loses at its start and end. calculon's A100 efficiencies are 0.95 for products of at
least 128 GFLOP, 0.90 from 16 GFLOP on, and 0.60 from 1 GFLOP on. These efficiencies correspond to the time at the peak
rate plus 2 us to 3 us per product."""

MATMUL_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
"""The tiles of a matrix product: rows, columns, and the fraction of the best rate that the tile reaches (NVIDIA, Matrix
Multiplication Background, figure 6)."""

SPLIT_K_WAVE_FRACTION = 0.7
"""The minimum time of a product with fewer tiles than processors, as a fraction of the time of a full wave. With
split-k all processors are busy, and the time includes the sum of the partial results."""

ALIGNED_BYTES, TILE_DEPTH_BYTES = 16, 128
"""Bytes of which the widths of a matrix product should be multiples: 8 and 64 elements of 16 bits (NVIDIA, Matrix
Multiplication Background, section 2.2, table 1). The inner dimension is computed in steps of TILE_DEPTH_BYTES."""

MISALIGNED_MATMUL_FRACTION = 0.45
"""Fraction of the rate that a product reaches if rows of an operand do not begin at multiples of ALIGNED_BYTES. With
this value, GPT-2 124M trains 25 % faster with 50304 logits than with 50257, as published for nanoGPT
(x.com/karpathy/status/1621578354024677377)."""

ATTENTION_HEAD_STEP = 32
"""Elements to whose multiples fused attention pads the heads (Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp,
head_size_rounded)."""

KERNEL_LAUNCH_SECONDS = 10e-6
"""Host seconds to launch one kernel of eager PyTorch with autograd. If kernels take less time than this on the device,
the device waits for the host. autoparallel's docs state 7 us without autograd. A micro-batch of nanotron takes at least
4.5 ms per layer on H100 (Ultra-Scale playbook)."""

SLICE_COPY_SECONDS = 7e-6
"""Host seconds to launch the copy of a slice without autograd (autoparallel's docs)."""

CPU_OP_SECONDS = 5e-6
"""Seconds to start one operation of eager PyTorch on a CPU. The time is shorter than on an accelerator, because no
driver is called."""

KERNELS_PER_MATRIX = 5
"""Number of kernels in forward per weight matrix, including element-wise kernels. A Llama block has 36 kernels for 7
matrices."""

CPU_KERNELS_PER_MATRIX = 3
"""Number of operations in forward per weight matrix on a CPU. Views are not counted, because they cost nothing."""

CPU_OPS_PER_STAGE_PASS = 300
"""Number of operations of one micro-batch on a stage outside its layers, on a CPU, in forward and backward together.
They belong to masks and positions, hooks, flat buffers, the Python code of the schedule, and messages. The value was
measured with 1 to 16 micro-batches, 2 to 8 blocks, and 1 and 2 stages: each micro-batch added between 1.4 ms and 3 ms
of processor time, at 4.5 us per operation."""

ATTENTION_EFFICIENCY = 0.75
"""Rate of fused attention divided by the rate of plain matrix products. On an A100 with a peak of 312 TFLOP/s,
FlashAttention-2 reaches between 190 and 225 TFLOP/s (arXiv 2307.08691, figure 4), and plain matrix products reach 271
TFLOP/s."""

BACKWARD_FORWARD_RATIO = 2.0
"""FLOPs and bytes of a layer's backward divided by those of its forward. Backward computes a gradient of the input and
a gradient of the weights."""

ATTENTION_BACKWARD_RATIO = 2.5
"""FLOPs of backward divided by FLOPs of forward in fused attention, which has five products in backward and two in
forward (arXiv 2307.08691, section 3.1)."""

GRAD_ACCUMULATION_PASSES = 2
"""Number of times that a micro-batch moves the stored gradients through memory: one read and one write."""

FP8_CAST_PASSES = 2.0
"""Memory traffic to cast an operand of an 8-bit product, in elements of the compute dtype per operand element. The
value counts one read of the operand, and the writes of the 8-bit result and of a transposed 8-bit result, half an
element each. A separate read for the maximum is not counted."""

UNPACK_BYTES, UNPACK_PASSES = 4.5, 3.0
"""Memory traffic to convert a frozen weight in 4 bits to the compute dtype, per element: bytes, and elements of the
compute dtype in addition. The values count the codes and their int32 indices (written and read), and the values, which
are written, and then read and written once more when they are scaled. Source: `unpack_nf4` in analysis/nf4.py."""

COLLECTIVE_LAUNCH_SECONDS = 300e-6
"""Host seconds of one tensor-parallel collective called through autograd, including the operations around it. The value
accounts for the part of nanotron's 4.5 ms per layer that kernel launches do not explain (see
`KERNEL_LAUNCH_SECONDS`)."""

TP_ALL_REDUCES_PER_BLOCK = 2
"""Number of all-reduces over the tensor ranks in the forward of one block, and in its backward: one in attention and
one in the feed-forward (Megatron-LM, arXiv 1909.08053, figure 4). With sequence parallelism, an all-gather and a
reduce-scatter replace each all-reduce and move equally many bytes (arXiv 2205.05198, section 4.2.2)."""

VOCAB_LOSS_ALL_REDUCES = 3
"""Number of all-reduces of one float32 per token in a vocabulary-parallel loss: the largest logit, the sum of
exponentials, and the logit of the label."""

LOSS_ELEMENT_BYTES = 4
"""Bytes per element of the all-reduces in a vocabulary-parallel loss."""

OVERLAP_SLOWDOWN = 0.13
"""Relative slowdown of compute while a collective overlaps with it (Galvatron overlap_coefficient.json, A100:
1.1256)."""

OPTIMIZER_STATE_PASSES = 2
"""Number of times that the optimizer moves each main weight, state and gradient through memory. Main weights and states
are read once and written once. Gradients are read twice, for the norm and for the update."""

EXPERT_IMBALANCE = 1.25
"""Number of tokens for which an expert rank needs memory, divided by the mean over expert ranks. The value is the
capacity factor of Switch Transformer (arXiv 2101.03961, section 3.1): memory must be enough for the micro-batch with
the most uneven routing. Step times assume balanced routing: routers are trained to balance the mean over a step."""

RING_KV_BLOCKS_IN_FLIGHT = 2
"""Ring attention: the number of blocks of keys and values in transit through a rank, namely the block that is received
and the gradient of a block (arXiv 2310.01889, section 3)."""

RING_KV_BLOCKS_LOCAL = 4
"""Ring attention: the number of additional local blocks of keys and values. They contain the message that is sent, the
computed partial gradients, and the accumulated partial gradients."""

RING_QUERY_TENSORS = 4.5
"""Ring attention: the number of additional tensors with the width of the queries. They are gradients of the block, of
the output and of the queries, and the partial gradient of the queries."""

ULYSSES_QUERY_TENSORS = 6
"""Ulysses attention: the number of additional tensors with the width of the queries. They are gradients before and
after their exchange, and messages."""

SHARED_UNSHARD_SECONDS = 5e-4
"""Seconds in which the ranks of one host unshard a ZeRO-3 parameter group whose weights are in shared memory. The ranks
synchronise (90 us of processor time with 4 ranks) and read weights that other ranks have just written. With 20 unshards
of 7 MiB, a step took 12 ms longer than a step of ZeRO 2 without its all-gather."""

SHARED_BUFFERS = 2
"""Number of messages of attention or of tensor parallelism that a rank stores if ranks share memory: one message that
other ranks still read, and the next message."""

CPU_UPDATE_PARAMS_PER_SECOND = 4e9
"""Number of parameters that the processors of one node update per second. CPU-Adam takes 1.03 s for 4e9 parameters and
2.57 s for 10e9 parameters (ZeRO-Offload, arXiv 2101.06840, table 4). A rate that the profiler has measured takes
precedence."""

CPU_ADDS_PER_UPDATE = 4
"""Number of gradient elements that a CPU accumulates in the time in which it updates one parameter. With bf16
gradients, the accumulation of an element moves 6 bytes. An AdamW update moves 26 bytes and also computes more."""

PINNED_MEMORY_OVERHEAD = 1.44
"""Host bytes that torch allocates per requested byte of pinned memory. The allocator rounds up to powers of two
(ATen/core/CachingHostAllocator.h). If all sizes are equally likely, it allocates 1 / ln 2 times the requested bytes on
average."""

BOUNCE_BUFFER_BYTES = 2 << 20
"""Bytes of the buffer through which a CPU rank writes saved activations to a file, as in
runtime/offload/swap_file.py."""

PIPELINE_FILL_FACTOR = 2.0
"""The time to fill the pipeline of a collective with chunks of optimal size, divided by sqrt(wire seconds x hop
seconds). The theoretical value is 2. With this value, predicted all-gathers of 256 MiB on 2 up to 8 H100 differ from
measured times by at most 10 % (Ultra-Scale playbook)."""

MAX_FILL_FACTOR = 2.0
"""Between nodes: the longest time to fill the pipeline of a collective, divided by the latency of its hops. NCCL does
not send chunks larger than 512 KiB (a buffer of 4 MiB in 8 steps, NVIDIA/nccl src/init.cc), so the pipeline of a large
message fills no slower than that of a small one. All-reduces of 1 GiB over four nodes take 5.7 ms on B200, of which
5.5 ms are the transfer."""

RING_HOP_FACTOR = 2.0
"""Latency of a network hop of an all-gather or reduce-scatter divided by that of an all-reduce. NCCL reduces small
messages by LL and LL128, whose hop takes 2.7 us to 4 us; rings of large messages use Simple, whose hop takes 9.6 us to
14 us (NVIDIA/nccl src/graph/tuning.cc, hwLat). With this value, all-gathers of 256 MiB over 2 to 64 nodes differ from
measured times by 5 % in the median (Ultra-Scale playbook)."""

COLLECTIVE_START_SECONDS = 6e-6
"""Seconds to start an all-gather, a reduce-scatter or an all-to-all. An all-reduce has two starts, plus the latency of
its hops. With this value, a small all-reduce takes 40 us over 8 devices and 17 us over 2 devices, as measured."""

MIN_SWITCH_REDUCE_RANKS = 5
"""Minimum number of ranks for which NCCL reduces in the switch (NVLS). Rings are faster for up to 4 ranks (measured on
H200 and B200)."""

TREE_BANDWIDTH_FRACTION = 0.45
"""Fraction of a ring's bandwidth that double trees reach between nodes. An all-reduce of 256 MiB takes 5.3 ms on 8
nodes and 6.3 ms on 16 nodes (Ultra-Scale playbook). NCCL's tables assume 0.9."""

MIN_BUCKET_BYTES = 2**18
"""Minimum bucket size in bytes. With smaller buckets, start-up would dominate the time of a collective between
nodes."""

COMPILE_SECONDS = 19.4
"""Seconds of torch.compile for one kind of block (planner/cost/step.py) on an accelerator, measured with forward only.
A Llama 3 8B whose blocks share one compiled graph takes 4.6 s to trace and 14.8 s to generate code (vllm-project/vllm,
pull request 11005). A training run reports the actual time."""

COMPILED_LAUNCH_FRACTION = 0.3
"""Host seconds to launch the kernels of a compiled block divided by those of an eager block. A compiled Llama block
has some 14 kernels instead of 36, and one call launches them without autograd."""

CPU_COMPILED_FRACTION = 0.952
"""Processor time of a compiled block of several tensor ranks divided by that of an eager one (docs/log/cuda.md, One
graph for a compiled block of several ranks; quartiles 0.924 and 0.991). Other compiled blocks saved 0 % to 4 % on a
CPU, which is not counted."""

CPU_COMPILE_SECONDS = 37.0
"""Seconds of torch.compile for one kind of block on a CPU, forward and backward, with the C++ compiler. A Llama of
width 64 with torch 2.13 took 36.3 processor seconds for 2 blocks and 37.0 for 8 blocks."""

GLOO_REDUCE_BUFFERS = 2
"""Number of full gradient buffers during a reduction between CPU ranks that do not share memory. The reduction is an
all-to-all into a second buffer."""

MIN_IN_PLACE_ELEMENTS = 1 << 16
"""With several stages, CPU products add to the gradient in place if the weight matrix has at least this many elements.
`CostContext.separate_wgrad_numel` lists all conditions. Source: runtime/weight_gradients.py."""
