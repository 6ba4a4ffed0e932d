"""Run command lines in one process, as `numapin` would, in the locale and encoding that the environment sets.

Each line on stdin is a JSON list of words. The file that argv[1] names gets the words, the exit status, and the error
if the command failed with a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.integration.seam import main


def status_of(words: list[str]) -> tuple[object, str]:
    sys.argv[1:] = [os.fsdecode(word.encode()) for word in words]  # as Python decodes arguments in this locale
    try:
        main()
    except SystemExit as exiting:
        return exiting.code, ""
    except Exception as error:  # noqa: BLE001 - what the tests look for
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


if __name__ == "__main__":
    results = Path(sys.argv[1])
    lines = sys.stdin.buffer.read().decode().splitlines()
    with results.open("w", encoding="utf-8") as file:
        for line in lines:
            status, error = status_of(json.loads(line))
            file.write(json.dumps([json.loads(line), status, error]) + "\n")
