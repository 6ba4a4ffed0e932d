"""The in-rank data path: a DataLoader whose workers write into memory that the rank has locked near its GPU.

Comes in: the arguments of torch's DataLoader. Goes out: batches::

    loader      numapin.DataLoader: torch's arguments and four of ours
    install     the same path for torch's own DataLoader, in scripts that stay as they are
    iterator    torch's multi-process iterator over our queues
    starting    starts its workers, and again those whose fork hung
    path        what a loader has for its whole life: locality, rings, counts
    worker      what is installed in a worker
    packing     a batch into a slot, in the worker
    parcel      what travels: the pickle and where the tensors lie
    opening     a parcel into a batch, in the rank: over the slot, or over copies
    transfer    the same on the GPU: one copy a batch, ahead of time
    ring        slots, made as batches need them and lent to the loop
    memory      their memory: placed, touched, locked, checked
    slots       the control page that rank and workers share
    spill       memory of its own for a batch without a slot
    quarantine  when a slot that nobody refers to may be written again
    capture     keeps our events out of CUDA-graph captures
    channel     messages without locks
    queues      torch's two queues over channels
    locality    where a rank's memory and helpers belong
    reclaim     the end of memory handed out by numapin.pinned
    stats       what a loader has done
"""
