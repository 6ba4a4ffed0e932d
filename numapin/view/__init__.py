"""Data as something to look at. Pure.

Comes in: topologies, plans, reports. Goes out: rich renderables and files of text.

::

    topo_tree.py      PURE  the machine as a tree
    topo_matrix.py    PURE  links between GPUs and NICs
    plan_table.py     PURE  the ranks of a plan
    verify_table.py   PURE  ranks against their plan
    top_table.py      PURE  a running job
    doctor_table.py   PURE  findings about the machine
    trace_table.py    PURE  where the time of each step went
    bench_table.py    PURE  figures of a benchmark
    bench_layouts.py  PURE  which figures stand where
    bench_plot.py     PURE  figures as charts
    sweep_table.py    PURE  figures over a range of sizes
    chart.py          PURE  charts as SVG
    marks.py          PURE  colours and signs of ranks
    visible.py        PURE  only visible characters reach a terminal
    words.py          PURE  numbers and sizes as words
    picture/                a machine as SVG or HTML
"""
