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
"""A plan fits with a margin below this factor, and tightly above it. The largest of the same 26 stages is 1.225, the
smallest 1.058."""

USABLE_MEMORY_FRACTION = 0.98
"""Fraction of a device's memory that a process can use: 79.15 to 79.35 of 80 GiB in BigScience's nvidia-smi logs, less
a reserve."""

P2P_BUFFERS = 4
"""Hidden states that a pipeline rank stores for its neighbours: one received ahead, its gradient, and one sent each
way."""

P2P_BUFFERS_SHARED_MEMORY = 2
"""The same number where ranks read each other's memory: nothing is received ahead, and both directions send from one
buffer."""

MEMORY_BANDWIDTH_EFFICIENCY = 0.9
"""Fraction of a device's memory bandwidth that large transfers reach (calculon systems/a100_80g.json:
0.90 at 100 MB)."""

SUSTAINED_MATMUL_FRACTION = 0.83
"""Fraction of a device's best matrix rate that the products of a whole step reach, with ordinary shapes, and warm
devices that limit power and clocks. It is the one fitted constant: the median over Megatron's published A100 steps
(arXiv 2104.04473 table 1, 2205.05198 table 5), which are within 0.79 to 0.96."""

MATMUL_RAMP_SECONDS = 3e-6
"""Seconds that a matrix product loses at its start and end. calculon's A100 table of efficiencies (0.95 from 128 GFLOP,
0.90 from 16, 0.60 from 1) is peak plus 2 to 3 us a product."""

MATMUL_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
"""Tiles of a matrix product, and the fraction of the best rate that they reach (NVIDIA, Matrix Multiplication
Background, figure 6)."""

SPLIT_K_WAVE_FRACTION = 0.7
"""Fraction of a wave for products with fewer tiles than processors. The cut of the inner dimension fills the
processors, and the sum of the parts is the rest of the cost."""

KERNEL_LAUNCH_SECONDS = 10e-6
"""Host seconds for one kernel of eager PyTorch with autograd. The device waits for the host below this. It is 7 us
without autograd in autoparallel's docs. A micro-batch of nanotron takes at least 4.5 ms a layer on H100 (Ultra-Scale
playbook)."""

CPU_OP_SECONDS = 5e-6
"""The same on a CPU, which has no driver."""

KERNELS_PER_MATRIX = 5
"""Kernels of a forward pass for each weight matrix, the element-wise ones between them included: 36 for the 7 of a
Llama block."""

CPU_KERNELS_PER_MATRIX = 3
"""The same on a CPU, where views cost nothing."""

CPU_OPS_PER_STAGE_PASS = 300
"""Operations that one micro-batch adds to a stage on a CPU, outside its layers, forward and backward. They are masks
and positions, hooks, flat buffers, the Python code of the schedule, and messages. Processor time of steps of 1 to 16
micro-batches, 2, 4 and 8 blocks, 1 and 2 stages: 1.4 to 3 ms each at 4.5 us an operation."""

ATTENTION_EFFICIENCY = 0.75
"""Fraction of the matrix efficiency that fused attention reaches. FlashAttention-2 (arXiv 2307.08691, figure 4) reaches
190 to 225 of 312 TFLOP/s on an A100, plain matrix products 271."""

BACKWARD_FORWARD_RATIO = 2.0
"""Backward over forward in FLOPs and in bytes of a layer: a gradient for the input and one for the weights."""

ATTENTION_BACKWARD_RATIO = 2.5
"""Backward over forward of fused attention: five products in backward, two in forward (arXiv
2307.08691, section 3.1)."""

GRAD_ACCUMULATION_PASSES = 2
"""Passes of each micro-batch over the stored gradients: one read and one write, at least."""

FP8_CAST_PASSES = 2.0
"""Elements of the compute dtype that move for each operand of an 8-bit product: read for the maximum, read, written,
and written transposed at half size."""

COLLECTIVE_LAUNCH_SECONDS = 300e-6
"""Host seconds for one tensor-parallel collective, called through autograd, and the operations around it (the rest of
those 4.5 ms)."""

TP_ALL_REDUCES_PER_BLOCK = 2
"""Sums over the tensor ranks in one block and direction, attention and feed-forward (Megatron-LM, arXiv 1909.08053,
figure 4). Sequence
parallelism gathers and scatters the same bytes (arXiv 2205.05198, section 4.2.2)."""

VOCAB_LOSS_ALL_REDUCES = 3
"""All-reduces of one float32 a token in a vocabulary-parallel loss: the largest logit, the sum of exponentials, and the
logit of the label."""

LOSS_ELEMENT_BYTES = 4
"""Bytes of an element of these all-reduces."""

OVERLAP_SLOWDOWN = 0.13
"""Compute takes 1.13 times as long while a collective overlaps with it (Galvatron overlap_coefficient.json, A100:
1.1256)."""

OPTIMIZER_STATE_PASSES = 2
"""Times that the optimizer passes over each main weight and state: one read and one write. Gradients are read twice
(norm, update)."""

EXPERT_IMBALANCE = 1.25
"""Tokens of the busiest expert rank over the mean: the capacity factor at which Switch Transformer trains (arXiv
2101.03961, section 3.1)."""

RING_KV_BLOCKS_IN_FLIGHT = 2
"""Blocks of keys and values in transit through a context rank: the received one and its gradient (arXiv 2310.01889,
section 3)."""

RING_KV_BLOCKS_LOCAL = 4
"""Extra local blocks: keys and values as one message, and a part of their gradients, once as computed and once as
added."""

RING_QUERY_TENSORS = 4.5
"""Additional tensors of a query's width: the gradients of the block, of the output and of queries, and the gradient of
queries from the current part."""

ULYSSES_QUERY_TENSORS = 6
"""The same where heads are exchanged: a gradient before and after its exchange, and the message."""

SHARED_UNSHARD_SECONDS = 5e-4
"""Seconds in which ranks of one host unshard a unit of ZeRO 3 whose weights the host stores once. They synchronise (90
us of processor time with 4 ranks) and read what others have just written. 20 unshards of 7 MiB a step took 12 ms more
than ZeRO 2 without its all-gather."""

CP_SHARED_BUFFERS = 2
"""Concurrent attention messages of ranks that share memory: one that others still read, and the next."""

CPU_UPDATE_PARAMS_PER_SECOND = 4e9
"""Parameters that the processors of one node update in a second. CPU-Adam takes 1.03 s for 4 B and 2.57 s for 10 B
(ZeRO-Offload, arXiv 2101.06840, table 4). A measured value of the profiler replaces it."""

CPU_ADDS_PER_UPDATE = 4
"""Elements that a CPU adds to a sum in the time of one update. An addition moves 6 bytes, AdamW moves 26 and computes
(bf16 gradients)."""

PINNED_MEMORY_OVERHEAD = 1.44
"""Host bytes that torch allocates for each requested byte of pinned memory. It allocates powers of two
(ATen/core/CachingHostAllocator.h), which is 1 / ln 2 times as much if all sizes are equally likely."""

BOUNCE_BUFFER_BYTES = 2 << 20
"""Bytes of the buffer through which a CPU rank writes saved activations to a file: that of the runtime
(runtime/offload/activation_store.py)."""

PIPELINE_FILL_FACTOR = 2.0
"""Cost of filling the pipeline of a collective with chunks of the best size, in sqrt(wire x hops). The theoretical
value is 2. Measured all-gathers of 256 MiB on 8 to 128 H100 agree within 15 % (Ultra-Scale playbook)."""

COLLECTIVE_START_SECONDS = 6e-6
"""Seconds until a step of a collective has started. Twice that and the hops make the 40 us of a small all-reduce over 8
devices, 17 over 2."""

MIN_SWITCH_REDUCE_RANKS = 5
"""Smallest number of ranks for which NCCL lets the switch add (NVLS). Rings are faster up to 4 (measured on H200 and
B200)."""

TREE_BANDWIDTH_FRACTION = 0.45
"""Fraction of a ring's bandwidth that double trees reach between nodes. All-reduces of 256 MiB on 8 and 16 nodes take
5.3 and 6.3 ms (Ultra-Scale playbook; NCCL's own tables say 0.9)."""

MIN_BUCKET_BYTES = 2**18
"""Size in bytes below which start-up dominates a collective between nodes, whatever the formula says."""

COMPILE_SECONDS = 19.4
"""Seconds of torch.compile for one kind of block on an accelerator, forward alone. A Llama 3 8B with common code for
its blocks takes 4.6 to trace and 14.8 to generate (vllm-project/vllm, pull request 11005). A run reports its own time.
"""

CPU_COMPILE_SECONDS = 37.0
"""The same on a CPU, forward and backward, C++ compiler included: 36.3 processor seconds for 2 and 37.0 for 8 blocks of
a Llama of width 64, torch 2.13."""

GLOO_REDUCE_BUFFERS = 2
"""Full buffers that a reduction allocates on a CPU, where it is an all-to-all into a second buffer."""

MIN_IN_PLACE_ELEMENTS = 1 << 16
"""Size of a matrix, in elements, from which on CPU products add to its gradient in place. Source:
runtime/wgrad/accumulation.py."""
