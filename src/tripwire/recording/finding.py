"""Finding: what a process that checks a record runs. Replays it and prints how it ended."""

from __future__ import annotations

import sys

from tripwire.errors import TripwireError
from tripwire.recording.checking import Finding
from tripwire.recording.rerun import find_outcome
from tripwire.recording.texts import encode_json


def find(path: str) -> Finding:
    """Replay a record that this user's own process wrote a moment ago."""
    try:
        outcome = find_outcome(path)
    except TripwireError as error:  # it can't even be built
        return Finding(None, str(error))
    torch = sys.modules.get("torch")
    return Finding(outcome, "", "" if torch is None else str(torch.__version__))


if __name__ == "__main__":
    # What the replay prints comes before; the last line is the finding.
    finding = find(sys.argv[1])
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + encode_json(finding))
