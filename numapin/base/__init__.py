"""Basics that know neither the machine nor torch.

Comes in: plain values. Goes out: plain values, files and lines on stderr.

::

    cpu_set.py    PURE  CpuSet, a set of CPUs or nodes, as Linux writes it: "0-3,8"
    plural.py     PURE  "2 ranks", "ranks 0-3,7"
    not_none.py   PURE  leave out None, which stands for an unknown value
    bounds.py     PURE  the largest numbers that are accepted
    gpu_uuid.py   PURE  UUIDs of GPUs, as CUDA compares them
    sizes.py      PURE  memory sizes as text: "38.5M"
    printable.py  PURE  replace invisible characters in untrusted text
    suggest.py    PURE  the known word that a mistyped one resembles
    encodable.py  PURE  stand-ins for characters that an encoding lacks
    quoting.py    PURE  words quoted for a shell, harmless on a terminal
    redact.py     PURE  hide the values of arguments that look like secrets
    strict_json.py  PURE  read and write JSON without NaN
    records.py    PURE  read dataclasses from JSON, with the path of the element in every error, and write them
    stats.py      PURE  Student's t distribution, which the standard library lacks
    stderr.py     EDGE  one line on stderr
    folders.py    EDGE  open folders by descriptor where other users may write
    regular_file.py  EDGE  read an untrusted file: regular files only, of bounded size, without blocking
    files.py      EDGE  write files whole or not at all
"""
