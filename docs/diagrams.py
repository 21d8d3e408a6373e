"""Draws the diagrams of the strategies as SVG, in both languages, into `pictures/`. Every position comes from the code
that plans and runs: rows of the batch, shards, parameters, schedules, chunks of a sequence, experts.
`docs/generate.py` runs this file, and a test compares, so that no diagram is out of date.

A diagram has no background, and its text has the colours of the page: of the site when it is written into one of its
pages, else those that the reader's system prefers.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import pairwise
from pathlib import Path

from meshwright import estimate
from meshwright.catalog import read as catalog
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import sizes_from_catalog
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.runtime.context_parallel.blocks import HeadTailSplit
from meshwright.runtime.expert_parallel.groups import ep_coords
from meshwright.spec.grid import RankGrid, micro_batch_rows
from meshwright.spec.layout import shard_bounds
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import RECIPES
from meshwright.spec.schedules.action import ActionKind, ScheduleTimeline, simulate_orders
from meshwright.spec.schedules.schedule import find_schedule, offered_schedules, schedule_orders

WIDTH = 760
"""Width of every diagram in pixels."""
STYLE = (
    "<style>.mw{--i:#1f2430;--m:#6b7280;--g:#cbd5e1}"
    "@media(prefers-color-scheme:dark){.mw{--i:#e5e7eb;--m:#9ca3af;--g:#475569}}"
    ".mw text{font:13px system-ui,sans-serif;fill:var(--md-typeset-color,var(--i))}"
    ".mw .s{font-size:11px}.mw .m{fill:var(--md-default-fg-color--light,var(--m))}.mw .b{font-weight:600}"
    ".mw .t{fill:#0f172a;font-size:11px}.mw .o{fill:none;stroke:var(--md-default-fg-color--lighter,var(--g))}</style>"
)
RANK_COLOURS = ("#7dd3fc", "#fca5a5", "#86efac", "#fcd34d", "#c4b5fd", "#fdba74", "#5eead4", "#f9a8d4")
FORWARD, BACKWARD, WEIGHTS = "#7dd3fc", "#fcd34d", "#86efac"


class Drawing:
    """The elements of one diagram in one language. A label is a pair: English and Chinese."""

    def __init__(self, language: str) -> None:
        self.language, self.elements, self.height = language, list[str](), 0.0

    def said(self, label: str | tuple[str, str]) -> str:
        """Returns a label in the language of the diagram."""
        return label if isinstance(label, str) else label[self.language == "zh"]

    def box(self, x: float, y: float, width: float, height: float, fill: str = "", tip: str = "") -> None:
        """Draws a rectangle, as an outline without `fill`."""
        paint = f'fill="{fill}"' if fill else 'class="o"'
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
        inner = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self.elements.append(f'<rect {place} rx="2" {paint}{inner}')
        self.height = max(self.height, y + height)

    def text(self, x: float, y: float, label: str | tuple[str, str], kind: str = "", anchor: str = "start") -> None:
        """Writes a label with its baseline at `y`."""
        style = f' class="{kind}"' if kind else ""
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}"{style} text-anchor="{anchor}">{escape(self.said(label))}</text>'
        )
        self.height = max(self.height, y + 4)

    def boxed(self, x: float, y: float, width: float, height: float, fill: str, label: str | tuple[str, str]) -> None:
        """Draws a rectangle with a label in its middle."""
        self.box(x, y, width, height, fill)
        self.text(x + width / 2, y + height / 2 + 4, label, "t", "middle")

    def legend(self, y: float, entries: Iterable[tuple[str, tuple[str, str]]]) -> None:
        """Draws coloured squares with their meanings in one row."""
        x = 0.0
        for fill, label in entries:
            self.box(x, y, 12, 12, fill)
            self.text(x + 18, y + 11, label, "s")
            x += 34 + sum(12 if ord(letter) > 255 else 6.2 for letter in self.said(label))

    def svg(self, title: tuple[str, str]) -> str:
        """Returns the whole diagram. `title` is read aloud instead of it."""
        size = f'viewBox="0 0 {WIDTH} {self.height + 6:.0f}" width="{WIDTH}" height="{self.height + 6:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="mw" role="img" {size}>'
        return "\n".join([head, f"<title>{escape(self.said(title))}</title>", STYLE, *self.elements, "</svg>"]) + "\n"


def ranks_diagram(drawing: Drawing) -> str:
    """The mesh of a combined plan: which part of the model and which rows each rank has."""
    plan, batch = parse_plan("dp2.tp2.pp4.z1"), 16
    grid = RankGrid(plan)
    drawing.text(0, 14, (f"{plan.name} on 2 nodes of 8 devices", f"{plan.name}，2 个节点，每个 8 个设备"), "b")
    for rank in range(plan.world):
        node, column = divmod(rank, 8)
        x, y, place = 95 * column, 46 + 92 * node, grid.place(rank)
        rows = micro_batch_rows(plan, batch, grid.replica(rank))
        drawing.box(x, y, 86, 62, RANK_COLOURS[place.pp])
        drawing.text(x + 43, y + 16, f"rank {rank}", "t b", "middle")
        drawing.text(
            x + 43, y + 32, (f"stage {place.pp}, half {place.tp}", f"阶段 {place.pp}，半 {place.tp}"), "t", "middle"
        )
        drawing.text(
            x + 43,
            y + 48,
            (f"rows {rows[0][0]}-{sum(rows[-1]) - 1}", f"行 {rows[0][0]}-{sum(rows[-1]) - 1}"),
            "t",
            "middle",
        )
        if not column:
            drawing.text(0, y - 8, (f"node {node}", f"节点 {node}"), "s m")
    label = (
        "Neighbours share a layer (tp), pairs read different rows (dp), colours are pipeline stages (pp).",
        "相邻的 rank 分一层（tp），各对读不同的行（dp），颜色是流水线阶段（pp）。",
    )
    drawing.text(0, 222, label, "s m")
    return drawing.svg(
        ("The ranks of a plan with data, tensor and pipeline parallelism", "数据、张量、流水线并行组合方案的各个 rank")
    )


def data_diagram(drawing: Drawing) -> str:
    """Data parallelism: whole replicas, different rows of the batch."""
    plan, batch = parse_plan("dp4.mb4"), 32
    for replica in range(plan.dp):
        y = 30 + 42 * replica
        drawing.text(0, y + 19, f"rank {replica}")
        drawing.boxed(60, y, 250, 28, RANK_COLOURS[0], ("all weights, gradients, states", "全部权重、梯度、优化器状态"))
        for start, count in micro_batch_rows(plan, batch, replica):
            x = 340 + start * 12.5
            drawing.boxed(x, y, count * 12.5 - 2, 28, RANK_COLOURS[3], f"{start}-{start + count - 1}")
    drawing.text(60, 18, ("stored on the rank", "存放在该 rank 上"), "s m")
    drawing.text(340, 18, (f"rows of the batch of {batch}, by micro-batch", f"{batch} 行的批次，按微批"), "s m")
    drawing.text(
        60,
        214,
        (
            "After the last micro-batch, one all-reduce sums the gradients.",
            "最后一个微批之后，一次 all-reduce 对梯度求和。",
        ),
        "s m",
    )
    return drawing.svg(("Data parallelism", "数据并行"))


def zero_diagram(drawing: Drawing) -> str:
    """ZeRO: the bytes of each kind of state on each rank, to scale."""
    recipe, ranks, numel = RECIPES["bf16"], 4, 4096
    parts = (
        (("weights", "权重"), recipe.size, 3, RANK_COLOURS[0]),
        (("gradients", "梯度"), recipe.gradient_size, 2, RANK_COLOURS[3]),
        (("optimizer states", "优化器状态"), recipe.master + 2 * recipe.state_size, 1, RANK_COLOURS[2]),
    )
    whole = sum(size for _, size, _, _ in parts)
    bounds = shard_bounds(numel, ranks)
    drawing.legend(4, [(fill, label) for label, _, _, fill in parts])
    for stage in range(4):
        y = 30 + 84 * stage
        drawing.text(0, y + 36, f"z{stage}", "b")
        stored = 0.0
        for rank, (start, stop) in enumerate(pairwise(bounds)):
            x, stored = 60.0, 0.0
            for _, size, least, fill in parts:
                width = 580 * size / whole
                drawing.box(x, y + 18 * rank, width - 2, 15)
                first, last = (start, stop) if stage >= least else (0, numel)
                shift, part = (width - 2) * first / numel, (width - 2) * (last - first) / numel
                drawing.box(x + shift, y + 18 * rank, part, 15, fill)
                stored += size * (last - first) / numel
                x += width
            drawing.text(36, y + 18 * rank + 12, f"{rank}", "s m")
        drawing.text(WIDTH, y + 36, (f"{stored:g} of {whole} bytes", f"{whole} 字节中的 {stored:g}"), "s", "end")
    return drawing.svg(("What four ranks store at ZeRO stages 0 to 3", "ZeRO 0 到 3 时四个 rank 各自存放的内容"))


def tensor_diagram(drawing: Drawing) -> str:
    """Tensor parallelism: the matrices of one block, sharded as the planner and the runtime shard them."""
    sizes = sizes_from_catalog(catalog.models()["llama2-7b"])
    block = next(layer for layer in model_spec("llama2-7b", sizes).layers if layer.name == "block")
    ranks, scale = 4, 190 / max(max(each.shape) for each in block.parameters)
    x, y = 0.0, 40.0
    drawing.text(
        0,
        16,
        (
            "weights of a block of Llama 2 7B, stored as outputs x inputs",
            "Llama 2 7B 一个块的权重，按 输出 x 输入 存储",
        ),
        "b",
    )
    matrices = [parameter for parameter in block.parameters if len(parameter.shape) == 2]
    for each in sorted(matrices, key=lambda parameter: parameter.shape[0]):
        rows, columns = each.shape
        width, height = columns * scale, rows * scale
        if x + width > WIDTH:
            x, y = 0.0, y + 112
        name = each.name.removesuffix(".weight").split(".")[-1]
        label = f"{name} {rows:,} x {columns:,}"
        drawing.text(x, y - 6, label, "s")
        for rank in range(ranks if each.split is not None else 1):
            across = each.split == 1
            drawing.box(
                x + (width * rank / ranks if across else 0),
                y + (0 if across else height * rank / ranks),
                width / ranks - 1 if across else width,
                height if across or each.split is None else height / ranks - 1,
                RANK_COLOURS[rank],
                f"rank {rank}",
            )
        x += max(width, 6.2 * len(label)) + 10
    drawing.legend(y + 205, [(RANK_COLOURS[rank], (f"rank {rank}", f"rank {rank}")) for rank in range(ranks)])
    return drawing.svg(("The matrices of a block on four tensor-parallel ranks", "一个块的矩阵在四个张量并行 rank 上"))


def timelines(pp: int, micro_batches: int) -> list[tuple[str, int, ScheduleTimeline]]:
    """Returns each schedule with its number of virtual stages, and its step. A whole forward of a rank takes 2 and a
    backward 4 units; the halves of a split backward are equal."""
    found = []
    for schedule in offered_schedules():
        virtual = 1 if schedule.name in ("1f1b", "gpipe", "zbh1") else 2
        stages = pp * virtual
        split = [find_schedule(schedule.name).splits_stage(stage) for stage in range(stages)]
        played = simulate_orders(
            schedule_orders(schedule.name, pp, virtual, micro_batches),
            [2 / virtual] * stages,
            [(2 if halved else 4) / virtual for halved in split],
            weight=[2 / virtual] * stages,
        )
        found.append((schedule.name_part(virtual) or schedule.name, virtual, played))
    return found


def schedules_diagram(drawing: Drawing) -> str:
    """Pipeline parallelism: every schedule for 4 ranks and 8 micro-batches, on one axis of time."""
    found = timelines(4, 8)
    longest = max(played.makespan for _, _, played in found)
    kinds = {ActionKind.F: FORWARD, ActionKind.B: BACKWARD, ActionKind.W: WEIGHTS}
    entries = (
        (FORWARD, ("forward", "前向")),
        (BACKWARD, ("backward (of the input)", "反向（对输入）")),
        (WEIGHTS, ("weight gradients", "权重梯度")),
    )
    drawing.legend(4, entries)
    y = 44.0
    for name, virtual, played in found:
        drawing.text(0, y, name, "b")
        peak = max(played.in_flight)
        label = (
            f"idle {played.bubble:.1%}, at most {peak:g} micro-batches in flight",
            f"空闲 {played.bubble:.1%}，最多 {peak:g} 个微批在途",
        )
        drawing.text(WIDTH, y, label, "s m", "end")
        for rank, line in enumerate(played.spans):
            top = y + 6 + 16 * rank
            drawing.text(0, top + 11, f"{rank}", "s m")
            for span in line:
                x, width = 20 + 740 * span.start / longest, 740 * (span.end - span.start) / longest
                drawing.box(x, top, width - 0.7, 14, kinds[span.action.kind], str(span.action))
                if width > 11:
                    drawing.text(x + width / 2, top + 11, f"{span.action.micro_batch}", "t", "middle")
                if span.action.stage >= len(played.spans) and virtual > 1:
                    drawing.box(x, top + 11.5, width - 0.7, 2.5, "#475569")
        y += 6 + 16 * len(played.spans) + 26
    label = (
        "4 pipeline ranks, 8 micro-batches. A dark line marks the second stage of a rank. All ranks compute 48 units.",
        "4 个流水线 rank，8 个微批。深色线标出一个 rank 的第二个阶段。每个 rank 的计算量相同。",
    )
    drawing.text(0, y - 6, label, "s m")
    return drawing.svg(("The pipeline schedules", "各种流水线调度"))


def context_diagram(drawing: Drawing) -> str:
    """Context parallelism: the chunks of a sequence, and the work of each under a causal mask."""
    ranks, length = 4, 64
    scale = 320 / length
    chunks = sorted(
        (piece.start, piece.stop, rank) for rank in range(ranks) for piece in HeadTailSplit(ranks, rank).chunks(length)
    )
    drawing.text(0, 16, ("the sequence, and the keys that each query reads", "序列，以及每个查询读取的键"), "s m")
    work = [0.0] * ranks
    for start, stop, rank in chunks:
        y = 30 + start * scale * 0.8
        drawing.boxed(0, y, 70, (stop - start) * scale * 0.8 - 1, RANK_COLOURS[rank], f"rank {rank}")
        for position in range(start, stop):
            drawing.box(90, 30 + position * scale * 0.8, (position + 1) * scale, scale * 0.8, RANK_COLOURS[rank])
            work[rank] += position + 1
    drawing.text(450, 16, ("work of a rank, causal mask", "各 rank 的工作量，因果掩码"), "s m")
    for rank, done in enumerate(work):
        drawing.text(450, 50 + 34 * rank, f"rank {rank}")
        drawing.box(505, 36 + 34 * rank, 200 * done / max(work), 20, RANK_COLOURS[rank])
        drawing.text(712, 50 + 34 * rank, f"{done / sum(work):.0%}", "s")
    return drawing.svg(
        ("Chunks of a sequence on four context-parallel ranks", "一条序列的各段在四个上下文并行 rank 上")
    )


def expert_diagram(drawing: Drawing) -> str:
    """Expert parallelism: which rank stores which experts."""
    plan, experts = parse_plan("dp4.tp2.z1.ep4"), 8
    grid, local = RankGrid(plan), experts // plan.ep
    title = (f"{plan.name}, 8 experts: attention and experts", f"{plan.name}，8 个专家：注意力与专家")
    drawing.text(0, 14, title, "b")
    for rank in range(plan.world):
        x, place = 95 * rank, ep_coords(grid, rank)
        drawing.text(x + 43, 38, f"rank {rank}", "s", "middle")
        half = grid.place(rank).tp
        drawing.boxed(x, 46, 86, 30, RANK_COLOURS[half], (f"attention {half}", f"注意力 {half}"))
        for at in range(local):
            drawing.boxed(
                x,
                84 + 34 * at,
                86,
                30,
                RANK_COLOURS[2 + place.expert],
                (f"expert {place.expert * local + at}", f"专家 {place.expert * local + at}"),
            )
        drawing.text(x + 43, 168, (f"half {place.share}", f"半 {place.share}"), "s m", "middle")
    label = (
        "Ranks of one colour store the same experts, each a half. An all-to-all brings tokens to their experts.",
        "颜色相同的 rank 存放相同的专家，各存一半。all-to-all 把 token 送到其专家所在的 rank。",
    )
    drawing.text(0, 192, label, "s m")
    return drawing.svg(("Experts on ranks", "专家在各 rank 上的分布"))


def recompute_diagram(drawing: Drawing) -> str:
    """Recompute: activations and time of a job under each kind, as the planner estimates them."""
    options = {
        "model.name": "llama2-7b",
        "cluster.name": "1x8:a100-80gb",
        "workload.batch": 64,
        "workload.sequence": 4096,
    }
    job = resolve_job(read_job(None, (), options))
    rows = []
    for part in ("", ".rc-attn", ".rc-sac", ".rc-full"):
        found = estimate(job, f"dp8.z3.mb1{part}")
        rows.append((part.removeprefix(".") or "-", found.memory.activations / 2**30, found.time.step))
    drawing.text(95, 14, ("activations of one sequence of Llama 2 7B", "Llama 2 7B 一条序列的激活值"), "s m")
    drawing.text(450, 14, ("time of a step", "一步的时间"), "s m")
    for at, (name, gib, seconds) in enumerate(rows):
        y = 26 + 32 * at
        drawing.text(0, y + 15, name)
        drawing.box(95, y, 260 * gib / rows[0][1], 20, RANK_COLOURS[0])
        drawing.text(360, y + 15, f"{gib:.1f} GiB", "s")
        drawing.box(450, y, 240 * seconds / rows[-1][2], 20, RANK_COLOURS[3])
        drawing.text(696, y + 15, f"{seconds / rows[0][2] - 1:+.0%}", "s")
    return drawing.svg(("Activations and time with and without recompute", "有无重计算时的激活值与时间"))


DIAGRAMS = {
    "ranks": ranks_diagram,
    "data": data_diagram,
    "zero": zero_diagram,
    "tensor": tensor_diagram,
    "schedules": schedules_diagram,
    "context": context_diagram,
    "expert": expert_diagram,
    "recompute": recompute_diagram,
}


def write(folder: Path) -> None:
    """Writes all diagrams in both languages to `pictures` below `folder`."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for name, draw in DIAGRAMS.items():
        for language in ("en", "zh"):
            path = folder / "pictures" / f"{name}-{language}.svg"
            path.write_text(draw(Drawing(language)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
