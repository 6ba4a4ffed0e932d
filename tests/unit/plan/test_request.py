"""Binding options as text, which the command line and `numapin.spawn` parse in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from numapin.base.cpu_set import CpuSet
from numapin.plan.request import Bind, Memory, MemoryChoice, Request, parse_bind, parse_gpus, parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("text", "memory", "nodes"),
    [
        ("local", Memory.LOCAL, None),
        ("bind=0,2-3", Memory.BIND, CpuSet({0, 2, 3})),
        ("interleave=", Memory.INTERLEAVE, CpuSet()),
    ],
)
def test_memory(text: str, memory: Memory, nodes: CpuSet | None) -> None:
    """A policy with or without nodes is unpacked into a request; its text is the parsed text."""
    choice = parse_memory(text)
    assert choice == MemoryChoice(memory=memory, memory_nodes=nodes)
    assert str(choice) == text


def test_memory_in_a_request() -> None:
    """The fields are those of a request."""
    request = Request(**parse_memory("bind=1")._asdict())
    assert (request.policy, request.memory_nodes) == (Memory.BIND, CpuSet({1}))


def test_modes_and_gpus() -> None:
    """A mode is a word; GPUs are separated by commas, and keep their order."""
    assert parse_bind("core-complex") is Bind.CORE_COMPLEX
    assert parse_gpus("1, GPU-12 ,0000:01:00.0") == ("1", "GPU-12", "0000:01:00.0")


@pytest.mark.parametrize(
    ("parse", "text", "told"),
    [
        (parse_bind, "nodes", "'nodes' is not one of none, node, socket"),
        (parse_memory, "", "'' is not one of none, local"),
        (parse_memory, "bind=x", "'x' is not a number"),
        (parse_gpus, "0,", "'0,' has an empty entry; write a list such as 0,2"),
        (parse_gpus, "", "'' has an empty entry"),
    ],
)
def test_what_cannot_be(parse: Callable[[str], object], text: str, told: str) -> None:
    """The error has the text that was seen and the valid words."""
    with pytest.raises(ValueError, match=told):
        parse(text)
