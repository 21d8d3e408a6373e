"""Saves and restores the state of a trainer: weights, optimizer states, loss scale, step and random states. The methods
`save` and `load` of the trainer and the in-memory checkpoints (memory_checkpointer.py) use it.

Guarantees: a run that resumes under an unchanged plan is bit-identical to a run that never stopped. A run that resumes
under another plan differs from it only in the order of floating-point sums and in the random states, which restart from
the seed. (These matter only with dropout.)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.formats.detect import open_checkpoint
from meshwright.checkpoint.load import load_checkpoint
from meshwright.checkpoint.manifest import CheckpointManifest
from meshwright.checkpoint.memory_checkpoint import MemoryCheckpoint
from meshwright.checkpoint.retention import newest_checkpoint, prune_checkpoints
from meshwright.checkpoint.save import LocalShard, RankExchange, save_checkpoint
from meshwright.core.codec import validate_data
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime import state_dict
from meshwright.runtime.backend import backend_of
from meshwright.runtime.error_propagation import interruptible_wait
from meshwright.runtime.non_tensor_state import load_extra_states, serializable_extra_states
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.shard.optimizer_shard import ReadScalar
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.record import RunState
from meshwright.train.imported_checkpoint import ImportedNames
from meshwright.train.step.state import TrainState

MAX_SHARED_NAMES_BYTES = 1 << 13
"""In-memory checkpoints contain the additional names of shared parameters only up to this number of bytes, because the
room for their state is limited."""


def rank_exchange(mesh: ParallelContext) -> RankExchange:
    """Returns an object with which all ranks exchange texts about checkpoints. Texts are sent as bytes in tensors;
    nothing is pickled."""

    def share(text: str) -> list[str]:
        """Returns the texts of all ranks, by rank."""
        if mesh.world is None:
            return [text]
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=mesh.device)
        world = dist.get_world_size()
        lengths = torch.zeros(world, dtype=torch.int64, device=mesh.device)
        lengths[mesh.rank] = mine.numel()
        with interruptible_wait():
            dist.all_reduce(lengths)
        texts = torch.zeros(world, max(int(lengths.max()), 1), dtype=torch.uint8, device=mesh.device)
        texts[mesh.rank, : mine.numel()] = mine
        with interruptible_wait():
            dist.all_reduce(texts)
        return [
            bytes(row[:length].tolist()).decode() for row, length in zip(texts.cpu(), lengths.tolist(), strict=True)
        ]

    return RankExchange(mesh.rank, mesh.plan.world, share)


def save_trainer(state: TrainState, folder: Path, extra: dict[str, Any], keep: int = 0) -> Path:
    """Writes the checkpoint `folder`/step-N (N: the step) durably, reads it back and returns its path. `extra`: JSON
    values to store in it. If `keep` is not 0, rank 0 then removes all but the `keep` newest checkpoints. All ranks call
    it. Raises SaveFailed, or InputError if `keep` is negative."""
    if keep < 0:
        raise InputError(Message("keep = {keep}: at least one checkpoint must stay", keep=keep))
    state.engine.zero.external_writes.sync(state.engine)
    ranks, mine = rank_exchange(state.mesh), scalar_state(state, extra)
    everyones = list(
        map(json.loads, ranks.all_gather(json.dumps({name: mine[name] for name in ("optimizer", "modules")})))
    )
    whole = mine | merge_scalar_states(everyones) | {"shared": state.engine.extra_state.shared_names}
    path = save_checkpoint(
        folder,
        state.steps,
        checkpoint_shards(state),
        whole,
        plan=state.plan,
        ranks=ranks,
        local=rank_local_tensors(state),
    )
    if keep and state.mesh.rank == 0:  # the other ranks cannot begin the next save before rank 0 takes part in it
        prune_checkpoints(folder, keep, verified=path)
    return path


def checkpoint_shards(state: TrainState) -> list[tuple[ShardMetadata, torch.Tensor]]:
    """Returns the shards that this rank writes to a checkpoint. Each element of a tensor is in a shard of exactly one
    rank."""
    engine, optimizer = state.engine, state.optimizer
    stored = (
        *state_dict.weight_pieces(engine, saving=True),
        *state_dict.optimizer_pieces(engine, optimizer, saving=True),
        *state_dict.buffer_pieces(engine, saving=True),
        *state_dict.outer_pieces(engine, saving=True),
    )
    return [(piece, data) for piece, data in stored]


def scalar_state(state: TrainState, extra: dict[str, Any], read: ReadScalar = float) -> dict[str, Any]:
    """Returns the part of this rank's state that is not in tensors, as JSON values. `read` returns the values of the
    optimizer's scalar states."""
    scalars = state_dict.optimizer_scalars(state.engine, state.optimizer, read)
    shared = state.engine.extra_state.shared_names
    return {
        "run": state.run_state.model_dump(),
        "optimizer": scalars,
        "unreached": _encode_stateless(state),
        "extra": extra,
        "shared": shared if len(json.dumps(shared)) <= MAX_SHARED_NAMES_BYTES else {},
        "modules": serializable_extra_states(state.engine.model, state.engine.extra_state.module_keys),
    }


def merge_scalar_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the results of `scalar_state` of all ranks, in order of rank. The result is the state of rank 0 with the
    optimizer and module entries of all ranks."""
    modules = {name: value for each in reversed(states) for name, value in each.get("modules", {}).items()}
    return states[0] | {
        "optimizer": state_dict.merge_optimizer_scalars([each["optimizer"] for each in states]),
        "modules": modules,
    }


def _encode_stateless(state: TrainState) -> str:
    """Returns a hexadecimal number with one bit per trained parameter. The bit is 1 if the parameter has no optimizer
    state, because it has not had a gradient in any update."""
    zero = state.engine.zero
    left = state.engine.updater.stateless
    return f"{int(''.join('01'[name in left] for name in zero.param_names), 2):x}" if left else "0"


def _decode_stateless(names: Sequence[str], saved: dict[str, Any]) -> frozenset[str]:
    """Returns the names of the parameters for which a checkpoint has no optimizer states. `names`: the trained
    parameters in the order of the bits. `saved`: the merged scalar state. If the checkpoint has only weights, returns
    all names."""
    bits = bin(int(saved["unreached"], 16))[2:].zfill(len(names)) if "unreached" in saved else ""
    if len(bits) == len(names):
        return frozenset(name for name, bit in zip(names, bits, strict=True) if bit == "1")
    has_states = saved["optimizer"]["kinds"] or saved["optimizer"].get("whole")
    return frozenset() if has_states else frozenset(names)


def rank_local_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Returns, by name, the tensors that only this rank has: random states and residuals of gradient compression."""
    local = {
        "random": torch.get_rng_state(),
        **{name: saved.clone() for name, saved in compression_residuals(state).items()},
    }
    device = state.mesh.device
    if (random := backend_of(device).rng_state(device)) is not None:
        local[f"random-{device.type}"] = random
    return local


def compression_residuals(state: TrainState) -> dict[str, torch.Tensor]:
    """Returns this rank's residuals of gradient compression: the error that was not sent yet
    (runtime/comm/compression.py)."""
    units = state.engine.zero.trainable
    reducers = {
        f"{at}-{kind}": reducer
        for at, unit in enumerate(units)
        for kind, reducer in zip(("shards", "copies"), unit.compressors, strict=True)
    }
    return {f"kept-{name}": reducer.residual for name, reducer in reducers.items() if reducer is not None}


def _wanted_pieces(
    state: TrainState, manifest: CheckpointManifest, names: ImportedNames | None, separate: bool
) -> list[LocalShard]:
    """Returns the pieces of this rank that the checkpoint fills, with their memory. `separate`: whether each DiLoCo
    replica has a state in the checkpoint."""
    engine = state.engine
    wanted = [
        *state_dict.weight_pieces(engine, saving=False),
        *state_dict.optimizer_pieces(engine, state.optimizer, saving=False),
    ]
    buffers = list(state_dict.buffer_pieces(engine, saving=False))
    if names is not None:
        wanted, buffers = list(map(names.rename, wanted)), list(map(names.rename, buffers))
    wanted += [stored for stored in buffers if stored.piece.name in manifest.tensors]
    if separate:
        wanted += state_dict.outer_pieces(engine, saving=False)
    else:
        wanted = list(map(state_dict.strip_replica_prefix, wanted))
    return [(piece, data) for piece, data in wanted]


def resume_trainer(state: TrainState, folder: Path) -> dict[str, Any] | None:
    """Restores `state` from the newest valid checkpoint in `folder` and returns its `extra`, or None if there is no
    checkpoint. Rank 0 chooses the checkpoint for all ranks. All ranks call it."""
    chosen = newest_checkpoint(folder) if state.mesh.rank == 0 else None
    path = rank_exchange(state.mesh).all_gather(str(chosen or ""))[0]
    return load_trainer(state, Path(path)) if path else None


def load_trainer(state: TrainState, path: Path | MemoryCheckpoint) -> dict[str, Any]:
    """Restores `state` from the checkpoint at `path`, or from the in-memory checkpoints of all ranks. Returns the
    `extra` of the checkpoint. All ranks call it."""
    engine, optimizer = state.engine, state.optimizer
    engine.zero.quiesce()
    source = path if isinstance(path, MemoryCheckpoint) else open_checkpoint(path)
    manifest = source.manifest
    saved = merge_scalar_states(source.states) if isinstance(source, MemoryCheckpoint) else manifest.state
    names = ImportedNames(engine, optimizer, source.path, manifest) if "imported" in saved else None
    engine.updater.set_stateless(
        names.stateless(engine.zero.param_names) if names else _decode_stateless(engine.zero.param_names, saved)
    )
    with torch.no_grad():
        # The options of the job apply to an imported checkpoint; its parameters may be in other groups.
        state_dict.prepare_optimizer(engine, optimizer, saved["optimizer"] | ({"groups": []} if names else {}))
        separate = any(name.startswith(state_dict.OUTER_PREFIX) for name in manifest.tensors)
        wanted = _wanted_pieces(state, manifest, names, separate)
        cast = names is not None and not names.kinds  # initial weights may have another dtype
        loaded = load_checkpoint(source, wanted, plan=state.plan, ranks=rank_exchange(state.mesh), cast=cast)
        for unit in engine.zero.units:
            unit.copy_to_params()
            unit.weights.all_gather().wait()
        engine.zero.external_writes.forget()
        if engine.outer is not None and not separate:
            engine.outer.restart()
    load_extra_states(engine.model, engine.extra_state.module_keys, saved.get("modules", {}))
    engine.mark_initialized()
    if isinstance(path, MemoryCheckpoint) and manifest.plan_digest == state.plan.digest:
        engine.preflight.skip()  # the ranks that made this checkpoint have passed preflight under the same plan
    run = validate_data(RunState, saved["run"], str(path))
    state.steps, state.samples = run.step, run.samples
    state.scale.factor, state.scale.good_steps = run.loss_scale, run.good_steps
    for name, residual in compression_residuals(state).items():
        before = (loaded.local or {}).get(name)
        residual.zero_() if before is None or before.numel() != residual.numel() else residual.copy_(
            before.view_as(residual)
        )
    if loaded.local is not None:
        torch.set_rng_state(loaded.local["random"])
        device = state.mesh.device
        if (random := loaded.local.get(f"random-{device.type}")) is not None:
            backend_of(device).set_rng_state(random, device)
    return dict(saved["extra"]) if names is None else {"imported": saved["imported"], **names.facts(optimizer, saved)}
