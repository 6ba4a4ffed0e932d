"""The statistics of a loader as text and as a dict."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from tests.unit.data.seam import Stats

IDLE: Final = Stats(
    batches=0,
    bytes=0,
    hits=0,
    misses={},
    wait_s_per_batch=None,
    wait_share=None,
    transfer_gbps=None,
    slots=0,
    slots_made=0,
    slot_bytes=0,
    slots_on_loan=0,
    pinned_bytes=0,
    nodes=(),
    share_on_node=None,
    placement="the machine has one NUMA node, 0",
    notes=(),
)
BUSY: Final = replace(
    IDLE,
    batches=1200,
    bytes=1200 * (38 << 20),
    hits=1180,
    misses={"a tensor that only torch can send": 20},
    wait_s_per_batch=0.00042,
    wait_share=0.031,
    transfer_gbps=52.6,
    slots=24,
    slots_made=24,
    slot_bytes=40 << 20,
    slots_on_loan=3,
    pinned_bytes=24 * (40 << 20),
    nodes=(1,),
    share_on_node=1.0,
    placement="planned by numapin run: GPU 3 is on node 1",
    notes=("libstores.so cannot be loaded, so large batches use a third more memory bandwidth; see: numapin doctor",),
)


def test_text() -> None:
    """Each fact has a line with its unit, and long ones are wrapped at 80 columns."""
    assert (
        str(BUSY)
        == """\
batches     1,200, 38.0 MiB each
in slots    1,180; 20: a tensor that only torch can send
waiting     420 us per batch, 3% of the loop's time
to the GPU  52.6 GB/s
slots       24 of up to 40.0 MiB, 3 in use, 960.0 MiB pinned
node        1 (planned by numapin run: GPU 3 is on node 1); 100.0% of the pages
            there
note        libstores.so cannot be loaded, so large batches use a third more
            memory bandwidth; see: numapin doctor"""
    )


def test_text_after_an_epoch_that_was_left() -> None:
    """Batches that arrived and were not yielded count as hits, and their bytes as theirs."""
    left = replace(IDLE, batches=10, bytes=14 << 20, hits=14)
    assert str(left).splitlines()[:2] == ["batches     10, 1.0 MiB each", "in slots    14, not all of them yielded"]


def test_text_of_an_idle_loader() -> None:
    """Lines that have nothing to report are left out."""
    assert str(IDLE) == "batches     0\nnode        the machine has one NUMA node, 0"


def test_dict() -> None:
    """The dict has all attributes and survives JSON."""
    told = BUSY.as_dict()
    assert told.keys() == set(Stats.__slots__)
    assert json.loads(json.dumps(told)) == told
    assert (told["nodes"], told["misses"]) == ([1], {"a tensor that only torch can send": 20})
