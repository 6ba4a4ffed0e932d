"""The place where one loader's memory, workers and pin thread belong."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import torch

from numapin.data.locality import Locality, find_locality
from numapin.rank import bind
from numapin.system import cuda

if TYPE_CHECKING:
    from numapin.data.notices import Notices


class Home:
    """The place where one loader's memory and threads belong, found when it is first needed."""

    def __init__(self, *, device: torch.device | None, node: int | None, notices: Notices) -> None:
        """Take the GPU that batches go to (None: they stay on the host) and the user's node (None: not named)."""
        self._device, self._node, self._notices = device, node, notices
        self._locality: Locality | None = None

    @property
    def device_index(self) -> int:
        """Return the index of the loader's GPU; the current one if batches stay on the host."""
        if self._device is None or self._device.index is None:
            return torch.cuda.current_device()
        return self._device.index

    @property
    def locality(self) -> Locality:
        """Return the nodes and CPUs."""
        if self._locality is None:
            uses_cuda = self._device is not None or torch.cuda.is_initialized()
            index = self.device_index if uses_cuda else None
            self._locality = find_locality(environ=os.environ, node=self._node, device_index=index)
            self._rehearse(self._locality)
        return self._locality

    def _rehearse(self, locality: Locality) -> None:
        """Bind a thread, to report what the kernel refuses: it refuses the same to the workers."""
        if locality.cpus or locality.memory:
            thread = threading.Thread(target=self.bind_this_thread, name="numapin-trial")
            thread.start()
            thread.join()

    def bind_this_thread(self) -> None:
        """Bind the calling thread to the CPUs and nodes, and let it work beside captures of CUDA graphs."""
        locality = self.locality
        for refused in bind.bind_thread(
            cpus=locality.cpus, memory=locality.memory, nodes=locality.nodes, within=locality.within
        ):
            self._notices.report_refusal(refused)
        driver = cuda.driver() if torch.cuda.is_initialized() else None
        if driver is not None:
            driver.relax_capture()
