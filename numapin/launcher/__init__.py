"""Stage 3: what `numapin/launch.py`, the life of a job, is made of.

::

    options.py          torchrun's options: one table, and the parser made of it
    program.py          the program that each rank becomes
    rehearse.py         try every binding before a rank starts, look for lost GPUs before a restart
    ranks.py            the processes of ranks: start them, see how they ended, end them
    guardian.py         the process that ends what ranks started if the launcher is killed
    hosts.py            how the hosts of a job find each other; their rendezvous is closed to other users
    fixed_hosts.py      hosts that know each other: their roll call before ranks start, and news of failures later
    connection.py       a connection between two of their launchers
    logs.py             the ranks' output in files
    store.py            the ranks' store, as torch's clients use it
    store_server.py     its server, and whether the installed torch can be its client
    failure.py          the account of ranks that failed, and what probably ended the first
    survivors.py        where the other ranks of a failed job are before they are ended
    run_folder.py       make and find the folders of runs, and remove those of ended runs
    init.py             process 1 of a container, and others that wait for one child
"""
