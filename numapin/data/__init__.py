"""Stage 5: a DataLoader whose workers write into memory that the rank has locked near its GPU.

Comes in: the arguments of torch's DataLoader. Goes out: batches.

::

    loader.py      EDGE  numapin.DataLoader: torch's arguments and four of ours
    install.py     EDGE  the same path for torch's own DataLoader, in unmodified scripts
    iterator.py    EDGE  torch's multi-process iterator over our queues
    starting.py    EDGE  start the workers, and start again those whose fork hung
    path.py        EDGE  what a loader keeps for its whole life
    locality.py    EDGE  where a rank's memory and helpers belong
    budget.py      EDGE  how much memory a rank may pin
    stats.py       PURE  what a loader has done
    loop_times.py  EDGE  a loader's waiting times, published for `numapin top`
    containers.py  PURE  rebuild nested containers
    forks.py       PURE  Python versions whose forked children can hang
    worker/              in a worker: bind it, put batches into slots
    slots/               memory for batches: made, lent, taken back
    wire/                between a worker and the rank
    opening/             a parcel becomes a batch, on the host or on the device
"""
