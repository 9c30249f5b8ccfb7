"""A pretended H100 and H200 for a process of its own: CPU tensors that say they are on a GPU, and a driver that keeps its launches."""

import contextlib
import ctypes
import functools
import inspect
import struct
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter
from triton.runtime import jit

from flashtune.core.code import compiled as compiling
from flashtune.core.code import launching
from flashtune.core.code.binaries import STRUCT_FORMATS, Binary, Condition, Manifest, Parameter, TensorMap
from flashtune.core.pytorch.private import is_functorch_wrapped_tensor
from flashtune.db.library import Library
from flashtune.dispatch.plans import driver

GPUS = {"h100": (0, "NVIDIA H100 80GB HBM3"), "h200": (1, "NVIDIA H200")}
"""Index and name of each GPU."""
MULTIPROCESSORS = 132
FIRST_ADDRESS = 1 << 46
"""Where the driver's own memory begins: beyond any of this process's."""
KINDS = "tile_kinds"
"""The kernel whose result the host reads, so that it is computed here."""


class Launched(NamedTuple):
    """A launch as the driver got it: the kernel, where its code comes from, the grid, and what each parameter was: an address, a number, or
    an address with the sizes, strides in bytes and box of its tensor map."""

    kernel: str
    code: str
    grid: tuple[int, int, int]
    values: dict[str, Any]


class Driver:
    """Stands in for libcuda: keeps launches, and calls `watch` at each while its memory is as the kernel would find it."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.watch: Callable[[Launched], None] = self.launched.append
        self.kinds: Callable[[Launched], None] = lambda launch: None
        self.binaries: dict[bytes, tuple[str, Binary]] = {}
        self._functions: list[tuple[str, Binary]] = []
        self._maps: dict[int, str] = {}
        self._next = FIRST_ADDRESS
        self._sizes: dict[int, int] = {}
        self._held: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        # Contexts, streams, copies and attributes of functions always succeed.
        assert name.startswith("cu"), name
        return lambda *_: 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        """The number of a loaded kernel."""
        self._functions.append(self.binaries[image])
        module._obj.value = len(self._functions)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, entry: bytes) -> int:
        """The same number."""
        function._obj.value = module.value
        return 0

    def cuMemAlloc_v2(self, place: Any, size: Any) -> int:
        """An address that is nobody's."""
        self._sizes[self._next] = size.value
        place._obj.value = self._next
        self._next += -(-size.value // (1 << 32)) << 32
        return 0

    def size_of(self, address: int) -> int | None:
        """Bytes of the driver's memory at an address; None where it is somebody else's."""
        start = address >> 32 << 32
        return self._sizes.get(start)

    def is_hosts(self, address: int) -> bool:
        """True for host memory that the GPU reaches."""
        return any(0 <= address - ctypes.addressof(one) < len(one) for one in self._held)

    def cuMemHostAlloc(self, place: Any, size: Any, flags: int) -> int:
        """Memory of this process, which the host reads."""
        self._held.append(memory := ctypes.create_string_buffer(size.value))
        place._obj.value = ctypes.addressof(memory)
        return 0

    def cuTensorMapEncodeTiled(
        self, place: Any, element: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, *rest: Any
    ) -> int:
        """A tensor map: its address, and the number of all else that it says."""
        steps, *others = rest
        shown = [*map(_joined, (sizes, list(strides)[: rank - 1], box, steps))]
        said = f"{shown[0]} by {shown[1]} box {shown[2]} steps {shown[3]} type {element} {_joined(others)}"
        number = next((at for at, one in self._maps.items() if one == said), len(self._maps))
        self._maps[number] = said
        words = (ctypes.c_uint64 * 16).from_address(place.value)
        words[0], words[1] = address.value, number
        return 0

    def cuLaunchKernelEx(self, config_at: int, function: int, parameters: int, extra: None) -> int:
        """Keep a launch."""
        code, binary = self._functions[function - 1]
        config = driver.LaunchConfig.from_address(config_at)
        # A tensor map is followed by its shape and strides, and all by two pointers to scratch.
        sizes = [1 if one.tensor_map is None else 1 + 2 * one.tensor_map.rank for one in binary.parameters]
        places = (ctypes.c_void_p * (sum(sizes) + 2)).from_address(parameters)
        values = {}
        for index, one in enumerate(binary.parameters):
            values[one.name] = self._value(one, places[sum(sizes[:index])])
        values |= {one.name: one.value for one in binary.conditions if one.rule == "equals"}
        found = Launched(binary.kernel, code, (config.grid_x, config.grid_y, config.grid_z), values)
        if found.kernel == KINDS:
            self.kinds(found)
        self.watch(found)
        return 0

    def _value(self, parameter: Parameter, place: int | None) -> Any:
        assert place is not None, parameter
        if parameter.tensor_map is not None:
            address, number, *_ = (ctypes.c_uint64 * 16).from_address(place)
            return address, self._maps[number]
        form = "<" + STRUCT_FORMATS[parameter.kind]
        [found] = struct.unpack(form, ctypes.string_at(place, struct.calcsize(form)))
        return SimpleNamespace(address=found) if parameter.kind == "pointer" else found


def _joined(numbers: Any) -> str:
    return "x".join(map(str, numbers))


class Pretended(NamedTuple):
    """The pretended machine: its driver, and the tensors that were made since `made` was emptied."""

    driver: Driver
    made: list[torch.Tensor]
    here: SimpleNamespace

    def on(self, gpu: str) -> None:
        """Be this GPU, with a stream of its own for what comes."""
        self.here.index, self.here.name = GPUS[gpu]
        self.here.stream += 1


def pretend() -> Pretended:
    """Have all tensors of this process say that they are on a GPU, and all launches go to a stand-in for its driver."""
    here = SimpleNamespace(index=0, name="", stream=0, tracing=False)
    found = Pretended(Driver(), [], here)
    found.on("h200")
    _devices(here)
    _factories(found.made)
    _driver(found.driver)
    _torch_refuses()
    # Calls are chosen anew each, from records that are read once.
    Library.over = functools.cache(Library.over)  # type: ignore[method-assign]
    return found


class ByTorch(Exception):
    """A call that PyTorch's own operations would compute."""


REFUSED = ("scaled_dot_product_attention", "bmm", "_softmax")
"""PyTorch's operations that no call of kernels takes."""
_LIBRARY = torch.library.Library("aten", "IMPL")


def _torch_refuses() -> None:
    """Have PyTorch's own attention raise: it would take hours here."""

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise ByTorch(f"PyTorch's {name} was called")

        return refuse

    with warnings.catch_warnings():
        # It says that it replaces an operation, as it should.
        warnings.simplefilter("ignore")
        for name in REFUSED:
            for key in ("CPU", "AutogradCPU"):
                _LIBRARY.impl(name, refusing(name), key)
    torch.compile = refusing("compiler")  # type: ignore[assignment]


def forget() -> None:
    """Have the next call make anew what outlives calls: its place in memory would tell which call came first."""
    driver.STREAM_MEMORY.__init__()  # type: ignore[misc]
    for name in ("_UNREAD", "_COUNTS"):
        getattr(launching, name, {}).clear()


def _devices(here: SimpleNamespace) -> None:
    devices = [torch.device("cuda", index) for index, _ in GPUS.values()]
    tensor: Any = torch.Tensor
    own, cpu = tensor.device, torch.device("cpu")

    def device(x: Any) -> torch.device:
        # Tensors without memory, of traces, stay what they are.
        found: torch.device = own.__get__(x)
        return devices[here.index] if found == cpu and not here.tracing else found

    def traced(converter: Any, *given: Any, **words: Any) -> Any:
        # PyTorch can't differentiate fake tensors of a GPU that its build lacks.
        here.tracing, before = True, here.tracing
        try:
            return convert(converter, *given, **words)
        finally:
            here.tracing = before

    convert = FakeTensorConverter.from_real_tensor
    FakeTensorConverter.from_real_tensor = traced  # type: ignore[method-assign]
    tensor.device = property(device)
    tensor.is_cuda, tensor.is_cpu = property(lambda x: device(x).type == "cuda"), property(lambda x: device(x).type == "cpu")
    torch.version.cuda = "13.0"  # type: ignore[assignment]
    gpu: Any = torch.cuda
    gpu.device = lambda device: contextlib.nullcontext()
    gpu.is_available = gpu.is_initialized = lambda: True
    gpu.is_current_stream_capturing = lambda: False
    gpu.current_device = lambda: here.index
    gpu.current_stream = lambda device=None: SimpleNamespace(cuda_stream=here.stream)
    gpu.get_device_capability = lambda device=None: (9, 0)
    gpu.get_device_name = lambda device=None: here.name
    gpu.get_device_properties = lambda device=None: SimpleNamespace(name=here.name, multi_processor_count=MULTIPROCESSORS)
    c: Any = torch._C
    c._cuda_getDevice, c._cuda_isCurrentStreamCapturing = gpu.current_device, gpu.is_current_stream_capturing
    c._cuda_getCurrentRawStream = lambda index: here.stream


def _is_gpu(x: Any) -> bool:
    return (isinstance(x, torch.device) and x.type == "cuda") or (isinstance(x, str) and x.startswith("cuda"))


def _factories(made: list[torch.Tensor]) -> None:
    """Make tensors for a GPU on the CPU, and keep those that are made, so that no memory is given twice."""

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **words: Any) -> Any:
            if _is_gpu(words.get("device")):
                del words["device"]
            found = function(*(x for x in given if not _is_gpu(x)), **words)
            # What a trace or a transform makes has no memory.
            if type(found) is torch.Tensor and found.is_cuda and not is_functorch_wrapped_tensor(found):
                made.append(found)
            return found

        return wrapped

    for name in ("empty", "empty_strided", "empty_like", "zeros", "zeros_like", "ones", "full", "tensor", "arange", "as_tensor"):
        setattr(torch, name, keeping(getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_empty_strided", "contiguous", "clone", "to"):
        setattr(torch.Tensor, name, keeping(getattr(torch.Tensor, name)))


def _driver(stand_in: Driver) -> None:
    driver.library = lambda: stand_in  # type: ignore[assignment]
    driver._context.cache_clear()

    def code(manifest: Manifest, binary: Binary) -> bytes:
        image = binary.sha256.encode()
        stand_in.binaries.setdefault(image, (f"shipped {manifest.variant_id}", binary))
        return image

    def from_compiled(given: Any, **_: Any) -> tuple[Binary, bytes]:
        kernel, arguments, options = given
        said = "".join(f" {name}={x}" for name, x in sorted(options.items()))
        binary = compiled(kernel, arguments, said)
        stand_in.binaries[binary.sha256.encode()] = f"compiled {_variant(kernel)}{said}", binary
        return binary, binary.sha256.encode()

    def lines_of(function: Any) -> tuple[list[str], int]:
        # Nothing compiles a kernel's text, which takes long to take apart.
        return [f"def {function.__name__}():\n", "    pass\n"], function.__code__.co_firstlineno

    jit.inspect = SimpleNamespace(**{**vars(inspect), "getsourcelines": lines_of})
    Manifest.code = code  # type: ignore[method-assign]
    compiling.from_compiled = from_compiled
    jit.JITFunction.warmup = lambda kernel, *arguments, grid, **options: (kernel, arguments, options)


def _variant(kernel: Any) -> str:
    """The variant of a kernel, by its module's name."""
    return str(kernel.fn.__module__).rsplit("_", 2)[-2]


def compiled(kernel: Any, arguments: tuple[Any, ...], options: str) -> Binary:
    """In place of Triton's compiler: a binary that is never run, with the kernel's own parameters."""
    found, constants = [], []
    for position, (parameter, x) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            constants.append(Condition(parameter.name, position, "equals", x))
            continue
        tensor_map, kind = None, "i64"
        if isinstance(x, torch.Tensor):
            kind = "pointer"
        elif hasattr(x, "block_shape"):
            kind, tensor_map = "tensor_map", TensorMap(9, x.base.element_size(), tuple(x.block_shape), 3)
        elif isinstance(x, float):
            kind = "fp32"
        elif x >= 2**63:
            kind = "u64"
        found.append(Parameter(parameter.name, position, kind, "", tensor_map))
    name = kernel.__name__
    kinds = [(one.kind, one.tensor_map) for one in found]
    return Binary(
        kernel=name, specialization="", entry=name, arch="sm_90a", triton="", threads=128, shared_bytes=0, cluster=1, launch_pdl=False,
        cooperative=False, global_scratch_bytes=0, profile_scratch_bytes=0, parameters=tuple(found),
        conditions=tuple(constants), sha256=f"{kernel.fn.__module__} {name} {kinds} {constants}{options}",
    )  # fmt: skip
