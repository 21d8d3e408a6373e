"""The lines about disks, checkpoints and records in Chinese, by their English words; `lines.py` says how they are found."""

from __future__ import annotations

STORAGE = {
    "a rank says {}, which this version does not know: passed over": "某个 rank 发来 {0}，本版本不认识：略过",
    "no checkpoint at step {}: {}; training goes on{}": "第 {0} 步没有检查点：{1}；训练继续{2}",
    "; {} saves in a row have failed, none since {} is on disk": "；连续 {0} 次保存失败，磁盘上没有 {1} 之后的检查点",
    "the checkpoint of step {} has made no progress for {}{}; given up after {} s": "第 {0} 步的检查点已有 {1} 没有进展{2}；{3} 秒后放弃",
    "the process that writes it made no progress for {}": "写它的进程已有 {0} 没有进展",
    "the process that writes it ended with status {}": "写它的进程以状态 {0} 结束",
    "process {}, which wrote one before, still waits for its disk and cannot be ended": "先前写检查点的进程 {0} 仍在等磁盘，无法结束",
    "no plan for {} to {} ranks was found in {} s: ask for fewer": "{2} 秒内没有找到 {0} 到 {1} 个 rank 的方案：请求更少的 rank",
    "still planning for {} ranks": "仍在为 {0} 个 rank 规划",
    "the number of ranks that is asked for cannot be read: {}": "读不出所请求的 rank 数：{0}",
    "{} asks for {} ranks: a number from 1 to {} is wanted here; goes on as before": "{0} 请求 {1} 个 rank：这里要写 1 到 {2} 的数；照旧继续",
    "removed {}, so that the last checkpoint finds room": "已删除 {0}，给最后的检查点腾出空间",
    "the last checkpoint is tried again in {} s": "{0} 秒后再试写最后的检查点",
    "records wait in memory from step {} on: {}; training goes on": "从第 {0} 步起记录在内存里等待：{1}；训练继续",
    "the records from step {} on are written": "从第 {0} 步起的记录已写入",
    "{} records from step {} on are lost: {}": "从第 {1} 步起的 {0} 条记录丢失：{2}",
    "checkpoint {} is not needed any more and cannot be removed: {}": "检查点 {0} 不再需要，但无法删除：{1}",
    "still reading: the disk of the run is slow, or does not answer": "仍在读取：运行目录的磁盘很慢，或没有响应",
    "{} step more has no record of what they read": "另有 {0} 步没有读取记录",
    "{} steps more have no record of what they read": "另有 {0} 步没有读取记录",
    "step {}: training has waited {} so far for a checkpoint to be written": "第 {0} 步：训练已等待 {1}，等检查点写完",
    "old checkpoints are not removed: {}": "旧检查点没有删除：{0}",
}
