"""Transport between a worker and the rank.

Comes in: batches and tasks. Goes out: the same at the other end.

::

    message.py      PURE  the format of a message: a head, and the pickle of a batch
    tensors.py      PURE  tensors as out-of-band buffers of the pickle
    grant.py        PURE  the slot that a worker gets with each task
    parcel.py       PURE  a batch that has arrived and is not opened yet
    channel.py      EDGE  messages without locks over one pipe
    queues.py       EDGE  torch's two queues over channels
    descriptors.py  EDGE  file descriptors for processes that are being started
"""
