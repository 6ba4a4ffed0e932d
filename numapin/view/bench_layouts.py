"""The columns and legend of each benchmark."""

from __future__ import annotations

from typing import Final

from numapin.view.bench_table import Column, Layout

LOADER: Final = Layout(
    legend="median [lowest, highest]",
    columns=(
        Column(figure="batches_per_s", heading="batches/s", form=",.1f", spread=True),
        Column(figure="gbps", heading="GB/s", form=".2f"),
        Column(figure="share_of_peak", heading="of peak", form=".0%"),
        Column(
            figure="share_of_samples",
            heading="of samples",
            form=".0%",
            meaning="share of the rate of processes that only make samples",
        ),
        Column(figure="ratio", heading="x torch", form=".2f", spread=True),
        Column(figure="main_cpu_ms", heading="CPU ms", form=".3f", meaning="of the loop's thread per batch"),
        Column(figure="first_batch_s", heading="first s", form=".2f", meaning="time to the first batch"),
        Column(figure="hits", heading="hits", form=",.0f"),
        Column(figure="misses", heading="misses", form=",.0f"),
        Column(figure="pinned_mb", heading="pinned MB", form=",.0f"),
    ),
)

TRANSFER: Final = Layout(
    legend="median ± largest deviation",
    columns=(
        Column(figure="gbps", heading="GB/s", spread=True),
        Column(figure="us", heading="us", spread=True, meaning="time of a single copy"),
        Column(
            figure="host_us",
            heading="host us",
            spread=True,
            meaning="time for which a copy blocks the host",
        ),
    ),
)

ALLOC: Final = Layout(
    legend="median ± largest deviation, in us of one thread",
    columns=(
        Column(figure="alloc_us", heading="allocate", spread=True),
        Column(figure="touch_us", heading="first write"),
        Column(figure="again_us", heading="second write"),
        Column(figure="copy_us", heading="copy to GPU"),
        Column(figure="filled_ratio", heading="x pageable", meaning="allocation plus first write"),
    ),
)

OVERLAP: Final = Layout(
    legend="median [lowest, highest]",
    columns=(
        Column(figure="steps_per_s", heading="steps/s", form=",.1f", spread=True),
        Column(figure="ratio", heading="x pageable", form=".2f", spread=True),
        Column(figure="copy_ms", heading="copy ms", form=".2f"),
        Column(figure="host_ms", heading="host ms", form=".2f", meaning="blocked by a copy"),
        Column(figure="compute_ms", heading="compute ms", form=".2f"),
        Column(figure="hidden_share", heading="hidden", form=".0%", meaning="copies during compute"),
        Column(figure="busy_share", heading="busy", form=".0%", meaning="GPU computing"),
    ),
)
