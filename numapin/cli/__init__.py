"""The command line: one file per command, whose body is parse -> one call -> render -> exit.

Comes in: arguments and the environment, read here and passed on. Goes out: text for people or JSON on stdout,
diagnostics on stderr, an exit status.
"""
