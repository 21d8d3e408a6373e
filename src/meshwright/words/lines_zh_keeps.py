"""Lines about recompute and offload in Chinese, by their English words; `lines.py` says how they are found."""

from __future__ import annotations

KEEPS = {
    "recompute_layers {} counts blocks that recompute as a whole or by operation: write recompute layer or operations": "recompute_layers {0} 数的是整块重算或按运算重算的块：写 recompute layer 或 operations",
    "recompute_rest {} is of the blocks behind the first ones that recompute as a whole: write rc-layer8-operations": "recompute_rest {0} 说的是前几个整块重算的块之后的块：写 rc-layer8-operations",
    "pin recompute_rest={} is of the blocks behind the first ones that recompute: pin recompute_layers too": "固定 recompute_rest={0} 说的是前几个重算的块之后的块：请同时固定 recompute_layers",
    "offload {} names each of {} at most once, in this order": "offload {0} 里 {1} 各至多写一次，按这个顺序",
    "offload_share {} is of the optimizer's states or of the weights: write off-optimizer{} or off-parameters{}, or with -files": "offload_share {0} 说的是优化器状态或权重：写 off-optimizer{1} 或 off-parameters{2}，或者加上 -files",
    "off-gradients: their sums wait where the update is, each rank's own: write z2 or z3 and off-optimizer beside it (dp1.z2.off-optimizer.off-gradients)": "off-gradients：梯度之和放在更新所在的地方，每个 rank 只放自己的：写 z2 或 z3，并加上 off-optimizer（dp1.z2.off-optimizer.off-gradients）",
    "offload_share {}: gradients wait where all of the update is: leave the share or off-gradients out": "offload_share {0}：梯度放在整个更新所在的地方：去掉份额，或去掉 off-gradients",
    "offload_share {}: weights and states both wait whole, or one of them in part: leave the share or one of the two out": "offload_share {0}：权重和状态要么都整个放在别处，要么只有其中一个按比例放：去掉比例，或者去掉其中一个",
    "pins offload_share={} and offload={}: a share is of the optimizer's states or of the weights, not of both: pin off=[optimizer], off=[parameters], or one of them with -files": "固定的 offload_share={0} 与 offload={1}：比例说的是优化器状态或权重，不能同时是两者：固定 off=[optimizer]、off=[parameters]，或其中一个加上 -files",
    "offload names {} twice: on the host, or in files": "offload 两次写了 {0}：放在主机内存，还是放在文件里，只能选一个",
    "off-{}: weights that wait elsewhere come up layer by layer as those of z3 do: write z3 (one rank too: dp1.z3)": "off-{0}：放在别处的权重像 z3 那样逐层取上来：请写 z3（单个 rank 也一样：dp1.z3）",
    "offload_layers {} counts blocks whose activations wait: write off-activations{}": "offload_layers {0} 数的是激活放在别处的块：写 off-activations{1}",
    "off-{}{}: of a stage the same first blocks recompute and send activations away, not {} and {}; recompute all alike, or as many": "off-{0}{1}：一个阶段里重算的和送出激活的是同样的前几个块，不能是 {2} 个和 {3} 个；全部一样地重算，或者同样多",
    "pin offload_layers={} counts blocks whose activations wait: pin off=[activations] too": "固定 offload_layers={0} 数的是激活放在别处的块：请同时固定 off=[activations]",
}
