"""The state of a loader: the place in an epoch, written by `state_dict()` and continued by `load_state_dict()`.

::

    place.py         a place in an epoch, written as a dict and read from one
    randomness.py    read and set random number generators
    samplers.py      the samplers inside a sampler, with their epochs, states and generators
    kinds.py         describe torch's samplers, so that a state of other samplers is noticed
    checksum.py      a checksum of indices, to notice that a sampler draws others the second time
    order.py         follow an epoch through its sampler, and continue in the middle of one
    dataset.py       read the state of a dataset, and continue in it
    streams.py       count each worker's batches, and keep what its dataset reported
    worker_state.py  report a dataset's state from its worker, and restore it
    track.py         one iterator's place, from the batches that it yields
    resumption.py    write and load the state of a loader
"""
