"""The state of a loader: the place in an epoch, written by `state_dict()` and continued by `load_state_dict()`.

Comes in: a loader's sampler and dataset, and the batches that were yielded. Goes out: a dict with the keys of
torchdata's StatefulDataLoader; after `load_state_dict()`, the rest of the epoch.

::

    place.py       PURE  a place in an epoch, written as a dict and read from one
    randomness.py  EDGE  read and set random number generators
    samplers.py    EDGE  the samplers inside a sampler, with their epochs, states and generators
    kinds.py       PURE  describe torch's samplers, so that a state of other samplers is noticed
    checksum.py    PURE  a checksum of indices, to notice that a sampler draws others the second time
    order.py       EDGE  follow an epoch through its sampler, and continue in the middle of one
    dataset.py     EDGE  read the state of a dataset, and continue in it
    streams.py     EDGE  count each worker's batches, and keep what its dataset reported
    worker_state.py EDGE  report a dataset's state from its worker, and restore it
    track.py       EDGE  one iterator's place, from the batches that it yields
    resumption.py  EDGE  write and load the state of a loader
"""
