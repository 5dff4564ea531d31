"""What holds for every test: a graph runs as it is, and nothing is kept on disk, unless asked."""

from __future__ import annotations

import atexit
import os
import tempfile

os.environ["TRIPWIRE_BACKEND"] = "eager"
os.environ["TRIPWIRE_CACHE_DIR"] = ""
_home = tempfile.TemporaryDirectory(prefix="tripwire-tests-")
atexit.register(_home.cleanup)
os.environ["XDG_CONFIG_HOME"] = _home.name  # the key of the user's compiled code
