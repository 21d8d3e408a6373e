"""Lists every constant of the cost model that is not in the catalog, with its source. Formulas contain no other
constants.

The peak, bandwidth, links and matrix efficiency of a device come from the cluster, where calibration replaces them.
"""

from __future__ import annotations

from meshwright.spec.layout import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from meshwright.spec.layout import MAX_INFLIGHT_REDUCE as MAX_INFLIGHT_REDUCE
from meshwright.spec.layout import SWAP_BUFFERS as SWAP_BUFFERS

ALLOCATOR_OVERHEAD = 1.12
"""Reserved bytes divided by allocated bytes. The value rounds the mean (1.118) over 26 measured stages of Mist's tuned
plans (Dazz993/Mist expected_summary.json)."""

SAFE_ALLOCATOR_OVERHEAD = 1.22
"""Reserved bytes divided by allocated bytes, with a safety margin. A plan fits if it fits with this factor; if it fits
only with ALLOCATOR_OVERHEAD, it is tight. The 26 stages of Mist have factors from 1.058 to 1.225."""

USABLE_MEMORY_FRACTION = 0.98
"""Fraction of a device's memory that a process can use. BigScience's nvidia-smi logs show from 79.15 to 79.35 of 80 GiB
in use; the constant leaves a small reserve."""

P2P_BUFFERS = 4
"""Number of hidden states that a pipeline rank stores for communication with its neighbours: one that is received in
advance, the gradient of one, and one that is sent in each direction."""

P2P_BUFFERS_SHARED_MEMORY = 2
"""Number of hidden states that a pipeline rank stores for communication if ranks read each other's memory. Nothing is
received in advance, and both directions share one send buffer."""

MEMORY_BANDWIDTH_EFFICIENCY = 0.9
"""Fraction of a device's memory bandwidth that large transfers reach (calculon systems/a100_80g.json:
0.90 at 100 MB)."""

SUSTAINED_MATMUL_FRACTION = 0.83
"""Fraction of a device's best matrix rate that the products of a whole step reach, with ordinary shapes, on warm
devices with power and clock limits. This is the only fitted constant. It is the median over Megatron's published A100
steps (arXiv 2104.04473 table 1, 2205.05198 table 5); single steps give 0.79 to 0.96."""

MATMUL_RAMP_SECONDS = 3e-6
"""Seconds that a matrix product loses at its start and end. calculon's A100 efficiencies (0.95 from 128 GFLOP, 0.90
from 16 GFLOP, 0.60 from 1 GFLOP) correspond to the peak rate plus 2 to 3 us per product."""

MATMUL_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
"""The tiles of a matrix product: rows, columns, and the fraction of the best rate that the tile reaches (NVIDIA, Matrix
Multiplication Background, figure 6)."""

SPLIT_K_WAVE_FRACTION = 0.7
"""The minimum time of a product with fewer tiles than processors, as a fraction of the time of a full wave. With
split-k, all processors work; the time includes adding the partial results."""

KERNEL_LAUNCH_SECONDS = 10e-6
"""Host seconds for one kernel of eager PyTorch with autograd. If kernels take less time on the device, the device waits
for the host. autoparallel's docs give 7 us without autograd. A micro-batch of nanotron takes at least 4.5 ms per layer
on H100 (Ultra-Scale playbook)."""

CPU_OP_SECONDS = 5e-6
"""Seconds for one operation on a CPU, which has no driver."""

KERNELS_PER_MATRIX = 5
"""The number of kernels of a forward pass per weight matrix, including element-wise kernels. A Llama block has 36
kernels for 7 matrices."""

CPU_KERNELS_PER_MATRIX = 3
"""Number of kernels per weight matrix on a CPU, where views cost nothing."""

CPU_OPS_PER_STAGE_PASS = 300
"""Number of operations that one micro-batch adds to a stage on a CPU, outside its layers, forward and backward. These
operations belong to masks and positions, hooks, flat buffers, the Python code of the schedule, and messages. The value
was measured with 1 to 16 micro-batches, 2, 4 and 8 blocks, and 1 and 2 stages. Each micro-batch added 1.4 to 3 ms of
processor time, at 4.5 us per operation."""

ATTENTION_EFFICIENCY = 0.75
"""Fraction of the matrix efficiency that fused attention reaches. On an A100, FlashAttention-2 (arXiv 2307.08691,
figure 4) reaches 190 to 225 of 312 TFLOP/s, and plain matrix products reach 271."""

BACKWARD_FORWARD_RATIO = 2.0
"""Ratio of backward to forward in FLOPs and in bytes of a layer. Backward computes a gradient for the input and one for
the weights."""

ATTENTION_BACKWARD_RATIO = 2.5
"""Ratio of backward to forward of fused attention, which has five products in backward and two in forward (arXiv
2307.08691, section 3.1)."""

GRAD_ACCUMULATION_PASSES = 2
"""How often each micro-batch moves the stored gradients through memory: one read and one write."""

FP8_CAST_PASSES = 2.0
"""Memory traffic of an operand of an 8-bit product, in elements of the compute dtype per operand element. The operand
is read for its maximum, read again, written, and written transposed at half the size."""

COLLECTIVE_LAUNCH_SECONDS = 300e-6
"""Host seconds for one tensor-parallel collective called through autograd, including the operations around it. The
value explains the part of the 4.5 ms per layer (see `KERNEL_LAUNCH_SECONDS`) that kernel launches do not."""

TP_ALL_REDUCES_PER_BLOCK = 2
"""Number of all-reduces over the tensor ranks in one block and direction, one in attention and one in the feed-forward
(Megatron-LM, arXiv 1909.08053, figure 4). With sequence parallelism, an all-gather and a reduce-scatter move the same
number of bytes (arXiv 2205.05198, section 4.2.2)."""

VOCAB_LOSS_ALL_REDUCES = 3
"""Number of all-reduces of one float32 per token in a vocabulary-parallel loss: the largest logit, the sum of
exponentials, and the logit of the label."""

LOSS_ELEMENT_BYTES = 4
"""Bytes per element of the all-reduces in a vocabulary-parallel loss."""

OVERLAP_SLOWDOWN = 0.13
"""Relative slowdown of compute while a collective overlaps with it (Galvatron overlap_coefficient.json, A100:
1.1256)."""

OPTIMIZER_STATE_PASSES = 2
"""How often the optimizer moves each main weight and state through memory: one read and one write. Gradients are read
twice (for the norm and for the update)."""

EXPERT_IMBALANCE = 1.25
"""Tokens of the expert rank with the most tokens, divided by the mean over ranks. The value is the capacity factor of
Switch Transformer (arXiv 2101.03961, section 3.1)."""

RING_KV_BLOCKS_IN_FLIGHT = 2
"""The number of blocks of keys and values in transit through a context rank: the received block and the gradient of one
(arXiv 2310.01889, section 3)."""

RING_KV_BLOCKS_LOCAL = 4
"""The number of additional local blocks of keys and values: the send message, the computed partial gradients, and the
accumulated partial gradients (each keys and values)."""

RING_QUERY_TENSORS = 4.5
"""Ring attention: the number of additional tensors with the width of the queries, namely the gradients of the block, of
the output and of the queries, and the partial gradient of the queries."""

ULYSSES_QUERY_TENSORS = 6
"""Ulysses attention: the number of additional tensors with the width of the queries. They are gradients before and
after their exchange, and messages."""

SHARED_UNSHARD_SECONDS = 5e-4
"""Seconds in which ranks of one host unshard a ZeRO-3 parameter group whose weights are in shared memory. The ranks
synchronise (90 us of processor time with 4 ranks) and read weights that other ranks have just written. With 20 unshards
of 7 MiB, a step took 12 ms more than under ZeRO 2 without the all-gather."""

CP_SHARED_BUFFERS = 2
"""Number of concurrent attention messages of ranks that share memory: one message that other ranks still read, and the
next message."""

CPU_UPDATE_PARAMS_PER_SECOND = 4e9
"""Parameters that the processors of one node update per second. CPU-Adam takes 1.03 s for 4 B and 2.57 s for 10 B
(ZeRO-Offload, arXiv 2101.06840, table 4). If the profiler has measured this rate, the measured value is used."""

CPU_ADDS_PER_UPDATE = 4
"""The number of elements that a CPU adds to a sum in the time in which it updates one parameter. An addition moves 6
bytes; AdamW moves 26 bytes and also computes (bf16 gradients)."""

PINNED_MEMORY_OVERHEAD = 1.44
"""Host bytes that torch allocates per requested byte of pinned memory. The allocator rounds up to powers of two
(ATen/core/CachingHostAllocator.h). If all sizes are equally likely, it allocates 1 / ln 2 times the requested bytes on
average."""

BOUNCE_BUFFER_BYTES = 2 << 20
"""Bytes of the buffer through which a CPU rank writes saved activations to a file, as in
runtime/offload/swap_file.py."""

PIPELINE_FILL_FACTOR = 2.0
"""The time to fill the pipeline of a collective with chunks of optimal size, divided by sqrt(wire seconds x hop
seconds). The theoretical value is 2. With it, predicted all-gathers of 256 MiB on 8 to 128 H100 agree with measured
times within 15 % (Ultra-Scale playbook)."""

COLLECTIVE_START_SECONDS = 6e-6
"""Seconds until a step of a collective has started. With it, a small all-reduce takes 40 us over 8 devices and 17 us
over 2 devices, as measured: two starts plus the hops."""

MIN_SWITCH_REDUCE_RANKS = 5
"""Minimum number of ranks for which NCCL reduces in the switch (NVLS). Rings are faster for up to 4 ranks (measured on
H200 and B200)."""

TREE_BANDWIDTH_FRACTION = 0.45
"""Fraction of a ring's bandwidth that double trees reach between nodes. All-reduces of 256 MiB on 8 and 16 nodes take
5.3 and 6.3 ms (Ultra-Scale playbook). NCCL's tables assume 0.9."""

MIN_BUCKET_BYTES = 2**18
"""Minimum bucket size in bytes. For smaller buckets the start-up dominates a collective between nodes."""

COMPILE_SECONDS = 19.4
"""Seconds of torch.compile for one kind of block on an accelerator (measured with forward only). A Llama 3 8B whose
blocks share one compiled graph takes 4.6 s to trace and 14.8 s to generate code (vllm-project/vllm, pull request
11005). A training run reports the actual time."""

CPU_COMPILE_SECONDS = 37.0
"""Seconds of torch.compile for one kind of block on a CPU, forward and backward, with the C++ compiler. A Llama of
width 64 with torch 2.13 took 36.3 processor seconds for 2 blocks and 37.0 for 8 blocks."""

GLOO_REDUCE_BUFFERS = 2
"""Number of full buffers that a reduction allocates on a CPU, where the reduction is an all-to-all into a second
buffer."""

MIN_IN_PLACE_ELEMENTS = 1 << 16
"""For weight matrices with at least this many elements, CPU products add to the gradient in place. Source:
runtime/weight_gradients.py."""
