"""Pass shared arrays and tensors to new processes of multiprocessing without copying them.

A new process that is not forked gets its arguments as a pickle, which would contain a copy of each array. What
processes send each other later, such as batches, is copied: a descriptor of the memory can be passed only at their
start.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from numapin.sharing.sealed import MAPPED

if TYPE_CHECKING:
    import numpy as np
    import torch

    from numapin.sharing.sealed import Sealed

_COLLATES: Final = r"torch\.utils\.data\._utils\.collate"
_PROTOCOL: Final = 4  # numpy's and Arrow's way without buffers out of the pickle
_registered: Final[set[str]] = set()


def _register() -> None:
    """Let multiprocessing pass arrays that lie in shared memory by reference, for each library that is loaded.

    From then on torch's collate functions do not warn of arrays that cannot be written, in the whole process.
    """
    for library, (kind, reduce_one) in _REDUCERS.items():
        if library in sys.modules and library not in _registered:
            _registered.add(library)
            ForkingPickler.register(getattr(sys.modules[library], kind), reduce_one)
            if library == "numpy":  # torch.as_tensor warns of a crash that a write to this memory cannot cause
                warnings.filterwarnings("ignore", "The given NumPy array is not writable", module=_COLLATES)


def _find(address: int, num_bytes: int) -> tuple[Sealed, int] | None:
    """Return the shared memory that has an array, and the array's position in it."""
    for sealed in tuple(MAPPED) if num_bytes else ():
        if sealed.address <= address < sealed.address + len(sealed):
            return sealed, address - sealed.address
    return None


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401 - what pickle takes
    found = _find(array.ctypes.data, array.nbytes)
    if found is None or get_spawning_popen() is None or array.flags.writeable or min(array.strides, default=0) < 0:
        return array.__reduce_ex__(_PROTOCOL)
    return _array_at, (*found, array.dtype, array.shape, array.strides)


def _array_at(
    sealed: Sealed, position: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> object:
    import numpy as np

    _register()
    return np.ndarray(shape, dtype, memoryview(sealed).toreadonly(), position, strides)


def _reduce_tensor(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - what pickle takes
    from torch.multiprocessing.reductions import reduce_tensor

    is_dense = tensor.device.type == "cpu" and "strided" in str(tensor.layout) and not tensor.requires_grad
    found = _find(tensor.data_ptr(), tensor.nbytes) if is_dense else None
    if found is None:
        return reduce_tensor(tensor)
    if get_spawning_popen() is None:
        return reduce_tensor(tensor.clone())  # torch sends the whole storage of a tensor: here, all shared data
    return tensor_at, (*found, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())


def tensor_at(
    sealed: Sealed, position: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Return the tensor at a position of shared memory. A write to it changes this process's copy of the page only."""
    import torch

    _register()
    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind, device="cpu")
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.frombuffer(sealed, dtype=kind, count=count, offset=position).as_strided(shape, strides)


def _reduce_buffer(buffer: Any) -> Any:  # noqa: ANN401 - pyarrow is optional
    found = _find(buffer.address, buffer.size) if buffer.is_cpu else None
    if found is None or get_spawning_popen() is None:
        return buffer.__reduce_ex__(_PROTOCOL)
    return _buffer_at, (*found, buffer.size)


def _buffer_at(sealed: Sealed, position: int, num_bytes: int) -> object:
    return import_module("pyarrow").py_buffer(view_at(sealed, position, num_bytes))


def view_at(sealed: Sealed, position: int, num_bytes: int) -> memoryview:
    """Return a read-only view of shared memory, of which an array can be made."""
    _register()
    return memoryview(sealed).toreadonly()[position : position + num_bytes]


_REDUCERS: Final[dict[str, tuple[str, Any]]] = {
    "numpy": ("ndarray", _reduce_array),
    "torch": ("Tensor", _reduce_tensor),
    "pyarrow": ("Buffer", _reduce_buffer),
}
"""By library: the type whose objects lie in shared memory, and the function that reduces one for pickle."""
