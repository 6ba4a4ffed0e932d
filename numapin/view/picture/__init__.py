"""A machine as a picture: an SVG file or an HTML page.

::

    boxes.py    boxes with text, in rows and frames
    drawing.py  the common facts of all parts
    layout.py   the machine as boxes
    nodes.py    packages and nodes
    cores.py    cores and L3 groups
    devices.py  GPUs and NICs
    legend.py   the legend
    matrix.py   node distances and device links
    text.py     text of a known width
    style.py    colors, light and dark
    svg.py      boxes -> SVG
    tables.py   the same facts as HTML tables
    page.py     the HTML page
"""
