"""CUDA driver calls that torch lacks, typed and checked.

The driver API is used instead of the runtime, because a failed cudaHostRegister leaves a runtime error pending, which
surfaces at a later, unrelated kernel launch. The driver keeps no such state. Both share the primary contexts, and so
torch's. Source: CUDA Driver API reference (CUDA 12). Signatures and checks are tables; a call that fails raises.

Events are numbers here, which are used again and never destroyed. The destructor of torch.cuda.Event calls CUDA, which
aborts a forked child that inherited the object.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any, Final

from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LIBRARY: Final = "libcuda.so.1"
_once_locks: Final[dict[int, RLock]] = {}

_SUCCESS: Final = 0
_NOT_READY: Final = 600
_MEMHOSTREGISTER_PORTABLE: Final = 1  # registered for every context, so that one call serves all devices
_EVENT_BLOCKING_SYNC: Final = 1  # a thread that waits for the event sleeps
_EVENT_DISABLE_TIMING: Final = 2
_CAPTURE_MODE_RELAXED: Final = 2

# Argument types by name; each returns a CUresult. All release the GIL: a call may wait for a lock of the driver whose
# holder waits for the GIL (a host function in Python).
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuCtxRecordEvent": (c_void_p, c_void_p),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuDevicePrimaryCtxGetState": (c_int, POINTER(c_uint), POINTER(c_int)),
    "cuEventQuery": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}
_OPTIONAL: Final = frozenset({"cuCtxRecordEvent"})  # since CUDA 12.5, driver R555
_CHECKED_BY_CALLER: Final = frozenset(
    {
        # Each batch comes to them, and a checker takes as long as the call.
        *("cuCtxRecordEvent", "cuEventQuery", "cuEventRecord", "cuMemcpyHtoDAsync_v2", "cuStreamWaitEvent"),
        *("cuGetErrorName", "cuGetErrorString"),  # an unknown result has neither name nor text
    }
)

_LOOK_AT_THE_LOG: Final = "see what the driver says: dmesg | grep -i nvrm"
_FIND_THE_KERNEL: Final = "a kernel failed earlier; to see which, run again with: CUDA_LAUNCH_BLOCKING=1"
_HINTS: Final = {
    "CUDA_ERROR_ASSERT": _FIND_THE_KERNEL,
    "CUDA_ERROR_ILLEGAL_ADDRESS": _FIND_THE_KERNEL,
    "CUDA_ERROR_LAUNCH_FAILED": _FIND_THE_KERNEL,
    "CUDA_ERROR_OUT_OF_MEMORY": "pin less, with a smaller pinned_budget=, or give the container more memory",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "capture through torch.cuda.CUDAGraph; numapin waits for these captures",
    "CUDA_ERROR_NOT_FOUND": "update the driver to R555 or later",
}


class CudaRefused(NumapinError):  # noqa: N818 - reads as what happened, like BindingRefused
    """The CUDA driver refused a call; `name` is its name for the result, such as "CUDA_ERROR_OUT_OF_MEMORY"."""

    def __init__(self, message: str, hint: str = "", *, name: str = "CUDA_ERROR_UNKNOWN") -> None:
        super().__init__(message, hint)
        self.name = name


@dataclass(frozen=True, slots=True)
class Event:
    """A CUDA event of a device's primary context; `handle` is the driver's CUevent, made with `flags`."""

    device: int
    handle: int
    flags: int


class PrimaryContext:
    """A device's primary context. Inside the block it is the calling thread's current one; any thread may enter it."""

    def __init__(self, handle: int, push: Callable[[int], int], pop: Callable[[object], int]) -> None:
        self.handle, self._push, self._pop = handle, push, pop
        self._popped = byref(c_void_p())  # never read

    def __enter__(self) -> None:
        """Make it current. A generator would take longer, and every batch comes here."""
        self._push(self.handle)

    def __exit__(self, *_: object) -> None:
        """Make the former context current."""
        self._pop(self._popped)


def driver() -> Driver | None:
    """Return the driver of this process, loaded once; None without a driver or without a GPU that it can use.

    This initializes the driver (cuInit), after which CUDA fails in forks of this process: call it only in a process
    that uses CUDA. A child forked after that gets None.
    """
    if not _load.cache_info().currsize:  # threads that come at once get the same one
        with once_lock():
            _load()
    loaded = _load()
    return loaded if loaded is not None and loaded.pid == os.getpid() else None


def once_lock() -> RLock:
    """Return this process's lock for making what it has once: a forked child may inherit a held one.

    It can be entered again: a finalizer may run while it is held.
    """
    return _once_locks.setdefault(os.getpid(), RLock())


@cache
def _load() -> Driver | None:
    try:
        return Driver(_LIBRARY)
    except (OSError, AttributeError, CudaRefused):  # no library; a library that is too old; no device
        return None


class Driver:
    """Driver calls on devices by their ordinals, from any thread. A call that fails raises CudaRefused.

    While a stream captures a CUDA graph in global mode (the default), `has_passed` breaks the capture from any thread
    that has not relaxed its capture mode. `record` breaks it in every mode.
    """

    def __init__(self, library: str) -> None:
        """Load and initialize. Raises OSError or AttributeError (a call is missing), CudaRefused (cuInit failed)."""
        self.pid = os.getpid()
        loaded: Any = ctypes.CDLL(library)
        self._call: dict[str, Any] = {}
        for name, types in _SIGNATURES.items():
            if name in _OPTIONAL and not hasattr(loaded, name):
                continue
            function = self._call[name] = loaded[name]
            function.argtypes, function.restype = types, c_int
            if name not in _CHECKED_BY_CALLER:
                function.errcheck = self._succeeded
        self._get_state, self._query = self._call["cuDevicePrimaryCtxGetState"], self._call["cuEventQuery"]
        self._record_context: Any = self._call.get("cuCtxRecordEvent")
        self._record_stream, self._copy = self._call["cuEventRecord"], self._call["cuMemcpyHtoDAsync_v2"]
        self._let_wait = self._call["cuStreamWaitEvent"]
        self._call["cuInit"](0)
        ordinals = range(self._out(c_int(), "cuDeviceGetCount"))
        # Each device has its own place for the driver's answer, so that threads do not read each other's.
        places = tuple(c_int() for _ in ordinals)
        self._states = tuple(
            (ordinal, self._out(c_int(), "cuDeviceGet", ordinal), place, byref(place))
            for ordinal, place in enumerate(places)
        )
        self._contexts: dict[int, PrimaryContext] = {}
        self._idle: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)  # by device and flags

    @property
    def can_record_contexts(self) -> bool:
        """Whether the driver has cuCtxRecordEvent (CUDA 12.5, driver R555), which `record` needs without a stream."""
        return self._record_context is not None

    def active_devices(self) -> tuple[int, ...]:
        """Return the ordinals of the devices whose primary context is active in this process, in ascending order."""
        found, flags = [], byref(c_uint())
        for ordinal, device, active, place in self._states:
            self._get_state(device, flags, place)
            if active.value:
                found.append(ordinal)
        return tuple(found)

    def register(self, device: int, address: int, num_bytes: int) -> None:
        """Page-lock `num_bytes` from `address` on, for every device.

        Creates the primary context of `device` if it has none. Touch the pages first: the call holds locks of the
        whole driver while it pins. It does not disturb a capture.
        """
        with self.relaxed_capture(), self.context(device):
            self._call["cuMemHostRegister_v2"](address, num_bytes, _MEMHOSTREGISTER_PORTABLE)

    def unregister(self, device: int, address: int) -> None:
        """Undo the `register` at `address`. It does not disturb a capture."""
        with self.relaxed_capture(), self.context(device):
            self._call["cuMemHostUnregister"](address)

    def context(self, device: int) -> PrimaryContext:
        """Return the device's primary context, which is created if there is none. During a capture, relax it first."""
        found = self._contexts.get(device)
        if found is None:  # two threads at once retain the same context twice, which is harmless
            handle = self._out(c_void_p(), "cuDevicePrimaryCtxRetain", self._out(c_int(), "cuDeviceGet", device))
            push, pop = self._call["cuCtxPushCurrent_v2"], self._call["cuCtxPopCurrent_v2"]
            found = self._contexts[device] = PrimaryContext(handle, push, pop)
        return found

    def use_context(self, device: int) -> None:
        """Make the device's primary context the calling thread's current one for good, if the thread has none."""
        if not self._out(c_void_p(), "cuCtxGetCurrent"):
            self._call["cuCtxSetCurrent"](self.context(device).handle)

    def record(self, device: int, *, stream: int | None = None, is_timed: bool = False) -> Event:
        """Return an event that passes when all work submitted so far to a stream is done. Call it in the `context`.

        None: to any stream of the device, from any context. Call that inside `data.quarantine.capture_lock`: during
        a capture it fails (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) and breaks the capture. It also fails if the context
        is not active, or if the driver is too old.
        """
        flags = (0 if is_timed else _EVENT_DISABLE_TIMING) | (0 if stream is None else _EVENT_BLOCKING_SYNC)
        idle = self._idle[device, flags]
        event: Event | None
        try:
            event = idle.pop()
        except IndexError:
            event = None
        if event is None:
            if stream is None and not self.can_record_contexts:
                raise _refused("CUDA_ERROR_NOT_FOUND", "this CUDA driver has no cuCtxRecordEvent")
            if device not in self.active_devices():
                raise _refused("CUDA_ERROR_INVALID_CONTEXT", f"no CUDA context to record is active on device {device}")
            with self.context(device):
                event = Event(device, self._out(c_void_p(), "cuEventCreate", flags), flags)
        if stream is None:
            call, arguments = self._record_context, (self._contexts[device].handle, event.handle)
        else:
            call, arguments = self._record_stream, (event.handle, stream)
        if result := call(*arguments):
            idle.append(event)
            raise self.refusal(result, call, arguments)
        return event

    def record_everywhere(self) -> list[Event]:
        """Return an event of the whole context of each active device, as `record` does; if one is refused, none."""
        events: list[Event] = []
        try:
            events.extend(self.record(device) for device in self.active_devices())
        except CudaRefused:
            self.recycle(*events)
            raise
        return events

    def let_wait(self, stream: int, event: Event) -> None:
        """Let a stream of the event's device (0: the default stream) wait for the event. The host does not wait.

        Call it in the device's `context`.
        """
        if result := self._let_wait(stream, event.handle, 0):
            raise self.refusal(result, self._let_wait, (stream, event.handle, 0))

    def has_passed(self, event: Event) -> bool:
        """Return whether all work before the event is done. A kernel's failure may surface here."""
        result: int = self._query(event.handle)
        if result not in (_SUCCESS, _NOT_READY):
            raise self.refusal(result, self._query, (event.handle,))
        return result == _SUCCESS

    def wait(self, event: Event) -> None:
        """Wait on the host until all work before the event is done. Not during a capture."""
        self._call["cuEventSynchronize"](event.handle)

    def elapsed_ms(self, began: Event, ended: Event) -> float:
        """Return the time between two timed events that have passed."""
        elapsed = c_float()
        self._call["cuEventElapsedTime"](byref(elapsed), began.handle, ended.handle)
        return elapsed.value

    def recycle(self, *events: Event) -> None:
        """Take back events that are no longer used, for a later `record`. Finalizers may call it."""
        for event in events:
            self._idle[event.device, event.flags].append(event)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from host memory to a device on a stream (a CUstream).

        Call it in the device's `context`. Both ranges must stay allocated until the copy is done. It takes half the
        host time of Tensor.copy_.
        """
        if result := self._copy(target, source, num_bytes, stream):
            raise self.refusal(result, self._copy, (target, source, num_bytes, stream))

    def relax_capture(self) -> None:
        """Let this thread query events, register and unregister during any capture, permanently."""
        self._call["cuThreadExchangeStreamCaptureMode"](byref(c_int(_CAPTURE_MODE_RELAXED)))

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread query events, register and unregister during any capture, inside the block."""
        mode = c_int(_CAPTURE_MODE_RELAXED)
        self._call["cuThreadExchangeStreamCaptureMode"](byref(mode))
        try:
            yield
        finally:
            self._call["cuThreadExchangeStreamCaptureMode"](byref(mode))  # the first call stored the former mode

    def _out(self, value: c_int | c_void_p, name: str, *arguments: int) -> int:
        """Call a function that writes its answer to its first argument, and return the answer."""
        self._call[name](byref(value), *arguments)
        return value.value or 0

    def _succeeded(self, result: int, function: Any, arguments: tuple[object, ...]) -> int:  # noqa: ANN401
        if result != _SUCCESS:
            raise self.refusal(result, function, arguments)
        return result

    def refusal(self, result: int, function: Any, arguments: tuple[object, ...]) -> CudaRefused:  # noqa: ANN401
        """Return the error for a call that failed."""
        name, text = self._text("cuGetErrorName", result), self._text("cuGetErrorString", result)
        typed = zip(function.argtypes, arguments, strict=True)
        shown = (hex(value) if kind is c_void_p else str(value) for kind, value in typed if isinstance(value, int))
        return _refused(name, f"{function.__name__}({', '.join(shown)}) failed: {name}, {text}")

    def _text(self, call: str, result: int) -> str:
        text = c_char_p()
        self._call[call](result, byref(text))
        return f"CUresult {result}" if text.value is None else text.value.decode()


def _refused(name: str, message: str) -> CudaRefused:
    return CudaRefused(message, _HINTS.get(name, _LOOK_AT_THE_LOG), name=name)
