"""The parts of `make soak` by name. Each file with a soak test is in exactly one part (unit/test_soak_parts.py).

`python tests/soak_parts.py` lists the parts, one a line; `python tests/soak_parts.py faults` prints the files of one.
The numbered parts (MESHWRIGHT_SOAK=2/8) divide whatever runs, also one of these.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
HAS_SOAK_TEST = re.compile(r"mark\.soak|mark\.covering")


class SoakPart(NamedTuple):
    """A part of the soak. `minutes`: the estimated duration on two quiet cores. `files`: paths below tests/, without
    `test_` and `.py`."""

    minutes: int
    what: str
    files: dict[str, str]

    @property
    def paths(self) -> list[str]:
        """Returns the files of a part, relative to the repository."""
        return [f"tests/{folder}/test_{name}.py" for folder, names in self.files.items() for name in names.split()]


PARTS = {
    "numerics": SoakPart(
        60,
        "plans, schedules and combinations of choices against one device",
        {
            "ranks": "all_parameters_present buffers communication compile compression consistency context_parallel "
            "custom_optimizers deferred_init float8 interop_script packed_documents "
            "exact_reduction expert_capacity expert_parallel local_sgd optimizers partial_batches pipeline "
            "plain_modules plans precision_recipes preferences qlora rank_order shared_experts shared_weights "
            "stage_check tensor_parallel trainer trainer_state triples uneven_batches uneven_shards vocab_gradients "
            "vocab_parallel zero3_shared_weights",
        },
    ),
    "cuda": SoakPart(
        20,
        "paths of CUDA and NCCL that need no device: order and races of collectives",
        {"mesh": "collective_order collective_races p2p_liveness step_budgets stream_races"},
    ),
    "families": SoakPart(
        45,
        "models of transformers under many plans",
        {
            "ranks": "adapters encoder_decoder families families_all families_published huggingface input_kinds "
            "lightning"
        },
    ),
    "odd-models": SoakPart(
        60,
        "models with unusual code, 2,000 generated ones among them",
        {
            "ranks": "aux_loss batch_keys between_blocks buffer_updates chunked_loss code_paths crash_list "
            "data_dependent_models embedding_and_head loss_reads_parameters module_list_experts no_needless_refusals "
            "odd_cases odd_experts odd_jobs parameter_access "
            "parameters_without_gradient pass_writes row_coupling sequence_mixing single_rank_error soundness_list "
            "batch_loss late_changes step_guards step_invariants unused_weights unusual_models writes_between_steps",
        },
    ),
    "proofs": SoakPart(
        17,
        "proofs before and during training, recordings of other engines",
        {
            "ranks": "coming_from proof proof_faults proof_limit proof_models proof_repeated proof_rows recording "
            "recording_engines split_proofs train_prove train_verify"
        },
    ),
    "memory": SoakPart(
        30,
        "offload, recompute, and estimates of memory against measurements",
        {
            "ranks": "accelerator activation_offload_disk cost_model_states cost_offload_fraction hot_path offload "
            "offload_device_memory "
            "offload_limit peak_memory recompute_and_offload",
            "mesh": "analysis_limit compiled_activations cost_peak model_graph model_graph_experts model_profile "
            "model_profile_command model_profile_peak",
        },
    ),
    "faults": SoakPart(
        90,
        "ranks, supervisors and writers that fail, twenty times each",
        {
            "ranks": "faults faults_resize faults_rows faults_soak faults_soak_rows faults_soak_silent faults_spikes "
            "faults_together fork_server interrupted sdc_recompute slow_devices supervisor_killed supervisor_survives "
            "train_run train_supervisor",
        },
    ),
    "nodes": SoakPart(
        60,
        "nodes, links and leaders that fail",
        {
            "ranks": "cluster_profile emulated_cluster faults_soak_links faults_soak_slow leader_restarts nodes "
            "nodes_links nodes_several slow_nodes untrusted_connections",
            "unit": "straggler",
        },
    ),
    "storage": SoakPart(
        10,
        "checkpoints that are damaged, saves that end at any call, and disks that fail",
        {
            "mesh": "checkpoint checkpoint_crash checkpoint_damage checkpoint_engines storage_faults",
            "ranks": "checkpoint_systems storage_runs",
            "unit": "data_order data_stream files",
        },
    ),
    "scale": SoakPart(
        30,
        "1,024 nodes for 30 days in virtual time, and every interleaving of the protocol's model",
        {"unit": "protocol scale"},
    ),
    "planner": SoakPart(
        35,
        "searches of large jobs and against every plan, their pages, and files for schedulers",
        {
            "unit": "advice api cli compile_time_cost cost_in_flight fit golden interop launch_quoting launch_targets "
            "memory_budget offload_fraction offload_largest page page_model precision replanning search "
            "search_heterogeneous search_uneven_shards simulate trials why_not"
        },
    ),
    "fuzz": SoakPart(10, "10,000 job files at random", {"unit": "fuzz"}),
    "setup": SoakPart(
        20,
        "installation in an empty environment, and every command of the documentation",
        {"unit": "docs setup"},
    ),
}


def part_of(path: str) -> str | None:
    """Returns the part of a test file, given relative to the repository."""
    return next((name for name, part in PARTS.items() if path in part.paths), None)


def soak_files() -> list[str]:
    """Returns the files with a soak test, or with a list of cases that only the soak runs in full."""
    found = []
    for path in sorted(TESTS.glob("*/test_*.py")):
        if HAS_SOAK_TEST.search(path.read_text(encoding="utf-8")):
            found.append(path.relative_to(TESTS.parent).as_posix())
    return found


def listing() -> str:
    """Returns one line for each part."""
    return "\n".join(f"{name:<12}about {part.minutes:>3} min   {part.what}" for name, part in PARTS.items())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(listing())
    elif sys.argv[1] in PARTS:
        print(*PARTS[sys.argv[1]].paths)
    else:
        sys.exit(f"PART {sys.argv[1]!r} is not one of {', '.join(PARTS)}")
