"""Lines about recompute and offload in Chinese, by their English words; `lines.py` says how they are found."""

from __future__ import annotations

KEEPS = {
    "proving the plan {}, for about {}": "{0}正在证明方案，大约需要 {1}",
    "proven equal to one device {}: loss {}, gradients {}, {} parameters, {} rows in {} batches ({}){}": "{0}已证明与单卡相等：损失 {1}，梯度 {2}，{3} 个参数，{5} 个批次共 {4} 行（{6}）{7}",
    "before step {}": "在第 {0} 步之前",
    "every {} steps": "每 {0} 步",
    "{}, {} predicted": "{0}，预计 {1}",
    "one device with the batch as one micro-batch: nothing to prove": "单卡，整个批次是一个 micro-batch：无需证明",
    "the plan is not proven on these ranks: a proof would take about {}, more than {} of the first {} steps; --prove runs it all the same (prove='start' in Python), `meshwright verify` proves a small model of this kind": "没有在这些 rank 上证明该方案：证明约需 {0}，超过前 {2} 步的 {1}；--prove 仍会证明（Python 中用 prove='start'），`meshwright verify` 用同类的小模型证明",
    "plan {}: the proof run differs from one device: {}: use another plan (data parallelism alone changes least), or train without the proof with prove='never'": "方案 {0}：证明运行与单卡不同：{1}：请换一个方案（单独的数据并行改动最少），或用 prove='never' 不经证明地训练",
    "recompute_layers {} counts blocks that recompute as a whole or by operation: write recompute layer or operations": "recompute_layers {0} 数的是整块重算或按运算重算的块：写 recompute layer 或 operations",
    "recompute_rest {} is of the blocks behind the first ones that recompute as a whole: write rc-full8+sac": "recompute_rest {0} 说的是前几个整块重算的块之后的块：写 rc-full8+sac",
    "pin recompute_rest={} is of the blocks behind the first ones that recompute: pin recompute_layers too": "固定 recompute_rest={0} 说的是前几个重算的块之后的块：请同时固定 recompute_layers",
    "offload {} names each of {} at most once, in this order": "offload {0} 里 {1} 各至多写一次，按这个顺序",
    "offload_share {} is of the optimizer's states: write off-optimizer{}, or with -disk": "offload_share {0} 说的是优化器状态：写 off-optimizer{1}，或者加上 -disk",
    "weights_share {} is of the weights: write off-parameters{}, or with -disk": "weights_share {0} 说的是权重：写 off-parameters{1}，或者加上 -disk",
    "off-gradients: their sums wait where the update is, each rank's own: write z2 or z3 and off-optimizer beside it (dp1.z2.off-optimizer.off-gradients)": "off-gradients：梯度之和放在更新所在的地方，每个 rank 只放自己的：写 z2 或 z3，并加上 off-optimizer（dp1.z2.off-optimizer.off-gradients）",
    "pins offload_share={} and offload={}: the share is of the optimizer's states: pin optimizer or optimizer-disk in off too": "固定的 offload_share={0} 与 offload={1}：比例说的是优化器状态：请在 off 里也固定 optimizer 或 optimizer-disk",
    "pin {}={}: there is nowhere to wait: these devices compute in their host's memory, or no way to it is known (host_bandwidth), and no node has a disk (storage_bandwidth)": (
        "固定的 {0}={1}：没有可存放的地方：这些设备就在主机内存中计算，或者不知道通往主机内存的带宽（host_bandwidth），并且没有节点带磁盘（storage_bandwidth）"
    ),
    "pins weights_share={} and offload={}: the share is of the weights: pin parameters or parameters-disk in off too": "固定的 weights_share={0} 与 offload={1}：比例说的是权重：请在 off 里也固定 parameters 或 parameters-disk",
    "in {} what is updated is the weights themselves: of the states at least the share of the weights must wait on the host ({}, not {}), so that those which wait are updated there; or use bf16": "{0} 里更新的是权重本身：状态放在主机上的份额至少要和权重的一样（{1}，不是 {2}），这样放在那里的权重就在那里更新；或者用 bf16",
    "offload names {} twice: on the host, or in files": "offload 两次写了 {0}：放在主机内存，还是放在文件里，只能选一个",
    "off-{}: weights that wait elsewhere come up layer by layer as those of z3 do: write z3 (one rank too: dp1.z3)": "off-{0}：放在别处的权重像 z3 那样逐层取上来：请写 z3（单个 rank 也一样：dp1.z3）",
    "offload_layers {} counts blocks whose activations wait: write off-activations{}": "offload_layers {0} 数的是激活放在别处的块：写 off-activations{1}",
    "off-{}{}: of a stage the same first blocks recompute and send activations away, not {} and {}; recompute all alike, or as many": "off-{0}{1}：一个阶段里重算的和送出激活的是同样的前几个块，不能是 {2} 个和 {3} 个；全部一样地重算，或者同样多",
    "pin offload_layers={} counts blocks whose activations wait: pin off=[activations] too": "固定 offload_layers={0} 数的是激活放在别处的块：请同时固定 off=[activations]",
}
