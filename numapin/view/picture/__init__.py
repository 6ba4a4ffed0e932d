"""A machine as a picture: an SVG file or an HTML page. Pure.

Comes in: a `Topology`, and optionally a `Plan`. Goes out: the text of a file.

::

    boxes.py    PURE  boxes with text, in rows and frames
    drawing.py  PURE  the common facts of all parts
    layout.py   PURE  the machine as boxes
    nodes.py    PURE  packages and nodes
    cores.py    PURE  cores and L3 groups
    devices.py  PURE  GPUs and NICs
    legend.py   PURE  the legend
    matrix.py   PURE  node distances and device links
    text.py     PURE  text of a known width
    style.py    PURE  colors, light and dark
    svg.py      PURE  boxes -> SVG
    tables.py   PURE  the same facts as HTML tables
    page.py     PURE  the HTML page
"""
