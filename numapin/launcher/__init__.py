"""Stage 3: the parts of `launch.py`.

Comes in: a `Plan` and torchrun's command line. Goes out: running ranks.

::

    torchrun.py      EDGE  torchrun's command line, with our options added
    torchrun_options.py  PURE  a table of torchrun's options, for help and completion without torch
    run_places.py    EDGE  the directories that can hold them
    run_folder.py    EDGE  make and find the folders of runs
    named_run.py     EDGE  find one by a name that people type
    sweep.py         EDGE  remove the folders of runs that have ended
    stdin_script.py  EDGE  a script on stdin
    rehearse.py      EDGE  try every binding before a rank starts
    rendezvous.py    EDGE  the rendezvous of launchers and ranks, closed to other users
    rendezvous_id.py PURE  whether others can know a rendezvous id
    agent.py         EDGE  torch's elastic agent, with signals, checks before starts, and one grace period
    init.py          EDGE  process 1 of a container
    leftovers.py     EDGE  processes that ranks started and that outlive them
    lost_gpus.py     PURE  GPUs of the plan that the machine no longer shows
    preload.py       EDGE  hook into unmodified scripts through their environment
    sitehook/              the sitecustomize.py that Python then imports
"""
