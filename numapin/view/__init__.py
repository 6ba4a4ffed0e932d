"""Tables, trees, charts and pictures for people.

::

    topo_tree.py      the machine as a tree
    topo_matrix.py    links between GPUs and NICs, and node distances
    plan_table.py     the ranks of a plan
    failure_block.py  the account of a failed job
    verify_table.py   ranks compared with their plan
    attach_table.py   processes that were bound while they ran
    top_table.py      a running job
    openmetrics.py    a running job for a monitoring system
    doctor_table.py   findings about the machine
    trace_table.py    the time of a step by activity, and two traced runs by part
    compare_table.py  variants of a script, compared
    bench_table.py    the figures of a benchmark
    machine.py        PCIe tree, GPU links, the places of ranks, and facts as short texts
    picture.py        a machine as SVG
    page.py           the same as HTML, with the plan as text
"""
