"""What travels between a worker and the rank.

Comes in: batches and tasks. Goes out: the same at the other end.

::

    parcel.py   PURE  a batch: its pickle, and where its tensors lie
    channel.py  EDGE  messages without locks over one pipe
    queues.py   EDGE  torch's two queues over channels
    spill.py    EDGE  memory for a batch that has no slot
"""
