"""Remedies for refused NUMA system calls.

Each rank imports this before its program starts: built-ins only.
"""

from __future__ import annotations

import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

SYS_NICE: Final = "run the container with --cap-add SYS_NICE (Kubernetes: securityContext.capabilities.add: [SYS_NICE])"
REMEDIES: Final = {
    errno.EPERM: f"seccomp forbids it; {SYS_NICE}",
    errno.ENOSYS: "the kernel has no NUMA support; use --memory none",
    errno.EINVAL: "the kernel does not know the policy or does not allow the node; see: numapin topo",
}
