"""Report what a loader could not do as requested."""

from __future__ import annotations

import os
from typing import Final

from numapin.base.stderr import say
from numapin.data.message import Miss
from numapin.errors import BindingRefused

_UNSUPPORTED: Final = (
    "sparse, quantized and nested tensors, tensors that require gradients (.detach() helps), and subclasses that "
    "pickle themselves travel in torch's shared memory"
)


class Notices:
    """Collects a loader's notices and reports each once."""

    def __init__(self, *, is_strict: bool) -> None:
        """With `is_strict`, a refusal is an error at the next `check` instead of a warning."""
        self._is_strict = is_strict
        self._texts: dict[str, None] = {}  # in order
        self._refusal: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Return all notices so far, in order."""
        return tuple(self._texts)

    def warn(self, text: str) -> None:
        """Report a notice on stderr, unless it was reported before."""
        if text not in self._texts:
            self._texts[text] = None
            rank = os.environ.get("RANK")
            say(f"warning: {text}" if rank is None else f"warning: rank {rank}: {text}")

    def report_refusal(self, text: str) -> None:
        """Report something that the kernel or the driver refused. Under `strict`, keep it for `check` instead."""
        if not self._is_strict:
            self.warn(text)
        elif text not in self._texts:
            self._texts[text] = None
            self._refusal = self._refusal or text

    def report_miss(self, miss: Miss) -> None:
        """Report why a batch did not travel in a slot, if the user can do something about it."""
        if miss is Miss.UNSUPPORTED:
            self.warn(f"a batch traveled outside the slots: {miss}; {_UNSUPPORTED}")

    def check(self) -> None:
        """Raise BindingRefused for the first refusal under `strict`."""
        if self._refusal is not None:
            raise BindingRefused(self._refusal, "to run with what the kernel allows, remove strict=True")
