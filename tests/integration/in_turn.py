"""A rank's program that runs scripts one after another, each in a fork of it, so that a rank imports torch once.

Comes in: a folder, and command lines of scripts. Goes out: in the folder, for the script that is number n (from 0) of
rank r, its stdout and stderr in n.r.out and n.r.err. The first script that fails ends the rank with status 1 and the
script's stderr. A script that changes its CPUs fails.

Each script has its own process, so that it finds torch as it is after an import, and its own names in the launcher's
store, where the process group of each script looks for its ranks. This process starts no thread and uses no GPU.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch marks no exports

if TYPE_CHECKING:
    from collections.abc import Sequence


# Private, and looked up by each rendezvous: it connects to the launcher's store.
_CONNECT: Final = "_create_c10d_store"


def main() -> None:
    """Run the scripts."""
    folder, *scripts = sys.argv[1:]
    if _CONNECT not in _rendezvous():
        sys.exit(
            f"{__file__}: torch {torch.__version__} has no torch.distributed.rendezvous.{_CONNECT}, which in_turn.py "
            "replaces so that the scripts do not share names in the store; find what connects to the store instead"
        )
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports the compiler, as every optimizer does
    gc.freeze()
    for number, words in enumerate(map(shlex.split, scripts)):
        output = Path(folder) / f"{number}.{os.environ['RANK']}"
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _become(words, number, output)
            return
        if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            sys.exit(f"{words} ended with {status}\n{output.with_suffix(output.suffix + '.err').read_text()}")


def _become(words: Sequence[str], number: int, output: Path) -> None:
    """Run a script with its own output, and with its own names in the ranks' store."""
    for descriptor, name in ((1, "out"), (2, "err")):
        with output.with_suffix(f"{output.suffix}.{name}").open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    connect = _rendezvous()[_CONNECT]
    _rendezvous()[_CONNECT] = lambda *given, **named: PrefixStore(f"{number}", connect(*given, **named))
    sys.argv = [*words]
    sys.path[0] = str(Path(words[0]).parent)
    bound = os.sched_getaffinity(0)
    runpy.run_path(words[0], run_name="__main__")
    if os.sched_getaffinity(0) != bound:
        sys.exit(f"{words[0]} changed its CPUs from {bound} to {os.sched_getaffinity(0)}")


def _rendezvous() -> dict[str, Any]:
    """Return the names in torch's module; as an attribute of torch.distributed, `rendezvous` is a function."""
    return vars(importlib.import_module("torch.distributed.rendezvous"))


if __name__ == "__main__":
    main()
