"""The program as `python -m numapin`.

`python -m` searches the working directory for modules first, and this package cannot prevent that. In a folder that
others can write to, use the program `numapin`, which does not search there, or `python -P -m numapin`.
"""

from numapin.cli.entry import main

if __name__ == "__main__":
    main()
