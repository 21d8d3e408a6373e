"""The accelerator backends, one class for each type of device.

All code in `runtime/` and `train/` that depends on the type of a device uses its `Backend`. Only this file compares
device types, calls `torch.cuda` or pins memory (tests/mesh/test_backend.py). To support another accelerator, define one
subclass of `Backend` with its `device_type`. The subclass registers itself. The defaults of `Backend` describe a device
with separate memory and without streams, for example `meta`.

`init_local_device` selects the device of this rank.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import override

from meshwright.core.cpp_compiler import has_cpp_compiler
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Environment variable and value. With a workspace of fixed size, cuBLAS adds in the same order each time. cuBLAS reads
the variable when it starts. Without the variable, torch refuses deterministic matrix products."""

ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
ALLOCATOR_SETTING = "expandable_segments:True"
"""The setting of torch's allocator of device memory, unless the environment has one. Buffers that come and go (ZeRO 3)
then leave no gaps. The allocator reads the variable at the first allocation."""


class DeviceEvent(Protocol):
    """An event of a device stream, with the methods of `torch.cuda.Event`."""

    def record(self, stream: Any = None) -> None:
        """Marks the point that `stream` has reached. None means the current stream."""

    def query(self) -> bool:
        """Returns whether the device has passed the recorded point."""

    def synchronize(self) -> None:
        """Blocks the host until the device has passed the recorded point."""

    def wait(self, stream: Any = None) -> None:
        """Makes later work of `stream` wait for the recorded point. None means the current stream."""

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds between the points of this event and of `end_event`."""


class DeviceStream(Protocol):
    """A stream of a device, with the methods of `torch.cuda.Stream`."""

    def wait_stream(self, stream: Any) -> None:
        """Makes later work of this stream wait for all work that `stream` has queued so far."""

    def record_event(self) -> DeviceEvent:
        """Returns an event at the point that this stream has reached."""


@dataclass(frozen=True)
class DeviceProperties:
    """The product name of a device, its bytes of memory (0 if it uses host memory), and the compute capability and the
    unique ID of a CUDA device. `clock` in Hz and `power` in W are those of this moment, 0 if they are unknown."""

    name: str
    memory: float = 0.0
    capability: tuple[int, int] | None = None
    uuid: str = ""
    clock: float = 0.0
    power: float = 0.0


@dataclass(frozen=True)
class ProfilingSizes:
    """Sizes of the operations that the profiler times on one type of device."""

    matmuls: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Sizes n of the square n x n matrices."""
    matmul_dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    layer: tuple[int, int, int] = (8192, 4096, 8192)
    """Number of tokens, input features and output features of a linear layer."""
    attention: tuple[int, int, int] = (32, 4096, 128)
    """Number of heads, sequence length, and width of a head."""
    stream_bytes: int = 2**30
    """Bytes of one tensor of elementwise operations."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of the linear layer and of attention."""
    warm_seconds: float = 3.0
    """Seconds of products after which an accelerator has the clock of training, which heat and the power limit lower. 0
    on a CPU."""
    collectives: tuple[int, ...] = (2**12, 2**16, 2**20, 2**24, 2**28, 2**30)
    """Sizes at which a collective is timed, as bytes of the full tensor."""
    max_message: int = 2**30
    """Bytes of the largest message between two ranks."""
    health_matmul: int = 4096
    """Size n of the n x n matrix product that tests whether an excluded device is healthy."""


class MappedMemory:
    """Pins memory that this process has mapped, so that a device copies to it at full speed. The default pins none."""

    def pin(self, memory: torch.Tensor, device: torch.device) -> bool:
        """Pins the byte vector `memory` for copies from `device`. Returns whether the system has pinned it."""
        return False

    def unpin(self, memory: torch.Tensor) -> None:
        """Ends `pin`. Must be called before the memory is unmapped."""


class Backend(MappedMemory):
    """The properties of one type of device that the runtime needs, and the calls that differ between types."""

    by_type: ClassVar[dict[str, Backend]] = {}
    """The backend of each device type. Subclasses add themselves."""

    device_type: ClassVar[str] = ""
    """The value of `torch.device.type` for these devices."""
    memory_is_host: ClassVar[bool] = False
    """Whether device memory is host memory. If so, weights are offloaded only to disk, and ranks of a host exchange
    tensors through shared memory where the system supports it."""
    has_streams: ClassVar[bool] = False
    """Whether copies run asynchronously in streams. If so, the host memory of copies is pinned."""
    collective_library: ClassVar[str] = "gloo"
    """The backend of torch.distributed for tensors on the device."""
    has_fused_optimizer: ClassVar[bool] = False
    """Whether torch has fused optimizer kernels for the device."""
    nominal_flops: ClassVar[float] = 2e14
    """Assumed FLOP/s of a device. If a plan has no predicted step time, train/proof/ uses this value to estimate the
    time of a proof run, which compares the loss and the gradients under the plan with those of one device."""
    nominal_fp32_flops: ClassVar[float] = 2.5e13  # matrix products in float32 without TF32
    nominal_flops_per_byte: ClassVar[float] = 100.0
    """Assumed FLOP/s of matrix products divided by the memory bandwidth in bytes/s. Accelerators: 400 TFLOP/s and
    4 TB/s. CPUs: 80 GFLOP/s and 27 GB/s."""
    profiling: ClassVar[ProfilingSizes] = ProfilingSizes()

    def __init_subclass__(cls) -> None:
        cls.by_type[cls.device_type] = cls()

    def local_device(self, index: int | None) -> torch.device | None:
        """Returns the device of the rank with number `index` on its host (`device_index`), or the current device if
        `index` is None. Returns None if this process has no such devices. Raises InputError as `device_index` does."""
        return None

    def select(self, device: torch.device) -> None:
        """Makes `device` the current device of the calling thread. Every thread that uses the device, its streams, its
        events or pinned memory must call it first. The current device of a new thread is device 0: without this call,
        the threads of all ranks of a host would start a driver context on device 0."""

    def is_initialized(self) -> bool:
        """Returns whether this process has started the driver. Once it has, a forked child cannot use the devices."""
        return False

    def synchronize(self, device: torch.device) -> None:
        """Waits until `device` has finished all launched work."""

    def make_deterministic(self) -> None:
        """Makes kernels return bitwise equal results for equal inputs."""
        torch.use_deterministic_algorithms(True)

    def stream(self, device: torch.device) -> DeviceStream | None:
        """Returns a new stream, or None for a device without streams."""
        return None

    def current_stream(self, device: torch.device | None = None) -> DeviceStream | None:
        """Returns the stream in which kernels are launched, or None for a device without streams."""
        return None

    def use_stream(self, stream: DeviceStream | None) -> AbstractContextManager[Any]:
        """Launches the kernels of the context in `stream`."""
        return nullcontext()

    def event(self, timing: bool = False, blocking: bool = False) -> DeviceEvent:
        """Returns a new event. `timing`: whether the event records a time. `blocking`: whether the host thread sleeps
        during a wait for an event that records no time. Raises NotImplementedError if the device has no streams."""
        raise NotImplementedError(f"devices of type {self.device_type} have no events")

    def host_buffer(self, shape: int | Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns uninitialised host memory for copies to and from the device. The memory is pinned if the device has
        streams."""
        shape = (shape,) if isinstance(shape, int) else shape
        return torch.empty(shape, dtype=dtype, pin_memory=self.has_streams)

    def rng_state(self, device: torch.device | None = None) -> torch.Tensor | None:
        """Returns the random state of `device`, by default the current device. Returns None if the device has no
        generator."""
        return None

    def set_rng_state(self, state: torch.Tensor, device: torch.device | None = None) -> None:
        """Sets the random state of `device` to `state`, a result of `rng_state`."""

    def fork_rng(self, device: torch.device) -> AbstractContextManager[None]:
        """Restores the random states of the host and of `device` on exit."""
        return torch.random.fork_rng(devices=[])

    def allocated_bytes(self, device: torch.device) -> float | None:
        """Returns the number of bytes that tensors occupy, or None if the device has no allocator that counts them."""
        return None

    def peak_memory(self, device: torch.device) -> dict[str, float]:
        """Returns the peak bytes since the last call: `total` (allocated by tensors) and `reserved` (by the allocator).
        Empty if the device has no counters."""
        return {}

    def properties(self, device: torch.device) -> DeviceProperties:
        """Returns the properties of `device`."""
        return DeviceProperties(device.type)

    def supports_flash_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> bool:
        """Returns whether torch's flash-attention kernel of this device accepts the tensors and is enabled."""
        return False

    def compile_obstacle(self) -> str:
        """Returns what `torch.compile` lacks on this machine, and the remedy, as text to append to an error message.
        Returns '' if nothing is missing."""
        return ""

    @property
    def process_group_backend(self) -> str:
        """The `backend` argument of `init_process_group` for host tensors and device tensors."""
        if self.collective_library == "gloo":
            return "gloo"
        return f"cpu:gloo,{self.device_type}:{self.collective_library}"


class CpuBackend(Backend):
    """CPU ranks. Device memory is host memory, and the calling thread computes."""

    device_type = "cpu"
    memory_is_host = True
    has_fused_optimizer = True
    nominal_flops = nominal_fp32_flops = 3e10
    nominal_flops_per_byte = 3.0
    profiling = ProfilingSizes(
        matmuls=(64, 128, 256, 512),
        matmul_dtypes=("fp32", "fp64", "bf16", "fp16"),
        layer=(512, 256, 1024),
        attention=(4, 256, 64),
        stream_bytes=2**23,
        dtype=torch.float32,
        warm_seconds=0.0,
        collectives=(2**12, 2**16, 2**19, 2**21),
        max_message=2**25,
        health_matmul=512,
    )

    @override
    def make_deterministic(self) -> None:
        """Limits torch to one thread, because the division of a sum among threads changes its rounding."""
        torch.set_num_threads(1)

    @override
    def compile_obstacle(self) -> str:
        """Inductor needs a C++ compiler for the CPU. Returns the remedy if there is none, '' if there is one."""
        if has_cpp_compiler():
            return ""
        return "a C++ compiler (g++ or clang++; CXX names another): install one, or leave compile out"


def platform_names(backend: Backend) -> tuple[str, str, str]:
    """Returns what messages call the platform of `backend` and its collective library, and the environment variable
    that selects devices. A torch that is built for ROCm calls its devices cuda."""
    if backend.device_type != "cuda":
        return backend.device_type, backend.collective_library, ""
    return ("ROCm", "RCCL", "HIP_VISIBLE_DEVICES") if torch.version.hip else ("CUDA", "NCCL", "CUDA_VISIBLE_DEVICES")


def device_index(rank: int, count: int, variable: str) -> int:
    """Returns the index of the device for the rank with number `rank` on its host. `count`: the number of devices that
    the environment `variable` makes visible. A launcher may show each rank only its own device, which is then device 0.

    Raises: InputError if there are several devices, but fewer than ranks, so that two ranks would share one.

    >>> device_index(3, 8, "CUDA_VISIBLE_DEVICES"), device_index(3, 1, "CUDA_VISIBLE_DEVICES")
    (3, 0)
    >>> device_index(2, 2, "CUDA_VISIBLE_DEVICES")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    meshwright.core.errors.InputError: rank 2 of this machine (LOCAL_RANK) has no GPU of its own: torch sees 2 devices;
    start as many ranks as devices, or make more visible (CUDA_VISIBLE_DEVICES)
    """
    if rank >= count > 1:
        raise InputError(
            Message(
                "rank {rank} of this machine (LOCAL_RANK) has no GPU of its own: torch sees {count} devices; start as "
                "many ranks as devices, or make more visible ({variable})",
                rank=rank,
                count=count,
                variable=variable,
            )
        )
    return min(rank, count - 1)


class CudaBackend(Backend):
    """NVIDIA devices through `torch.cuda` and NCCL. A torch that is built for ROCm shows AMD devices and RCCL under the
    same names."""

    device_type = "cuda"
    has_streams = True
    collective_library = "nccl"
    has_fused_optimizer = True

    @override
    def local_device(self, index: int | None) -> torch.device | None:
        if not torch.cuda.is_available():
            return None
        if index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", device_index(index, torch.cuda.device_count(), platform_names(self)[2]))

    @override
    def select(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @override
    def is_initialized(self) -> bool:
        return torch.cuda.is_initialized()

    @override
    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    @override
    def stream(self, device: torch.device) -> DeviceStream | None:
        return torch.cuda.Stream(device)

    @override
    def current_stream(self, device: torch.device | None = None) -> DeviceStream | None:
        return torch.cuda.current_stream(device)

    @override
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    @override
    def event(self, timing: bool = False, blocking: bool = False) -> DeviceEvent:
        return torch.cuda.Event(enable_timing=True) if timing else torch.cuda.Event(blocking=blocking)

    @override
    def pin(self, memory: torch.Tensor, device: torch.device) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
            return True
        with suppress(RuntimeError):  # the next launch reports the error of the call, although it is no error
            torch.zeros(1, device=device)
        return False

    @override
    def unpin(self, memory: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    @override
    def rng_state(self, device: torch.device | None = None) -> torch.Tensor | None:
        return torch.cuda.get_rng_state("cuda" if device is None else device)

    @override
    def set_rng_state(self, state: torch.Tensor, device: torch.device | None = None) -> None:
        torch.cuda.set_rng_state(state, "cuda" if device is None else device)

    @override
    def fork_rng(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[device])

    @override
    def allocated_bytes(self, device: torch.device) -> float | None:
        return torch.cuda.memory_allocated(device)

    @override
    def peak_memory(self, device: torch.device) -> dict[str, float]:
        peak = {
            "total": float(torch.cuda.max_memory_allocated(device)),
            "reserved": float(torch.cuda.max_memory_reserved(device)),
        }
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    @override
    def properties(self, device: torch.device) -> DeviceProperties:
        found = torch.cuda.get_device_properties(device)
        clock = power = 0.0
        with suppress(ImportError, RuntimeError):  # the package nvidia-ml-py or amdsmi is not installed
            clock, power = 1e6 * torch.cuda.clock_rate(device), 1e-3 * torch.cuda.power_draw(device)
        capability, uuid = (found.major, found.minor), str(getattr(found, "uuid", ""))
        return DeviceProperties(found.name, float(found.total_memory), capability, uuid, clock, power)

    @override
    def supports_flash_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> bool:
        if torch.version.hip:
            return False
        grouped = key.shape[1] != query.shape[1]
        return torch.backends.cuda.can_use_flash_attention(
            torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, grouped)
        )

    @override
    def compile_obstacle(self) -> str:
        """Inductor needs Triton. Returns the remedy if Triton is not installed, '' if it is."""
        if importlib.util.find_spec("triton") is not None:
            return ""
        return f"the package triton, which comes with torch for {platform_names(self)[0]}: leave compile out"


DEVICE_VARIABLE = "MESHWRIGHT_DEVICE"
"""Environment variable: `cpu` trains on CPU cores, whatever accelerators the machine has."""

OTHER_DEVICES = Backend()


def backend_of(device: torch.device | str) -> Backend:
    """Returns the backend of a device or of a device type.

    >>> (backend_of("cpu").memory_is_host, backend_of(torch.device("cuda", 1)).has_streams,
    ...     backend_of("meta").has_streams)
    (True, True, False)
    """
    return Backend.by_type.get(device if isinstance(device, str) else device.type, OTHER_DEVICES)


def pin_function(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns a function that copies a host tensor to pinned memory, for asynchronous copies to `device`. Any thread
    may call it. Returns None if the device has no streams."""
    backend = backend_of(device)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        backend.select(device)
        return backend.host_buffer(tensor.shape, tensor.dtype).copy_(tensor)

    return pin if backend.has_streams else None


def accelerators() -> Iterator[Backend]:
    """Yields every backend whose devices have their own memory, separate from host memory."""
    return (backend for backend in Backend.by_type.values() if not backend.memory_is_host)


def initialized_accelerators() -> list[Backend]:
    """Returns the backends whose driver this process has started."""
    return [backend for backend in accelerators() if backend.is_initialized()]


def local_device() -> torch.device:
    """Returns the accelerator with the index in the environment variable `LOCAL_RANK`. Without the variable, returns
    the current accelerator. Returns the CPU if the process has no accelerator, or if DEVICE_VARIABLE selects it."""
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        return torch.device("cpu")
    rank = os.environ.get("LOCAL_RANK")
    index = None if rank is None else int(rank)
    found = (backend.local_device(index) for backend in accelerators())
    return next((device for device in found if device is not None), torch.device("cpu"))


def init_local_device(by_command: bool = False) -> torch.device:
    """Makes `local_device()` the current device of this process and returns it.

    Must be called before the first collective and the first matrix product. Calls that set random states, create
    streams or start NCCL operations without naming a device use the current device. `by_command`: whether a command
    has compared the devices with the cluster before (cli/device_checks.py). Then this process trains on CPU cores if it
    has no device with a `Backend`.

    Raises:
        InputError: the machine has only an accelerator without a `Backend`, and nobody has selected the CPU.
    """
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTING
    device = local_device()
    backend_of(device).select(device)
    if by_command and backend_of(device).memory_is_host:
        os.environ[DEVICE_VARIABLE] = "cpu"
    if os.environ.get(DEVICE_VARIABLE) != "cpu" and backend_of(device).memory_is_host:
        check_other_accelerator(torch.accelerator.current_accelerator(check_available=True))
    return device


def check_other_accelerator(found: torch.device | None) -> None:
    """Raises InputError if the accelerator `found` of this machine has no `Backend`.

    >>> check_other_accelerator(None)
    >>> check_other_accelerator(torch.device("mps"))  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    meshwright.core.errors.InputError: this machine has an accelerator of type mps, on which Meshwright does not train:
    set MESHWRIGHT_DEVICE=cpu to train on CPU cores
    """
    if found is not None:
        raise InputError(
            Message(
                "this machine has an accelerator of type {type}, on which Meshwright does not train: set "
                "{variable}=cpu to train on CPU cores",
                type=found.type,
                variable=DEVICE_VARIABLE,
            )
        )
