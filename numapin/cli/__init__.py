"""The command line: one file per command, which parses, makes one call, renders the result and exits.

Comes in: arguments and the environment, which are read here and passed on. Goes out: text or JSON on stdout,
diagnostics on stderr, an exit status.

::

    entry.py         EDGE  the entry point; handles a plain `exec` itself
    main.py          EDGE  the group of commands; errors and exit statuses
    options.py       EDGE  options that several commands share
    output.py        EDGE  all writing to stdout and stderr
    mistakes.py      EDGE  messages about wrong command lines: suggestions and usage
    torchrun_command.py  EDGE  help and completion of the commands that take torchrun's options
    complete.py      EDGE  candidates for completing a command line
    run_names.py     EDGE  names of runs, for completion
    browser.py       EDGE  open a picture in the browser
    torch_import.py  EDGE  import torch with Ctrl-C deferred
    run.py           EDGE  numapin run
    run_decisions.py PURE  the reasons that run --verbose prints
    run_hooks.py     EDGE  hooks in the ranks' programs
    run_failure.py   EDGE  the account at the end of a failed job
    run_reports.py   EDGE  reports during and after a run
    topo.py          EDGE  numapin topo
    plan.py          EDGE  numapin plan
    exec.py          EDGE  numapin exec
    attach.py        EDGE  numapin attach
    verify.py        EDGE  numapin verify
    top.py           EDGE  numapin top
    trace.py         EDGE  numapin trace
    trace_reading.py EDGE  trace files and folders
    trace_watch.py   EDGE  report, or end the job, as soon as the steps are recorded
    trace_writing.py EDGE  the report and its folder
    compare.py       EDGE  numapin compare
    compare_runs.py  EDGE  the runs of compare, and where their report goes
    bench.py         EDGE  numapin bench
    bench_run.py     EDGE  options, progress and reports of all benchmarks
    early_end.py     EDGE  Ctrl-C during a measurement keeps what was measured
    doctor.py        EDGE  numapin doctor
    job.py           EDGE  numapin job
    completion.py    EDGE  numapin completion; shells/ has the scripts
"""
