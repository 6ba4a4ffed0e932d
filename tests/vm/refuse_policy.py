"""Run a command under a seccomp filter that refuses the memory-policy calls, as Docker's default profile does.

    python refuse_policy.py COMMAND [ARGUMENT…]

Without CAP_SYS_NICE, Docker rejects mbind, set_mempolicy, get_mempolicy and similar calls with EPERM, and allows
sched_setaffinity. The filter survives exec and is inherited by children. It needs neither root nor libseccomp.
Source: Documentation/userspace-api/seccomp_filter.rst; profiles/seccomp/default.json of moby.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Final

PR_SET_NO_NEW_PRIVS: Final = 38
PR_SET_SECCOMP: Final = 22
SECCOMP_MODE_FILTER: Final = 2
RET_ALLOW: Final = 0x7FFF0000
RET_ERRNO: Final = 0x00050000

LOAD: Final = 0x20
"""BPF_LD | BPF_W | BPF_ABS"""
JUMP_IF_EQUAL: Final = 0x15
"""BPF_JMP | BPF_JEQ | BPF_K"""
RETURN: Final = 0x06
"""BPF_RET | BPF_K"""

NUMBERS: Final = {
    "x86_64": (0xC000003E, 237, 238, 239, 256, 279, 450),
    "aarch64": (0xC00000B7, 235, 237, 236, 238, 239, 450),
}
"""AUDIT_ARCH_*, then the numbers of mbind, set_mempolicy, get_mempolicy, migrate_pages, move_pages and
set_mempolicy_home_node, by machine."""


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def refuse_policy_calls() -> None:
    """Make the memory-policy calls fail with EPERM in this process and its future children."""
    architecture, *calls = NUMBERS[os.uname().machine]
    program = [
        (LOAD, 0, 0, 4),  # seccomp_data.arch
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, RET_ALLOW),  # a call of another architecture has other numbers
        (LOAD, 0, 0, 0),  # seccomp_data.nr
        *((JUMP_IF_EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)),
        (RETURN, 0, 0, RET_ALLOW),
        (RETURN, 0, 0, RET_ERRNO | errno.EPERM),
    ]
    instructions = (_Instruction * len(program))(*(_Instruction(*line) for line in program))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_Program(len(program), instructions)))


def _prctl(option: int, *arguments: object) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    padded = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*arguments, *(0,) * (4 - len(arguments)))]
    if prctl(option, *padded):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    refuse_policy_calls()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the command is what the caller asked for
