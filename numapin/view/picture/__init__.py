"""A machine as a picture: SVG, or a page around it. Pure.

Comes in: a `Topology`, and a `Plan` or none. Goes out: text of a file.

::

    boxes.py    PURE  boxes with text in them
    layout.py   PURE  the machine as boxes
    nodes.py    PURE  packages and nodes
    cores.py    PURE  cores and caches
    devices.py  PURE  GPUs and NICs
    legend.py   PURE  the legend
    matrix.py   PURE  links
    text.py     PURE  measured text
    style.py    PURE  colours, light and dark
    svg.py      PURE  boxes -> SVG
    tables.py   PURE  the facts as HTML tables
    page.py     PURE  the HTML page
"""
