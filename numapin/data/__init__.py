"""Stage 5: a DataLoader whose workers write into memory that the rank has pinned near its GPU.

::

    loader.py       numapin.DataLoader: torch's arguments, and our own
    stateful_loader.py  numapin.StatefulDataLoader: torchdata's loader, with our arguments
    buffer.py       numapin.batch_buffer: memory for a dataset to write its batch into; numapin.pack_bytes
    install.py      the same path for torch's own DataLoader, in unmodified scripts
    iterator.py     torch's iterators: with workers, over our queues; without, with batches put on a device
    balance.py      choose the worker for each task
    path.py         the state that a loader keeps for its whole life
    locality.py     find the nodes and CPUs for a rank's memory and threads
    budget.py       the amount of memory that a rank may pin
    stats.py        counts of a loader's work, and reports of what it could not do as requested
    usage.py        which loaders took this path, and why others did not: a process's record, and the job's line
    torch_names.py  the private names of torch that all this is built on, and whether this torch has them
    stateful.py     the same path for torchdata's StatefulDataLoader
    casting.py      change the tensors in nested containers, and narrow those of batches
    forking.py      start the workers, safely with CUDA, and restart those whose fork hung
    message.py      what travels between a worker and the rank, and how a batch is rebuilt from it
    queues.py       torch's two queues, over pipes without locks
    worker.py       what a worker runs first: bind it, collate into slots, end it with its rank
    packing.py      in a worker: put batches into slots
    pool.py         in the rank: a loader's slots, lent and taken back
    slots.py        one slot in the rank, and the sizes of slots
    handover.py     the ways of slots' descriptors
    pinning.py      pin slots, and take in memory that is to be unpinned or reused, on threads of the process
    quarantine.py   hold memory back while a GPU may read it
    opening.py      turn a parcel into a batch, on the host or on the device
    transform.py    call the user's device_transform, on a GPU one batch ahead
"""
