"""`python -m numapin`, the same program as `numapin`. Edge. Comes in and goes out: as in `numapin.cli.entry`."""

from numapin.cli.entry import main

if __name__ == "__main__":
    main()
