"""Start the hook beside this file, and import the sitecustomize that this file hides.

Python imports only the first `sitecustomize` on its path. So this one removes its folder from the path and imports the
name again. Errors of that module, or ModuleNotFoundError if there is none, reach `site` as they would without us.

Every Python below the command runs this, and Python 2.7 must be able to read it. One that is too old for the hook
starts as it would without it.
"""

import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
_start = None
if sys.version_info >= (3, 8):
    _start = __import__("numapin_children_hook").start
    del sys.modules["numapin_children_hook"]
sys.path[:] = [entry for entry in sys.path if entry != _folder]
if _start is not None:
    _start()
_self = sys.modules.pop(__name__)  # Python 2 clears a module to which nothing refers
__import__(__name__)
