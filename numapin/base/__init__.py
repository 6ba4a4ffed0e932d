"""Basics that know neither the machine nor torch.

::

    cpu_set.py         CpuSet, a set of CPUs or nodes, as Linux writes it: "0-3,8"
    plural.py          "2 ranks", "ranks 0-3,7"
    not_none.py        leave out None, which stands for an unknown value
    bounds.py          the largest numbers that are accepted
    gpu_uuid.py        UUIDs of GPUs, as CUDA compares them
    formats.py         memory sizes, words for a shell, similar words, stand-ins for characters
    printable.py       replace invisible characters in untrusted text
    redact.py          hide the values of arguments that look like secrets
    strict_json.py     read and write JSON without NaN
    records.py         read dataclasses from JSON, with the path of the element in every error, and write them
    stderr.py          one line on stderr
    files.py           files and folders that other users may have prepared; write files whole or not at all
"""
