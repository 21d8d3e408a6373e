"""The measurements that ranks make for `meshwright probe` and for trials of plans.

`probe` joins all ranks and measures the cluster; rank 0 reports the `ClusterProfile`.

`speed` times matrix products on a device that a training run has excluded.

`TrialRunner` runs trials: a few timed steps of a plan on the available ranks, with the job's own model and data.
Nothing is saved.

Guarantees: plans run one after another in the processes of the ranks. If the runtime refuses a plan, all ranks get this
as a result, not as an exception. The step time of a trial is the lower median, over its steps, of the slowest rank's
time. The first steps are excluded, since they open files, fill caches and set up new shapes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.core.errors import InputError, PlanRefused
from meshwright.core.ipc import IpcMessage
from meshwright.data.dataset import open_dataset
from meshwright.runtime.backend import backend_of, init_local_device
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.profiler.device import machine_busy_seconds, measure_cluster, tensor_factory
from meshwright.spec.grid import micro_batch_rows
from meshwright.spec.job import LaunchSpec
from meshwright.spec.plan import Plan
from meshwright.train.model import build_loader, build_model, model_objective, vocabulary_size
from meshwright.train.optimizer import optimizer_factory
from meshwright.train.rank_main import RankControl, join_process_groups
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.trainer import Trainer, parallelize

MATMUL_REPEATS = 15


def probe(channel: RankControl, payload: IpcMessage) -> int:
    """Measures the cluster and returns the exit status."""
    with join_process_groups(channel.rank, channel.world, timeout=120.0):
        found = measure_cluster()
        if channel.rank == 0:
            channel.say("measured", measurement=found.model_dump(mode="json"))
    return 0


def speed(channel: RankControl, payload: IpcMessage) -> int:
    """Reports the median wall-clock seconds of a matrix product on the device with index `slot`. It joins no process
    group. Returns the exit status."""
    torch.set_num_threads(1)
    device = init_local_device()
    size = backend_of(device).profiling.health_matmul
    left = tensor_factory(device.type)(size, size, device=device)
    seconds = []
    for _ in range(MATMUL_REPEATS):
        began = time.perf_counter()
        float(torch.mm(left, left)[0, 0])  # reading the result waits until the product has ended
        seconds.append(time.perf_counter() - began)
    channel.say("speed", slot=payload["slot"], seconds=median(seconds))
    return 0


WARMUP_STEPS, MEASURED_STEPS = 2, 4
"""The number of first steps that are not timed, and the number of timed steps."""


class TrialResult(NamedTuple):
    """The time of a step in seconds, or None if the plan was refused; `why` is the reason. `busy`: the number of this
    machine's CPUs that other programs used during the trial."""

    seconds: float | None
    why: str = ""
    busy: float = 0.0


class TrialRunner:
    """Runs trials of plans with one model and its data. All ranks construct a runner and make the same calls."""

    def __init__(self, launch: LaunchSpec, steps: int = MEASURED_STEPS) -> None:
        self.launch, self.steps = launch, steps
        model = self._model()
        objective, work = model_objective(launch.model, model), launch.workload
        dataset = open_dataset(
            launch.data, work.sequence, vocabulary_size(launch.model, model), objective, lambda _: None
        )
        self.loader = build_loader(dataset, objective, model, work)

    def _model(self) -> Any:
        work = self.launch.workload
        return build_model(
            self.launch.model, work.seed, lora=work.lora, capacity=work.expert_capacity, bias_rate=work.expert_bias_rate
        )

    def try_plan(self, plan: Plan) -> TrialResult:
        """Times a plan, or returns why it was refused. All ranks call it."""
        work = self.launch.workload
        try:
            plan.micro_batches(work.batch)
            trainer = parallelize(
                self._model(), optimizer_factory(work.optimizer), plan, precision=work.recipe, clip=work.optimizer.clip
            )
        except InputError as error:
            return TrialResult(None, str(error))
        if trainer.engine.unfilled:
            trainer.load_weights(self.launch.model.folder)
        try:
            found = self._steps(trainer)
        except PlanRefused as error:
            found = TrialResult(None, str(error))
        # Any other error ends all trials. It may occur during a collective, so the process groups are not destroyed
        # while their threads run.
        trainer.close()
        groups = [
            one for group in trainer.mesh.groups.values() for one in group.process_groups if one is not dist.group.WORLD
        ]
        # All ranks must destroy the groups in the same order.
        groups += [channel for _, channel in sorted(trainer.mesh.p2p_groups.items(), key=lambda item: item[0])]
        del trainer
        gc.collect()
        for group in groups:
            dist.destroy_process_group(group)
        return found

    def _steps(self, trainer: Trainer) -> TrialResult:
        ranges = micro_batch_rows(trainer.plan, self.launch.workload.batch, trainer.mesh.replica)
        seconds = []
        began, ours, all_before = time.perf_counter(), time.process_time(), machine_busy_seconds()
        for step in range(WARMUP_STEPS + self.steps):
            batches = [self.loader.rows(step, first, size) for first, size in ranges]
            _max_over_ranks(trainer, 0.0)
            share = LocalBatch(batches, self.loader.labels_per_step)
            seconds.append(
                _max_over_ranks(
                    trainer,
                    measure_seconds(
                        partial(trainer.step, share),
                        partial(backend_of(trainer.mesh.device).synchronize, trainer.mesh.device),
                    ),
                )
            )
        ranks = _sum_over_ranks(trainer, time.process_time() - ours)
        others = (machine_busy_seconds() - all_before - ranks) / (time.perf_counter() - began) if all_before else 0.0
        return TrialResult(sorted(seconds[WARMUP_STEPS:])[(self.steps - 1) // 2], "", max(others, 0.0))


def measure_seconds(work: Callable[[], object], through: Callable[[], None]) -> float:
    """Returns the seconds of `work`, including its asynchronous part (the update and the all-gather of weights).
    `through` waits for this part."""
    began = time.perf_counter()
    work()
    through()
    return time.perf_counter() - began


def _max_over_ranks(trainer: Trainer, seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=trainer.mesh.device)
    all_reduce(value, trainer.mesh.world, use_max=True).wait()
    return float(value)


def _sum_over_ranks(trainer: Trainer, mine: float) -> float:
    value = torch.tensor([mine], dtype=torch.float64, device=trainer.mesh.device)
    all_reduce(value, trainer.mesh.world).wait()
    return float(value)
