"""Stage 3: what `numapin/launch.py`, the life of a job, is made of.

::

    options.py       PURE  torchrun's options: one table, and the parser made of it
    command.py       EDGE  the program that each rank becomes
    stdin_script.py  EDGE  a script on stdin
    rehearse.py      EDGE  try every binding before a rank starts
    ranks.py         EDGE  the processes of ranks: start them, see how they ended, end them
    guardian.py      EDGE  the process that ends what ranks started if the launcher is killed
    hosts.py         EDGE  the rendezvous of several hosts, closed to other users
    rendezvous_id.py PURE  whether others can know a rendezvous id
    logs.py          EDGE  the ranks' output in files
    store.py         PURE  the ranks' store, as torch's clients use it
    store_server.py  EDGE  the server of the ranks' store
    installed_torch.py EDGE whether the installed torch's clients can be served
    failure.py       PURE  the account of ranks that failed, and what probably ended the first
    survivors.py     EDGE  where the other ranks of a failed job are before they are ended
    run_places.py    EDGE  the directories that can hold the folders of runs
    run_folder.py    EDGE  make and find the folders of runs
    named_run.py     EDGE  find one by a name that people type
    sweep.py         EDGE  remove the folders of runs that have ended
    init.py          EDGE  process 1 of a container
    lost_gpus.py     PURE  GPUs of the plan that the machine no longer shows
    preload.py       EDGE  hook into unmodified scripts through their environment
"""
