"""The command line: one file per command, whose body is parse -> one call -> render -> exit.

Comes in: arguments and the environment, read here and passed on. Goes out: text for people or JSON on stdout,
diagnostics on stderr, an exit status.

::

    entry.py         EDGE  where the program starts; a plain `exec` goes no further
    main.py          EDGE  the group of commands, and errors
    options.py       EDGE  options that several commands share
    output.py        EDGE  where text goes
    torch_import.py  EDGE  import torch with Ctrl-C deferred
    run.py           EDGE  numapin run
    topo.py          EDGE  numapin topo
    plan.py          EDGE  numapin plan
    exec.py          EDGE  numapin exec
    verify.py        EDGE  numapin verify
    top.py           EDGE  numapin top
    trace.py         EDGE  numapin trace
    bench.py         EDGE  numapin bench
    bench_run.py     EDGE  what the benchmarks' commands share
    doctor.py        EDGE  numapin doctor
    job.py           EDGE  numapin job
"""
