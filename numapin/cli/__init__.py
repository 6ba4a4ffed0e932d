"""The command line: one file per command, which parses, makes one call, renders the result and exits.

::

    entry.py             the entry point; handles a plain `exec` itself
    main.py              the group of commands; errors and exit statuses
    options.py           options that several commands share
    output.py            all writing to stdout and stderr
    torchrun_command.py  help and completion of the commands that take torchrun's options
    torch_import.py      import torch with Ctrl-C deferred
    run.py               numapin run
    topo.py              numapin topo
    plan.py              numapin plan
    exec.py              numapin exec
    attach.py            numapin attach
    verify.py            numapin verify
    top.py               numapin top
    trace.py             numapin trace
    compare.py           numapin compare
    bench.py             numapin bench
    early_end.py         Ctrl-C during a measurement keeps what was measured
    doctor.py            numapin doctor
    job.py               numapin job
    completion.py        numapin completion; shells/ has the scripts
"""
