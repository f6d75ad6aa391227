"""A simulated CUDA device: it computes on the CPU and counts how often the host waits for it.

Tensors on it say that they are on `cuda:0`, so code takes the paths of a GPU. As on a GPU, an
operation that mixes them with host tensors fails. The host waits

- to read: values go to the host, or an operation needs them there for the shape of its result
  (`nonzero`, boolean masks, `unique`, …);
- to upload: a copy to the device is not asynchronous, because it was not asked to be, or because
  the host memory is not pinned. PyTorch synchronises the stream after such a copy;
- in `synchronize` of the device or of an event.

A copy to the host that is asynchronous holds garbage until the host waits for something else.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
# The shape of their result depends on values.
_SHAPED_BY_VALUES = {
    aten.nonzero,
    aten.nonzero_numpy,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.item,
    aten.allclose,
}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_COPIES = {aten._to_copy, aten.to, aten.type_as}


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device. held: its values, on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",  # PyTorch must have the device; it has no CUDA devices on a CPU
        )
        wrapper.held = held
        return wrapper

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} on a tensor of the simulated device, outside `simulated_device`"
        )


@dataclass(frozen=True)
class Wait:
    """kind: read, upload or synchronize. operation: its name. place: the code of this repository
    that waited, as file:function."""

    kind: str
    operation: str
    place: str


class SimulatedDevice:
    """waits: every wait of the host so far, in order."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self._pending: list[tuple[Tensor, Tensor]] = []

    def move(self, module: nn.Module) -> Any:
        """Put all parameters and buffers of a module on the device. Returns the module."""
        with torch.inference_mode():  # else a wrapper has no views in inference mode
            return self._moved(module)

    def _moved(self, module: nn.Module) -> Any:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    moved = DeviceTensor(parameter.detach())
                    part._parameters[name] = nn.Parameter(moved, requires_grad=False)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = DeviceTensor(buffer)
        return module

    def wait(self, kind: str, operation: str) -> None:
        self.waits.append(Wait(kind, operation, _place()))
        for host, values in self._pending:
            host.copy_(values)
        self._pending.clear()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of PyTorch."""
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        there = any(isinstance(x, DeviceTensor) for x in tensors)
        packet = func.overloadpacket
        if packet is aten.copy_:
            return self._copy(*args, **kwargs)
        if packet in _COPIES:
            return self._to(func, args, kwargs)
        target = kwargs.get("device")
        if target is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        if there:
            self._check(func, packet, args, tensors)
            args, kwargs = _held(args), {name: _held(x) for name, x in kwargs.items()}
        result = func(*args, **kwargs)
        if packet in _SHAPED_BY_VALUES and not isinstance(result, Tensor | tuple):
            return result
        on_device = there if target is None else torch.device(target).type != "cpu"
        if not on_device:
            return result
        # An operation in place returns its argument.
        known = {id(x.held): x for x in tensors if isinstance(x, DeviceTensor)}

        def wrap(x: Any) -> Any:
            if isinstance(x, Tensor):
                return known[id(x)] if id(x) in known else DeviceTensor(x)
            return type(x)(map(wrap, x)) if isinstance(x, list | tuple) else x

        return wrap(result)

    def _check(self, func: Any, packet: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        host = [x for x in tensors if not isinstance(x, DeviceTensor)]
        if packet in _INDEXED:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.wait("read", "index by a mask")
            if any(not isinstance(x, DeviceTensor) for x in indices):
                self.wait("upload", "index by a list or a host tensor")
            host = [x for x in host if not any(x is index for index in indices)]
        if any(x.dim() for x in host):
            raise RuntimeError(
                f"{func}: expected all tensors on one device, found cpu and {DEVICE}"
            )
        by_length = packet is aten.repeat_interleave and func._overloadname.endswith("Tensor")
        if packet in _SHAPED_BY_VALUES or by_length:
            self.wait("read", packet.__name__)

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any form of `Tensor.to`."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        source, other = given["self"], given.get("other")
        there = isinstance(source, DeviceTensor)
        device, dtype = given.get("device"), given.get("dtype")
        if other is not None:
            device, dtype = other.device, other.dtype
        to_device = there if device is None else torch.device(device).type != "cpu"
        dtype = source.dtype if dtype is None else dtype
        copies = func.overloadpacket is aten._to_copy or bool(given.get("copy"))
        if dtype == source.dtype and to_device == there and not copies:
            return source
        values = _held(source).to(dtype, copy=True)
        asynchronous = bool(given.get("non_blocking"))
        if there and not to_device:
            return self._read(values, asynchronous)
        if not there and to_device:
            self._upload(source, asynchronous)
        return DeviceTensor(values) if to_device else values

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        there, from_there = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
        if from_there and not there:
            self.wait("read", "copy_")
        if there and not from_there and source.dim():
            self._upload(source, non_blocking)
        _held(target).copy_(_held(source))
        return target

    def _upload(self, source: Tensor, asynchronous: bool) -> None:
        pinned = getattr(source, "pinned", False)
        if source.numel() and not (asynchronous and pinned):
            self.wait("upload", "pageable memory" if asynchronous else "a blocking copy")

    def _read(self, values: Tensor, asynchronous: bool) -> Tensor:
        if not values.numel():
            return values
        if not asynchronous:
            self.wait("read", "copy")
            return values
        garbage = torch.full_like(values, False if values.dtype == torch.bool else 77)
        self._pending.append((garbage, values.clone()))
        return garbage


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the arguments of an operation, also in lists."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _held(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.held
    return type(x)(map(_held, x)) if isinstance(x, list | tuple) else x


def _place() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__) and ".venv" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class _Operations(TorchDispatchMode):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.device.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What PyTorch does before it dispatches an operation, or with the driver."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.as_tensor, torch.tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            return torch.tensor(args[1], dtype=args[0].dtype).to(DEVICE)
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        if func is torch.Tensor.tolist and isinstance(args[0], DeviceTensor):
            return args[0].cpu().tolist()
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, index, *value = args
            parts = index if isinstance(index, tuple) else (index,)
            host = [torch.tensor(x) if isinstance(x, list) else x for x in parts]
            args = (tensor, tuple(host), *value)
        return func(*args, **kwargs)


def _event(device: SimulatedDevice) -> Callable[..., Any]:
    class Event:
        """As `torch.cuda.Event`."""

        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: object = None) -> None:
            self.at = time.perf_counter()
            self.behind = len(device.waits)

        def query(self) -> bool:
            return len(device.waits) > self.behind

        def synchronize(self) -> None:
            device.wait("synchronize", "an event")

        def elapsed_time(self, end: "Event") -> float:
            assert end.query(), "the event has not happened yet"
            return 1000 * (end.at - self.at)

    return Event


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """Inside this context there is a simulated CUDA device."""
    device = SimulatedDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "Event", _event(device))
        patch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
        patch.setattr(
            torch.cuda, "synchronize", lambda *_: device.wait("synchronize", "the device")
        )
        with _Functions(), _Operations(device):
            yield device
