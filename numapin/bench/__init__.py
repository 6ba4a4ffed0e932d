"""`numapin bench`: what is measured, how, and what comes out of it.

Comes in: which benchmark, with what options. Goes out: a report (schema numapin.bench/1). In the order of the flow::

    transfer.py      the cases of `bench transfer`, as data; no torch. transfer_case.py: one process of it
    alloc.py         the same for `bench alloc`, with alloc_case.py
    overlap.py       for `bench overlap`, with overlap_case.py
    launch.py        for `bench launch`, with launch_case.py
    buffers.py       host memory of every kind, on a node
    nearest.py       which node is nearest to each GPU, by what was measured; pure
    loader.py        the cases and peers of `bench loader`, as data; no torch
    harness.py       runs the peers in turn, in processes of their own or of the session's
    child.py         the other end: how a measuring process talks with the harness
    loader_case.py   one such process: warms a peer up and measures one window
    loader_data.py   the dataset in memory that all peers read
    loader_peers.py  the peers: numapin, torch, torchdata
    loader_spdl.py   SPDL as a peer
    loader_threads.py  threads that stack into pinned memory, by hand
    model.py         what was measured: medians, spreads, ratios, JSON; pure
    machine.py       what the figures depend on: host, versions, GPUs
"""
