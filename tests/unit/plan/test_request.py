"""Binding options as text, which the command line and `numapin.spawn` parse in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from numapin import Bind, Memory, Request, make_plan
from numapin.errors import UsageError
from tests.machines.grids import grid
from tests.unit.plan.seam import CpuSet, MemoryChoice, parse_bind, parse_gpus, parse_memory

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


def test_lists_as_text() -> None:
    """Texts are lists, not sequences of characters; GPUs may be numbers."""
    assert Request(gpus="10").gpus == ("10",)
    assert Request(gpus="1, 0").gpus == Request(gpus=[1, 0]).gpus == ("1", "0")
    assert Request(reserve_cpus="0-3,8").reserve_cpus == CpuSet({0, 1, 2, 3, 8})
    assert Request(memory="bind", memory_nodes="0-1").memory_nodes == CpuSet({0, 1})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_ranks": "4"}, "--nproc-per-node is '4'; it must be a whole number"),
        ({"num_ranks": 2.5}, "--nproc-per-node is 2.5"),
        ({"cpus_per_rank": "x"}, "--cpus-per-rank is 'x'"),
        ({"gpus": "0,"}, "--gpus: '0,' has an empty entry"),
        ({"gpus": [1.5]}, "--gpus: "),
        ({"gpus": 3}, "--gpus: "),
        ({"reserve_cpus": "x"}, "--reserve-cpus: 'x' is not a number"),
        ({"reserve_cpus": [1.5]}, "--reserve-cpus: "),
        ({"reserve_cpus": None}, "--reserve-cpus: "),
        ({"memory": "bind", "memory_nodes": "y"}, "--memory: 'y' is not a number"),
        ({"rank_gpus": "01"}, "rank_gpus: "),
    ],
)
def test_values_of_the_wrong_kind_are_refused(options: dict[str, Any], told: str) -> None:
    """Each is a UsageError with the option and a hint."""
    with pytest.raises(UsageError, match=told) as caught:
        Request(**options)
    assert caught.value.hint


def test_a_rank_on_a_gpu_that_does_not_exist_is_refused() -> None:
    """An index that no GPU has is a UsageError."""
    with pytest.raises(UsageError, match="rank_gpus names gpu99, which does not exist"):
        make_plan(grid(gpus=[0]), Request(rank_gpus=[99]))
