"""Tables, trees, charts and pictures for people. Pure.

Comes in: topologies, plans, reports. Goes out: rich renderables, and the text of files.

::

    topo_tree.py      PURE  the machine as a tree
    topo_matrix.py    PURE  links between GPUs and NICs, and node distances
    plan_table.py     PURE  the ranks of a plan
    failure_block.py  PURE  the account of a failed job
    verify_table.py   PURE  ranks compared with their plan
    attach_table.py   PURE  processes that were bound while they ran
    top_table.py      PURE  a running job
    openmetrics.py    PURE  a running job for a monitoring system
    doctor_table.py   PURE  findings about the machine
    trace_table.py    PURE  the time of a step by activity, and two traced runs by part
    compare_table.py  PURE  variants of a script, compared
    bench_table.py    PURE  the figures of a benchmark
    bench_layouts.py  PURE  the columns and legends of each benchmark
    sweep_table.py    PURE  the figures of a benchmark over a range of sizes
    machine.py        PURE  PCIe tree, GPU links, shared caches, empty nodes, and the places of ranks
    visible.py        PURE  visible characters only, for terminals
    words.py          PURE  facts and sizes as short texts
    picture.py        PURE  a machine as SVG
    page.py           PURE  the same as HTML, with tables
"""
