"""A Topology or a Plan as something to look at. Pure.

Comes in: the data. Goes out: rich renderables, which the command line prints.
"""
