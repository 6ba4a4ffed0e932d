"""Stage 3: what `numapin/launch.py`, the life of a job, is made of.

::

    options.py          torchrun's options: one table, and the parser made of it
    command.py          the program that each rank becomes
    stdin_script.py     a script on stdin
    rehearse.py         try every binding before a rank starts
    ranks.py            the processes of ranks: start them, see how they ended, end them
    guardian.py         the process that ends what ranks started if the launcher is killed
    hosts.py            the rendezvous of several hosts, closed to other users
    rendezvous_id.py    whether others can know a rendezvous id
    logs.py             the ranks' output in files
    store.py            the ranks' store, as torch's clients use it
    store_server.py     the server of the ranks' store
    installed_torch.py  whether the installed torch's clients can be served
    failure.py          the account of ranks that failed, and what probably ended the first
    survivors.py        where the other ranks of a failed job are before they are ended
    run_folder.py       make and find the folders of runs, and remove those of ended runs
    init.py             process 1 of a container
    lost_gpus.py        GPUs of the plan that the machine no longer shows
    preload.py          hook into unmodified scripts through their environment
"""
