"""A machine as a picture: SVG, or a page around it. Pure.

Comes in: a `Topology`, and a `Plan` or none. Goes out: text of a file. `layout` makes boxes with measured text, `svg`
draws them, `page` adds what a picture cannot say to everybody: tables, details, a theme of the reader's choice.
"""
