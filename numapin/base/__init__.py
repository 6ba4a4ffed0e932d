"""Basics that know neither the machine nor torch.

::

    cpu_set.py         CpuSet, a set of CPUs or nodes, as Linux writes it: "0-3,8"
    text.py            counts, lists, visible characters, UUIDs of GPUs, known values
    bounds.py          the largest numbers that are accepted
    formats.py         memory sizes, words for a shell, Python commands, similar words, stand-ins for characters
    redact.py          hide the values of arguments that look like secrets
    stats.py           which of two things is faster, from runs in turn, and how certain that is
    strict_json.py     read and write JSON without NaN
    records.py         read dataclasses from JSON, with the path of the element in every error, and write them
    stderr.py          one line on stderr
    files.py           files and folders that other users may have prepared; write files whole or not at all
"""
