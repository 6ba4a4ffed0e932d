"""Slurm's own options: job arrays and the components of heterogeneous jobs. Pure.

Comes in: the text of an option. Goes out: its value, or a ValueError that names the form expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from numapin.base import sizes

_ARRAY: Final = re.compile(
    r"[0-9]{1,9}(-[0-9]{1,9}(:[1-9][0-9]{0,8})?)?(,[0-9]{1,9}(-[0-9]{1,9}(:[1-9][0-9]{0,8})?)?)*"
)
_LIMIT: Final = re.compile(r"[1-9][0-9]{0,8}")
_RANGE: Final = re.compile(r"([0-9]+)-([0-9]+)")
_NUMBER: Final = re.compile(r"[0-9]{1,9}")
_PARTITION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@/+-]{0,127}")
_COMPONENT: Final = "nodes=N,gpus-per-node=N, such as nodes=2,gpus-per-node=4,cpus-per-task=64,partition=small"
_KEYS: Final = ("nodes", "gpus-per-node", "cpus-per-task", "mem-per-node", "partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Hosts of another kind in the same job. None: as in `JobRequest`, the manager decides."""

    nodes: int
    gpus_per_node: int
    cpus_per_task: int | None = None
    memory_bytes: int | None = None
    queue: str | None = None


def array(text: str) -> str:
    """Return the indices of a job array, as sbatch takes them."""
    indices, has_limit, limit = text.partition("%")
    is_limited = not has_limit or bool(_LIMIT.fullmatch(limit))
    if not _ARRAY.fullmatch(indices) or not is_limited:
        raise ValueError(f"{text!r} is not a list of indices, such as 0-9, 1,3,5 or 0-99%4 (four at a time)")
    for first, last in _RANGE.findall(indices):
        if int(first) > int(last):
            raise ValueError(f"{text!r} has the range {first}-{last}, which is empty")
    return text


def component(text: str) -> Component:
    """Return the component of nodes=N,gpus-per-node=N and further parts."""
    values = _parts(text)
    return Component(
        nodes=_number("nodes", values["nodes"], least=1),
        gpus_per_node=_number("gpus-per-node", values["gpus-per-node"], least=0),
        cpus_per_task=_number("cpus-per-task", values["cpus-per-task"], least=1) if "cpus-per-task" in values else None,
        memory_bytes=sizes.parse(values["mem-per-node"]) if "mem-per-node" in values else None,
        queue=_partition(values["partition"]) if "partition" in values else None,
    )


def _parts(text: str) -> dict[str, str]:
    """Return the value of each key; those of nodes and GPUs are there. Raises ValueError."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, value = _part(part)
        if key in values:
            raise ValueError(f"{text!r} has {key} twice")
        values[key] = value
    missing = [key for key in _KEYS[:2] if key not in values]
    if missing:
        raise ValueError(f"{text!r} lacks {missing[0]}; write {_COMPONENT}")
    return values


def _part(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or key not in _KEYS:
        raise ValueError(f"{text!r} is none of {', '.join(f'{name}=' for name in _KEYS)}; write {_COMPONENT}")
    return key, value


def _number(key: str, text: str, *, least: int) -> int:
    if not _NUMBER.fullmatch(text) or int(text) < least:
        raise ValueError(f"{key}={text} is not a number of at least {least}")
    return int(text)


def _partition(text: str) -> str:
    if not _PARTITION.fullmatch(text):
        raise ValueError(f"partition={text} is not the name of a partition")
    return text
