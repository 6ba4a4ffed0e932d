"""On a GPU: each benchmark runs, and its figures satisfy relations that must hold on any machine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.integration.gpu_loading import needs_gpu
from tests.integration.launching import numapin

pytestmark = needs_gpu

Figures = dict[str, dict[str, float]]


def bench(*arguments: str) -> dict[str, Figures]:
    """Run a benchmark and return the medians by case, peer and figure; fail if a case was skipped."""
    done = numapin("bench", *arguments, "--json")
    assert done.status == 0, done.err
    cases: list[dict[str, Any]] = json.loads(done.out)["cases"]
    reasons = [peer["skipped"] for case in cases for peer in case["peers"]] + [case["skipped"] for case in cases]
    assert set(reasons) == {None}
    return {
        case["name"]: {
            peer["name"]: {name: spread["median"] for name, spread in peer["figures"].items()} for peer in case["peers"]
        }
        for case in cases
    }


def test_transfer() -> None:
    """At 64 MiB page-locked memory copies faster than pageable memory, whose copy blocks the host for most of it."""
    found = bench("transfer", "--quick", "--repeats", "3", "--gpus", "one", "--sizes", "64M")
    (name,) = (name for name in found if name.startswith("h2d "))
    figures = found[name]
    for locked in ("pinned", "registered", "slot"):
        assert figures[locked]["gbps"] > 1.2 * figures["pageable"]["gbps"]
        assert figures[locked]["host_share"] < 0.3
        assert figures[locked]["gbps"] < 500  # no link to a host is faster: such a copy was not waited for
    assert figures["pageable"]["host_share"] > 0.5


def test_alloc() -> None:
    """At 16 MiB a new pinned block costs more than one from the pool, and pinned memory has no page faults left."""
    found = bench("alloc", "--quick", "--sizes", "16M")["alloc 16777216"]
    assert found["pinned-cold"]["alloc_us"] > 3 * found["pinned-pool"]["alloc_us"]
    assert found["registered"]["alloc_us"] > 3 * found["pinned-pool"]["alloc_us"]
    assert found["numapin"]["alloc_us"] > 3 * found["pinned-pool"]["alloc_us"]
    assert found["numapin"]["alloc_us"] > 3 * found["numapin-pool"]["alloc_us"]
    assert found["fresh"]["touch_us"] > 1.5 * found["fresh"]["again_us"]
    assert found["pinned-pool"]["touch_us"] < found["fresh"]["touch_us"]
    assert found["pin-pool"]["alloc_us"] > found["pinned-pool"]["alloc_us"]  # it copies


def test_overlap() -> None:
    """Copies are hidden behind compute only on a side stream; pinning gains most if copies dominate."""
    cases = ("transfer-bound", "compute-bound")
    found = bench("overlap", "--quick", "--seconds", "0.5", "--cases", ",".join(cases))
    assert found["compute-bound"]["side-stream"]["hidden_share"] > 0.5
    assert all(found[case][peer]["hidden_share"] < 0.05 for case in cases for peer in ("pageable", "pinned"))
    assert found["transfer-bound"]["pinned"]["ratio"] > 1.1
    assert 0.8 < found["compute-bound"]["pinned"]["ratio"] < found["transfer-bound"]["pinned"]["ratio"]
    assert found["transfer-bound"]["pinned"]["host_ms"] < found["transfer-bound"]["pageable"]["host_ms"]
    assert all(0 < peer["busy_share"] <= 1.02 for peers in found.values() for peer in peers.values())


def test_pinning_starts_cuda() -> None:
    """`.pin_memory()` creates a CUDA context in a process that has none."""
    code = (
        "import torch; from numapin.system.cuda import driver; torch.empty(1, pin_memory=True); "
        "print(torch.cuda.is_initialized(), driver().active_devices())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "(0,)"
