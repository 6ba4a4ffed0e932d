"""The stand-in for torch.cuda: devices are numbers, and nothing is on them."""

from __future__ import annotations

import os
import sys

_state = {"initialized": False, "device": 0}


def _get_device_index(device: object, optional: bool = False) -> int:  # noqa: FBT001, FBT002 - torch's own
    if optional and device in (None, "cuda"):
        return current_device()
    return device if isinstance(device, int) else int(str(device).removeprefix("cuda:"))


def _lazy_init() -> None:
    _state["initialized"] = True


def init() -> None:
    sys.modules[__name__]._lazy_init()


def is_initialized() -> bool:
    return bool(_state["initialized"])


def set_device(device: object) -> None:
    number = _get_device_index(device)
    if number >= int(os.environ.get("STAND_IN_DEVICES", "8")):
        msg = "CUDA error: invalid device ordinal"
        raise RuntimeError(msg)
    init()
    _state["device"] = number


def current_device() -> int:
    init()
    return int(_state["device"])
