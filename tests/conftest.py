"""What holds for every test: a graph runs as it is, and nothing is kept on disk, unless asked."""

from __future__ import annotations

import os

os.environ["TRIPWIRE_BACKEND"] = "eager"
os.environ["TRIPWIRE_CACHE_DIR"] = ""
