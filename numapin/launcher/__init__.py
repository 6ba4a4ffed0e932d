"""Stage 3: the parts of `launch.py`.

Comes in: a `Plan` and torchrun's command line. Goes out: running ranks.

::

    direct_options.py PURE  command lines that need neither torch's parser nor its agent
    direct.py        EDGE  the direct way: start the ranks of one host without torch
    store.py         PURE  the ranks' store, as torch's clients use it
    store_server.py  EDGE  the server of the ranks' store
    installed_torch.py EDGE whether the installed torch's clients can be served
    listening.py     EDGE  the port of the ranks' store
    failure.py       PURE  the account of ranks that failed, and what probably ended the first
    first_failure.py PURE  the order in which ranks failed
    account.py       EDGE  facts about failed ranks
    command.py       EDGE  the program that each rank becomes
    processes.py     EDGE  the processes of ranks: start them, see how they ended, end them
    variables.py     PURE  the variables that torchrun sets for ranks
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
    exit_barrier.py  EDGE  where hosts that succeeded wait for the others
    init.py          EDGE  process 1 of a container
    agent_errors.py  EDGE  its errors as ours, without its report
    leftovers.py     EDGE  processes that ranks started and that outlive them
    lost_gpus.py     PURE  GPUs of the plan that the machine no longer shows
    preload.py       EDGE  hook into unmodified scripts through their environment
    sitehook/              the sitecustomize.py that Python then imports
"""
