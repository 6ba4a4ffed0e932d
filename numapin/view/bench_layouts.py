"""The columns, legend and plots of each benchmark. Pure.

Comes in: nothing. Goes out: one `Layout` per benchmark.
"""

from __future__ import annotations

from typing import Final

from numapin.bench.offload_verdict import offload_lines
from numapin.view.bench_table import Column, Layout
from numapin.view.train_limits import train_limits

_RATE: Final = Column(figure="batches_per_s", heading="batches/s", form=",.1f", spread=True, axis="batches per second")
LOADER: Final = Layout(
    legend="median [lowest, highest]; of samples: share of the rate of processes that only make samples; "
    "CPU ms: of the loop's thread per batch; first s: time to the first batch",
    columns=(
        _RATE,
        Column(figure="gbps", heading="GB/s", form=".2f"),
        Column(figure="share_of_peak", heading="of peak", form=".0%"),
        Column(figure="share_of_samples", heading="of samples", form=".0%"),
        Column(figure="ratio", heading="x torch", form=".2f", spread=True),
        Column(figure="main_cpu_ms", heading="CPU ms", form=".3f"),
        Column(figure="first_batch_s", heading="first s", form=".2f"),
        Column(figure="hits", heading="hits", form=",.0f"),
        Column(figure="misses", heading="misses", form=",.0f"),
        Column(figure="pinned_mb", heading="pinned MB", form=",.0f"),
    ),
    plotted=(_RATE,),
)

_TRANSFER: Final = (
    Column(figure="gbps", heading="GB/s", spread=True, axis="bandwidth in GB/s"),
    Column(figure="us", heading="us", spread=True, axis="time of one copy in us"),
    Column(figure="host_us", heading="host us", spread=True, axis="host blocked by a copy, in us"),
)
TRANSFER: Final = Layout(
    legend="median ± largest deviation; us: time of a single copy; host us: time for which it blocks the host",
    columns=_TRANSFER,
    plotted=_TRANSFER,
)

_ALLOC: Final = (
    Column(figure="alloc_us", heading="allocate", spread=True, axis="allocation in us"),
    Column(figure="touch_us", heading="first write", axis="first write in us"),
    Column(figure="again_us", heading="second write", axis="second write in us"),
    Column(figure="copy_us", heading="copy to GPU", axis="copy to the GPU in us"),
)
ALLOC: Final = Layout(
    legend="median ± largest deviation, in us of one thread; x pageable: allocation plus first write",
    columns=(*_ALLOC, Column(figure="filled_ratio", heading="x pageable")),
    plotted=_ALLOC,
)

_STEPS: Final = Column(figure="steps_per_s", heading="steps/s", form=",.1f", spread=True, axis="steps per second")
_GAIN: Final = Column(figure="ratio", heading="x pageable", form=".2f", spread=True, axis="times as fast as pageable")
_HIDDEN: Final = Column(figure="hidden_share", heading="hidden", form=".0%", axis="share of copy time hidden")
OVERLAP: Final = Layout(
    legend="median [lowest, highest]; host ms: blocked by a copy; hidden: copies during compute; busy: GPU computing",
    columns=(
        _STEPS,
        _GAIN,
        Column(figure="copy_ms", heading="copy ms", form=".2f"),
        Column(figure="host_ms", heading="host ms", form=".2f"),
        Column(figure="compute_ms", heading="compute ms", form=".2f"),
        _HIDDEN,
        Column(figure="busy_share", heading="busy", form=".0%"),
    ),
    plotted=(_STEPS, _GAIN, _HIDDEN),
)

_TOTAL: Final = Column(figure="total_s", heading="total s", form=".2f", spread=True, axis="whole run in s")
_LAST: Final = Column(figure="last_s", heading="last s", form=".2f", spread=True, axis="until the last rank ran, in s")
LAUNCH: Final = Layout(
    legend="median [lowest, highest]; total s: whole run; last s: until each rank printed a line; MB: peak memory",
    columns=(
        _TOTAL,
        Column(figure="ratio", heading="x torchrun", form=".2f"),
        _LAST,
        Column(figure="last_ratio", heading="x torchrun", form=".2f", spread=True),
        Column(figure="rss_mb", heading="MB", form=",.0f"),
    ),
    plotted=(_TOTAL, _LAST),
    peers={
        "torchrun": "torchrun, as installed",
        "torchrun-numa": "torchrun --numa-binding=node",
        "numapin": "numapin run --launcher direct",
        "numapin-agent": "numapin run --launcher agent, which uses torch's agent",
    },
)

_ADDED: Final = Column(figure="added_ms", heading="added ms", form=".1f", spread=True, axis="added time in ms")
_LEAST: Final = Column(figure="least_ms", heading="min ms", form=".1f", spread=True, axis="least added time in ms")
EXEC: Final = Layout(
    legend="median [lowest, highest]; added: median of the paired differences; min: difference of the fastest runs",
    columns=(
        Column(figure="plain_ms", heading="plain ms", form=".1f"),
        Column(figure="total_ms", heading="total ms", form=".1f"),
        _ADDED,
        _LEAST,
        Column(figure="cpu_ms", heading="CPU ms", form=".1f"),
    ),
    plotted=(_ADDED, _LEAST),
    peers={
        "python": "a Python that execs the command",
        "numapin-plan": "numapin exec --plan FILE",
        "numapin": "numapin exec, which reads the machine",
    },
)

_SAMPLES: Final = Column(figure="samples_per_s", heading="samples/s", form=",.0f", axis="samples per second")
_SPEEDUP: Final = Column(figure="ratio", heading="x torch", form=".2f", spread=True, axis="speed relative to torch")
_OF_CEILING: Final = Column(figure="of_ceiling", heading="of ceiling", form=".0%", axis="share of the ceiling")
TRAIN: Final = Layout(
    legend="median [lowest, highest]; of ceiling: share of the speed with all data already on the GPU; "
    "wait: share of the time in next(); CPU s: of ranks and workers per 1,000 samples; "
    "GB: their memory, each page counted once (PSS)",
    columns=(
        _SAMPLES,
        _SPEEDUP,
        _OF_CEILING,
        Column(figure="wait_share", heading="wait", form=".0%"),
        Column(figure="cpu_s_per_1000", heading="CPU s", form=".3g"),
        Column(figure="pss_gb", heading="GB", form=",.1f"),
    ),
    plotted=(_SAMPLES, _SPEEDUP, _OF_CEILING),
    remarks=train_limits,
)

_STEP: Final = Column(figure="step_ms", heading="step ms", form=".1f", spread=True)
_BATCHES: Final = Column(figure="loader_per_s", heading="batches/s", form=",.0f", spread=True)
OFFLOAD: Final = Layout(
    legend="median [lowest, highest] over starts; step ms: mean of a window on the slowest rank; batches/s: busy "
    "loaders of all ranks; threads: torch's per rank; x: speed relative to torchrun, and to torchrun-threads",
    columns=(
        _STEP,
        Column(figure="ratio", heading="x torchrun", form=".2f", spread=True),
        Column(figure="ratio_threads", heading="x -threads", form=".2f", spread=True),
        _BATCHES,
        Column(figure="threads", heading="threads", form=".0f"),
    ),
    plotted=(_STEP, _BATCHES),
    remarks=lambda report: offload_lines(report.cases),
)
