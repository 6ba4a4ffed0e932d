"""Basics that know neither the machine nor torch.

Comes in: plain values. Goes out: plain values, files and lines on stderr.

::

    cpu_set.py    PURE  sets of CPUs and nodes, as Linux writes them: "0-3,8"
    sizes.py      PURE  memory sizes as people write them: "38.5M"
    printable.py  PURE  text from elsewhere, made safe to show
    fields.py     PURE  typed reading of decoded JSON, with the path of the element in every error
    stderr.py     EDGE  one line on stderr
    files.py      EDGE  files written whole or not at all
"""
