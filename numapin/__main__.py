"""Run the program as `python -m numapin`. Edge. Comes in and goes out: as in `numapin.cli.entry`.

`python -m` looks for modules in the working directory first, before this package could prevent it. In a folder that
others can write to, use the program `numapin`, which does not look there, or `python -P -m numapin`.
"""

from numapin.cli.entry import main

if __name__ == "__main__":
    main()
