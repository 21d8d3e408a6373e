"""The lines about a supervisor that was killed, and the one that takes its place, in Chinese."""

from __future__ import annotations

ADOPTION = {
    "goes on from the snapshots of step {}": "从第 {0} 步的内存快照继续",
    "the supervisor was killed": "监督进程被杀死",
    "the supervisor was killed in step {}, {}: {}": "监督进程被杀死（第 {0} 步，{1}）：{2}",
    "the supervisor was killed while it was in {}: {}": "监督进程被杀死（{0}）：{1}",
    "the supervisor failed: {}": "监督进程出错：{0}",
    "another one adopts its snapshots": "另一个监督进程接管它的内存快照",
    "the snapshots of the killed supervisor {}: not adopted": "被杀死的监督进程的内存快照{0}：不接管",
    "were adopted by another process": "已被别的进程接管",
    "are those of another user": "属于另一个用户",
    "are not wanted (run.anew)": "不再需要（run.anew）",
    "are of another job": "属于另一个任务",
    "are of version {}, this is {}": "来自版本 {0}，这里是 {1}",
    "may still be written: not all of its processes have ended within {} s": "可能仍在被写入：{0} 秒内它的进程没有全部结束",
    "cannot be read ({}: {})": "无法读取（{0}：{1}）",
    "nothing holds the snapshots if this process is killed, which would cost the steps since the last checkpoint: {}": "此进程若被杀死，没有进程保存内存快照，会丢掉上一个检查点之后的步：{0}",
}
