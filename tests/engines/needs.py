"""Requirements of these tests on the machine.

Without them the tests skip and name the missing package or privilege; in CI they fail instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGES: Final[Mapping[str, str]] = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "mpirun": "openmpi-bin",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""Programs that these tests use, and their Debian packages."""

NAMESPACES: Final = ("ip", "nsenter", "setpriv", "unshare")
_SEARCHED: Final = f"{os.defpath}:/usr/sbin:/sbin"


def require(*programs: str, namespaces: bool = False) -> None:
    """Skip, or fail in CI, if a program or the privilege to create namespaces is missing."""
    packages = sorted({PACKAGES[program] for program in programs if find(program) is None})
    if packages:
        _without(f"{', '.join(packages)} missing; type: apt-get install --no-install-recommends {' '.join(packages)}")
    if namespaces and (reason := _no_namespaces()):
        _without(f"no namespaces for machines: {reason}; run the tests as root, with CAP_SYS_ADMIN")


def find(program: str) -> str | None:
    """Return a program's path. Daemons may not be on the user's PATH."""
    return shutil.which(program) or shutil.which(program, path=_SEARCHED)


def _without(what: str) -> None:
    if os.environ.get("CI") == "true" or os.environ.get("NUMAPIN_TEST_ENGINES") == "all":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@cache
def _no_namespaces() -> str:
    """Return why namespaces with a virtual cable cannot be created; empty if they can."""
    inside: Sequence[str] = ("ip", "link", "add", "np-try", "type", "veth", "peer", "name", "np-tried")
    words = ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "--kill-child", "--mount-proc", "--", *inside]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
