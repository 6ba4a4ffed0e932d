"""Stage 5: a DataLoader whose workers write into memory that the rank has pinned near its GPU.

Comes in: the arguments of torch's DataLoader. Goes out: batches.

::

    loader.py      EDGE  numapin.DataLoader: torch's arguments, and our own
    buffer.py      EDGE  numapin.batch_buffer: memory for a dataset to write its batch into
    install.py     EDGE  the same path for torch's own DataLoader, in unmodified scripts
    iterator.py    EDGE  torch's multi-process iterator over our queues
    local.py       EDGE  torch's iterator without workers
    balance.py     EDGE  choose the worker for each task
    starting.py    EDGE  start the workers, and restart those whose fork hung
    path.py        EDGE  the state that a loader keeps for its whole life
    home.py        EDGE  one loader's device, nodes and CPUs, and its threads bound to them
    locality.py    EDGE  find the nodes and CPUs for a rank's memory and threads
    notices.py     EDGE  report what could not be done as requested
    budget.py      EDGE  the amount of memory that a rank may pin
    stats.py       PURE  counts of a loader's work
    usage.py       PURE  which loaders took this path, and why others did not
    usage_log.py   EDGE  a process's record of that, for the launcher
    stateful.py    EDGE  the same path for torchdata's StatefulDataLoader
    loop_times.py  EDGE  a loader's waiting times, published for `numapin top`
    casting.py     PURE  narrow the tensors of batches
    containers.py  PURE  rebuild nested containers
    arguments.py   PURE  check shapes and numbers that a user gave
    forks.py       PURE  Python versions whose forked children can hang
    resume/              the place in an epoch, for state_dict()
    worker/              in a worker: bind it, put batches into slots
    slots/               memory for batches: made, lent, taken back
    wire/                transport between a worker and the rank
    opening/             turn a parcel into a batch, on the host or on the device
"""
