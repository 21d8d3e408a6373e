"""Lines of rules about precisions and optimizers in Chinese, by their English words; `lines.py` says how they are found."""

from __future__ import annotations

UPDATES = {
    "fp8 runs without tensor parallelism and zero-bubble schedules: use tp1 and 1f1b, or bf16": "fp8 不能与张量并行或零气泡调度同用：请用 tp1 和 1f1b，或者 bf16",
    "compressed gradients go in equal parts: leave shards out, or compression": "压缩的梯度只按等份发送：去掉 shards，或者去掉 compression",
    "in {} what is updated is the weights themselves, which wait on the host: add off-optimizer, so that they are updated there, or use bf16": "在 {0} 下更新的就是放在主机上的权重本身：请加上 off-optimizer，让更新也在那里做，或者用 bf16",
    "{} cannot wait elsewhere: leave off-{} out, or use AdamW with bf16": "{0} 不能放在别处：去掉 off-{1}，或者用 AdamW 配 bf16",
    "an optimizer of whole tensors": "更新完整张量的优化器",
    "precision {}": "精度 {0}",
    "states of 8 bits": "8 位的状态",
    "the optimizer needs {} whole, of which ep deals the experts to ranks: use ep1, or AdamW": "优化器需要完整的 {0}，而 ep 把其中的专家分给了各 rank：请用 ep1，或者 AdamW",
    "workload.local does not go with {}; leave it out": "workload.local 不能与 {0} 同用；请去掉它",
    "dp_replicate({}) is not workload.local.replicas({}); use dp{}, or dp{}xN.z1": "dp_replicate({0}) 不等于 workload.local.replicas({1})；请用 dp{2}，或 dp{3}xN.z1",
    "micro_batch({}) is not workload.exact({}); use mb{}": "micro_batch({0}) 不是 workload.exact({1})；请用 mb{2}",
    "{} counts blocks of a stage, which has {} at most: write {} for all of them": "{0} 数的是一级里的块，而一级最多有 {1} 块：全部就写 {2}",
    "{} is of {}; {} has none: leave it out": "{0} 属于 {1}；{2} 没有它：请去掉",
    "cooldown is of the schedule warmup-stable-decay: leave it out, or choose that": "cooldown 属于学习率日程 warmup-stable-decay：请去掉，或者选择它",
    "final_lr is of schedules that fall, which constant does not: leave it out, or choose another": "final_lr 属于会下降的学习率日程，constant 不会：请去掉，或者选择别的",
}
