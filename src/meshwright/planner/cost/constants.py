"""Lists every constant of the cost model that is not in the catalog, with its source. Formulas contain no other
constants.

The peak, bandwidth, links and matrix efficiency of a device come from the cluster, where calibration replaces them.
"""

from __future__ import annotations

from meshwright.spec.layout import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from meshwright.spec.layout import MAX_INFLIGHT_REDUCE as MAX_INFLIGHT_REDUCE
from meshwright.spec.layout import SWAP_BUFFERS as SWAP_BUFFERS

ALLOCATOR_OVERHEAD = 1.12
"""Reserved bytes divided by allocated bytes. The value is near the mean, 1.118, of 26 measured stages of Mist's tuned
plans (Dazz993/Mist expected_summary.json)."""

SAFE_ALLOCATOR_OVERHEAD = 1.22
"""A plan fits if it fits with this factor, and is tight if it fits only with a smaller factor. The 26 stages of Mist
have factors from 1.058 to 1.225."""

USABLE_MEMORY_FRACTION = 0.98
"""Fraction of a device's memory that a process can use. BigScience's nvidia-smi logs show 79.15 to 79.35 of 80 GiB; a
reserve is subtracted."""

P2P_BUFFERS = 4
"""Number of hidden states that a pipeline rank stores for communication with its neighbours: one received ahead, its
gradient, and one sent in each direction."""

P2P_BUFFERS_SHARED_MEMORY = 2
"""Number of hidden states that a pipeline rank stores for communication if ranks read each other's memory. Nothing is
received ahead, and both directions send from one buffer."""

MEMORY_BANDWIDTH_EFFICIENCY = 0.9
"""Fraction of a device's memory bandwidth that large transfers reach (calculon systems/a100_80g.json:
0.90 at 100 MB)."""

SUSTAINED_MATMUL_FRACTION = 0.83
"""Fraction of a device's best matrix rate that the products of a whole step reach, with ordinary shapes, on warm
devices with power and clock limits. It is the only fitted constant: the median over Megatron's published A100 steps
(arXiv 2104.04473 table 1, 2205.05198 table 5), whose values range from 0.79 to 0.96."""

MATMUL_RAMP_SECONDS = 3e-6
"""Seconds that a matrix product loses at its start and end. calculon's A100 efficiencies (0.95 from 128 GFLOP, 0.90
from 16 GFLOP, 0.60 from 1 GFLOP) correspond to the peak rate plus 2 to 3 us per product."""

MATMUL_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
"""Tiles of a matrix product (rows, columns), and the fraction of the best rate that they reach (NVIDIA, Matrix
Multiplication Background, figure 6)."""

SPLIT_K_WAVE_FRACTION = 0.7
"""Minimum time of a product with fewer tiles than processors, as a fraction of a full wave. The inner dimension is cut
so that all processors work; the time includes the sum of the partial results."""

KERNEL_LAUNCH_SECONDS = 10e-6
"""Host seconds for one kernel of eager PyTorch with autograd. If kernels are shorter, the device waits for the host.
autoparallel's docs give 7 us without autograd. A micro-batch of nanotron takes at least 4.5 ms per layer on H100
(Ultra-Scale playbook)."""

CPU_OP_SECONDS = 5e-6
"""Seconds for one operation on a CPU, which has no driver."""

KERNELS_PER_MATRIX = 5
"""Number of kernels of a forward pass per weight matrix, with the element-wise kernels between them. A Llama block has
36 kernels for 7 matrices."""

CPU_KERNELS_PER_MATRIX = 3
"""Number of kernels per weight matrix on a CPU, where views cost nothing."""

CPU_OPS_PER_STAGE_PASS = 300
"""Number of operations that one micro-batch adds to a stage on a CPU, outside its layers, forward and backward. They
are masks and positions, hooks, flat buffers, the Python code of the schedule, and messages. Measured were steps of 1 to
16 micro-batches, with 2, 4 and 8 blocks, on 1 and 2 stages. Each micro-batch added 1.4 to 3 ms of processor time, at
4.5 us per operation."""

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
"""Times that each micro-batch moves the stored gradients through memory: at least one read and one write."""

FP8_CAST_PASSES = 2.0
"""Elements of the compute dtype that move for each operand of an 8-bit product. It is read for the maximum, read again,
written, and written transposed at half the size."""

COLLECTIVE_LAUNCH_SECONDS = 300e-6
"""Host seconds for one tensor-parallel collective called through autograd, with the operations around it. It accounts
for the rest of the 4.5 ms of `KERNEL_LAUNCH_SECONDS`."""

TP_ALL_REDUCES_PER_BLOCK = 2
"""Number of all-reduces over the tensor ranks in one block and direction, one in attention and one in the feed-forward
(Megatron-LM, arXiv 1909.08053, figure 4). Sequence parallelism gathers and scatters the same number of bytes (arXiv
2205.05198, section 4.2.2)."""

VOCAB_LOSS_ALL_REDUCES = 3
"""Number of all-reduces of one float32 per token in a vocabulary-parallel loss: the largest logit, the sum of
exponentials, and the logit of the label."""

LOSS_ELEMENT_BYTES = 4
"""Bytes per element of the all-reduces in a vocabulary-parallel loss."""

OVERLAP_SLOWDOWN = 0.13
"""Fraction by which compute is slower while a collective overlaps with it (Galvatron overlap_coefficient.json, A100:
1.1256)."""

OPTIMIZER_STATE_PASSES = 2
"""Times that the optimizer moves each main weight and state through memory: one read and one write. Gradients are read
twice (norm, update)."""

EXPERT_IMBALANCE = 1.25
"""Tokens of the expert rank with the most tokens, divided by the mean. It is the capacity factor with which Switch
Transformer trains (arXiv 2101.03961, section 3.1)."""

RING_KV_BLOCKS_IN_FLIGHT = 2
"""Number of blocks of keys and values in transit through a context rank: the received block and its gradient (arXiv
2310.01889, section 3)."""

RING_KV_BLOCKS_LOCAL = 4
"""Number of additional local blocks: keys and values as one message, and partial gradients, once as computed and once
as added."""

RING_QUERY_TENSORS = 4.5
"""Number of additional tensors with the width of the queries: the gradients of the block, of the output and of the
queries, and the partial gradient of the queries."""

ULYSSES_QUERY_TENSORS = 6
"""Number of additional tensors with the width of the queries if heads are exchanged: a gradient before and after its
exchange, and the message."""

SHARED_UNSHARD_SECONDS = 5e-4
"""Seconds in which ranks of one host unshard a ZeRO-3 parameter group whose weights are in shared memory. The ranks
synchronise (90 us of processor time with 4 ranks) and read what other ranks have just written. With 20 unshards of 7
MiB, a step took 12 ms more than ZeRO 2 without its all-gather."""

CP_SHARED_BUFFERS = 2
"""Number of concurrent attention messages of ranks that share memory: one that other ranks still read, and the next
one."""

CPU_UPDATE_PARAMS_PER_SECOND = 4e9
"""Parameters that the processors of one node update per second. CPU-Adam takes 1.03 s for 4 B and 2.57 s for 10 B
(ZeRO-Offload, arXiv 2101.06840, table 4). A value measured by the profiler takes precedence."""

CPU_ADDS_PER_UPDATE = 4
"""Number of elements that a CPU adds to a sum in the time of one update. An addition moves 6 bytes; AdamW moves 26
bytes and also computes (bf16 gradients)."""

PINNED_MEMORY_OVERHEAD = 1.44
"""Host bytes that torch allocates per requested byte of pinned memory. It rounds up to powers of two
(ATen/core/CachingHostAllocator.h). If all sizes are equally likely, it allocates 1 / ln 2 times the requested bytes."""

BOUNCE_BUFFER_BYTES = 2 << 20
"""Bytes of the buffer through which a CPU rank writes saved activations to a file, as in
runtime/offload/activation_store.py."""

PIPELINE_FILL_FACTOR = 2.0
"""Cost of filling the pipeline of a collective with chunks of optimal size, in units of sqrt(wire seconds x hop
seconds). The theoretical value is 2. Measured all-gathers of 256 MiB on 8 to 128 H100 agree within 15 % (Ultra-Scale
playbook)."""

COLLECTIVE_START_SECONDS = 6e-6
"""Seconds until a step of a collective has started. Twice this time plus the hops give the 40 us of a small all-reduce
over 8 devices, and 17 us over 2 devices."""

MIN_SWITCH_REDUCE_RANKS = 5
"""Minimum number of ranks for which NCCL reduces in the switch (NVLS). Rings are faster for up to 4 ranks (measured on
H200 and B200)."""

TREE_BANDWIDTH_FRACTION = 0.45
"""Fraction of a ring's bandwidth that double trees reach between nodes. All-reduces of 256 MiB on 8 and 16 nodes take
5.3 and 6.3 ms (Ultra-Scale playbook). NCCL's own tables say 0.9."""

MIN_BUCKET_BYTES = 2**18
"""Minimum bucket size in bytes. For smaller buckets the start-up dominates a collective between nodes."""

COMPILE_SECONDS = 19.4
"""Seconds of torch.compile for one kind of block on an accelerator, only forward. A Llama 3 8B whose blocks share their
code takes 4.6 s to trace and 14.8 s to generate code (vllm-project/vllm, pull request 11005). A training run reports
the measured time."""

CPU_COMPILE_SECONDS = 37.0
"""Seconds of torch.compile for one kind of block on a CPU, forward and backward, with the C++ compiler. A Llama of
width 64 with torch 2.13 took 36.3 processor seconds for 2 blocks and 37.0 for 8 blocks."""

GLOO_REDUCE_BUFFERS = 2
"""Number of full buffers that a reduction allocates on a CPU, where it is an all-to-all into a second buffer."""

MIN_IN_PLACE_ELEMENTS = 1 << 16
"""Minimum number of elements of a matrix from which CPU products add to its gradient in place. Source:
runtime/wgrad/accumulation.py."""
