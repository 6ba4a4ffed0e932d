"""Stage 3: what `launch.py` is made of.

Comes in: a `Plan` and torchrun's command line. Goes out: running ranks.

::

    torchrun.py     EDGE  torchrun's command line, with our options added
    run_folder.py   EDGE  the folders of runs: made, found again, swept
    rehearse.py     EDGE  try every binding before a rank starts
    rendezvous.py   EDGE  where launchers and ranks meet, closed to others
    agent.py        EDGE  torch's elastic agent, with what it lacks
    lost_gpus.py    PURE  GPUs of the plan that the machine no longer shows
    preload.py      EDGE  get into unmodified scripts through their environment
    sitehook/             the sitecustomize.py that Python then imports
"""
