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
    torch_names.py EDGE  the private names of torch that all this is built on, and whether this torch has them
    stateful.py    EDGE  the same path for torchdata's StatefulDataLoader
    loop_times.py  EDGE  a loader's waiting times, published for `numapin top`
    casting.py     PURE  narrow the tensors of batches
    containers.py  PURE  rebuild nested containers
    arguments.py   PURE  check shapes and numbers that a user gave
    forks.py       PURE  Python versions whose forked children can hang
    forking.py     EDGE  keep forked children from destroying CUDA objects that they inherited
    message.py     PURE  what travels between a worker and the rank, and how a batch is rebuilt from it
    queues.py      EDGE  torch's two queues, over pipes without locks
    worker.py      EDGE  what a worker runs first: bind it, collate into slots, end it with its rank
    packing.py     EDGE  in a worker: put batches into slots
    resume/              the place in an epoch, for state_dict()
    slots/               memory for batches: made, lent, taken back
    opening/             turn a parcel into a batch, on the host or on the device
"""
