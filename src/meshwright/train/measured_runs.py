"""Measures hardware and plans in the processes of ranks. `meshwright probe`, the trials of `plan` and `train`, and the
supervisor of a training run use it.

- `probe` measures the cluster. Rank 0 reports the `ClusterProfile`.
- `speed` times matrix products on a device that a training run has excluded.
- `TrialRunner` times a few steps of each given plan, with the job's own model and data. It saves nothing.

Guarantees: plans run one after another in the processes of the ranks. If the runtime refuses a plan, every rank returns
a result with the reason; no rank raises an exception. The time of a step is that of the slowest rank. The result of a
trial is the lower median of the times of its steps. The first steps do not count, since they open files, fill caches
and allocate buffers.
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
from meshwright.runtime.backend import backend_of, init_local_device
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.preference_loss import REFERENCE_ENTRIES
from meshwright.runtime.profiler.device import machine_busy_seconds, measure_cluster, tensor_factory
from meshwright.spec.grid import micro_batch_rows
from meshwright.spec.job import LaunchSpec
from meshwright.spec.plan import Plan
from meshwright.train.model import build_loader, build_model, model_objective, open_training_data, preference_loss
from meshwright.train.optimizer import optimizer_factory
from meshwright.train.rank_main import RankControl, join_process_groups
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.trainer import Trainer, parallelize

MATMUL_REPEATS = 15


def probe(channel: RankControl, payload: IpcMessage) -> int:
    """Runs on every rank of `meshwright probe`. `payload` is not used. Returns the exit status of the rank."""
    with join_process_groups(channel.rank, channel.world, timeout=120.0):
        found = measure_cluster()
        if channel.rank == 0:
            channel.say("measured", measurement=found.model_dump(mode="json"))
    return 0


def speed(channel: RankControl, payload: IpcMessage) -> int:
    """Reports the median wall-clock seconds of a matrix product on this process's device. It joins no process group.
    The report repeats `payload["slot"]`, the supervisor's index of the device. Returns the exit status."""
    torch.set_num_threads(1)
    device = init_local_device(by_command=True)
    size = backend_of(device).profiling.health_matmul
    left = tensor_factory(device.type)(size, size, device=device)
    seconds = []
    for _ in range(MATMUL_REPEATS):
        began = time.perf_counter()
        float(torch.mm(left, left)[0, 0])  # the conversion to a number waits until the product has ended
        seconds.append(time.perf_counter() - began)
    channel.say("speed", slot=payload["slot"], seconds=median(seconds))
    return 0


WARMUP_STEPS, MEASURED_STEPS = 2, 4
"""The number of untimed steps at the beginning of a trial, and the number of timed steps after them."""


class TrialResult(NamedTuple):
    """`seconds`: the time of a step, or None if the runtime refused the plan; `why` is then the reason. `busy`: the
    mean number of this machine's CPUs that other programs used during the trial."""

    seconds: float | None
    why: str = ""
    busy: float = 0.0


class TrialRunner:
    """Runs trials of plans with the model and the data of one job. All ranks construct a runner and make equal calls.
    `steps`: the number of timed steps of a trial."""

    def __init__(self, launch: LaunchSpec, steps: int = MEASURED_STEPS) -> None:
        self.launch, self.steps = launch, steps
        model = self._model()
        objective, work = model_objective(launch.model, model), launch.workload
        dataset = open_training_data(launch, model, objective, lambda _: None, lambda _: None)
        self.loader = build_loader(dataset, objective, model, work)
        if work.preference is not None:  # a trial measures the time of a step, which does not depend on these values
            values = torch.zeros(dataset.rows), torch.zeros(dataset.validation_rows)
            self.loader.row_values = dict.fromkeys(REFERENCE_ENTRIES, values)

    def _model(self) -> Any:
        work = self.launch.workload
        return build_model(
            self.launch.model, work.seed, lora=work.lora, capacity=work.expert_capacity, bias_rate=work.expert_bias_rate
        )

    def try_plan(self, plan: Plan) -> TrialResult:
        """Builds the job under `plan` and times its steps. All ranks call it. If the runtime refuses the plan, returns
        a result with the reason."""
        work = self.launch.workload
        try:
            plan.micro_batches(work.batch)
            trainer = parallelize(
                self._model(),
                optimizer_factory(work.optimizer),
                plan,
                precision=work.recipe,
                clip=work.optimizer.clip,
                loss=preference_loss(work),
            )
        except InputError as error:
            return TrialResult(None, str(error))
        if trainer.engine.unfilled:
            trainer.load_weights(self.launch.model.folder)
        try:
            found = self._steps(trainer)
        except PlanRefused as error:
            found = TrialResult(None, str(error))
        # Other exceptions end all trials without this cleanup. They may occur during a collective, and a group must not
        # be destroyed while its collective runs.
        trainer.close()
        groups = [
            one for group in trainer.mesh.groups.values() for one in group.process_groups if one is not dist.group.WORLD
        ]
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
    """Returns the seconds of `work()`. `through` waits for what `work` has started asynchronously (the update and the
    all-gather of weights); this time is included."""
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
