"""What became of PyTorch's own Dynamo tests over tripwire: judges a run, and writes the page.

    python benchmarks/peers/judge.py TRIPWIRE.json PLAIN.json [--markdown PATH] [--json PATH]

Both files are run.py's. A note is an assertion that failed, with its line; one that plain code
fails on the same line, with the same words, says nothing of tripwire. What is left is judged by
what the line asks for: Dynamo's internals (counts of frames, graphs, guards, its own errors), or
results. A test that asks for results and gets others is *wrong*; one that raises is *crashed*.
Tests that are left so have a reason in reasons.json; without one, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REASONS = HERE / "reasons.json"

Test = dict[str, Any]  # one row of run.py: outcome, notes, compiled
Results = dict[str, dict[str, Test]]

CLASSES = {
    "passed": "every assertion holds, in the call that traces and in the hit after it",
    "internals": "only assertions about Dynamo itself fail: counts, graphs, guards, its own errors",
    "refused": "the test asks for fullgraph=True, and tripwire would run it as plain Python",
    "wrong": "a result or an effect differs from plain Python's",
    "crashed": "tripwire raises where plain Python doesn't",
    "back end": "the back end fails on tripwire's graph",
    "its own": "the back end fails for a reason that lies in the test: see below",
    "too slow": "it took too long, or ended the process",
}
NOT_COUNTED = ("skip", "absent", "setup-error", "import-error")

_INTERNAL = re.compile(
    r"frame_count|op_count|counters|\.graphs|guard|_count\b|recompil|assertLogs|records|"
    r"print_readable|normalize_gm|graph|explain|Unsupported|gb_type|cache_entr|compiles|_dynamo|"
    r"is_compiling|OptimizedModule|EXPECTTEST|num_ops|cnt|log_|InternalTorchDynamoError|"
    r"TorchRuntimeError|UserError|backend_calls|compile_|wrap_node"
)
_VARYING = re.compile(r"0x[0-9a-f]+|\d{9,}|tripwire\S*|line \d+")


@dataclass(frozen=True)
class Reasons:
    """Verdicts on tests by hand, and why they stand."""

    left: dict[str, str]  # wrong, crashed or failing in the back end, and why that stays
    own: dict[str, str]  # the back end fails for a reason of the test's
    internals: dict[str, str]  # what a line asks for is Dynamo's, though no word in it says so

    @staticmethod
    def load(path: Path = REASONS) -> Reasons:
        return Reasons(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Verdict:
    """What became of one test."""

    file: str
    name: str
    kind: str  # one of CLASSES
    notes: tuple[str, ...] = ()
    slugs: tuple[str, ...] = ()  # of what was refused, where fullgraph=True was asked for


def judge(ours: Results, plain: Results, reasons: Reasons) -> Iterator[Verdict]:
    """A verdict on each test that ran and compiled something."""
    for file, tests in ours.items():
        for name, test in tests.items():
            other = plain.get(file, {}).get(name, {"notes": [], "outcome": "none"})
            verdict = _judge(file, name, test, other, reasons)
            if verdict is not None:
                yield verdict


def _judge(file: str, name: str, test: Test, plain: Test, reasons: Reasons) -> Verdict | None:
    outcome = test["outcome"]
    if outcome in NOT_COUNTED:
        return None
    if outcome in ("killed", "timeout", "worker-died"):
        return None if plain["outcome"] == outcome else Verdict(file, name, "too slow")
    if not test.get("compiles"):
        return None
    new = list(_find_new(test["notes"], plain["notes"]))
    slugs = {slug for d in test["compiled"] if d["full"] for slug in d["refused"]}
    slugs |= {note["slug"] for note in new if _is_refusal(note)}
    new = [note for note in new if not _is_refusal(note)]
    hard = [note for note in new if not _is_internal(note)]
    kind = _name_class(name, test, hard, bool(slugs), reasons)
    return Verdict(file, name, kind, _spell(hard), tuple(sorted(slugs)))


def _name_class(
    name: str, test: Test, hard: list[dict[str, Any]], refused: bool, reasons: Reasons
) -> str:
    if name in reasons.own:
        return "its own"
    if any((note.get("type") or "").endswith("BackendFailed") for note in hard):
        return "back end"
    if hard and name in reasons.internals:
        return "internals"
    if hard:
        raised = any("/tripwire/" in (note.get("tb") or [""])[-1] for note in hard)
        return "crashed" if raised or any(note["k"] == "exc" for note in hard) else "wrong"
    if refused:
        return "refused"
    return "internals" if test["notes"] else "passed"


def _find_new(notes: list[dict[str, Any]], plain: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Notes that plain code doesn't have, or has in other words."""
    for note in notes:
        same = [other for other in plain if other["line"] == note["line"]]
        if not same:
            yield note
        elif _is_internal(note) or any(_words(o) == _words(note) for o in same):
            continue
        else:
            yield note


def _words(note: dict[str, Any]) -> str:
    return _VARYING.sub("", note["msg"].partition("To execute this test")[0]).strip()


def _is_internal(note: dict[str, Any]) -> bool:
    if (note.get("type") or "").endswith("BackendFailed"):
        return False
    return bool(_INTERNAL.search(note["text"] or "") or _INTERNAL.search(note["msg"][:60]))


def _is_refusal(note: dict[str, Any]) -> bool:
    return bool(note.get("slug")) and (note.get("type") or "").endswith("CannotTrace")


def _spell(notes: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(f"line {n['line']}: {(n['msg'] or '').splitlines()[:1]}" for n in notes)


# --- the page ------------------------------------------------------------------------------------


def summarize(verdicts: Iterable[Verdict], versions: dict[str, str]) -> dict[str, Any]:
    """Counts by file and by refusal, and the tests that are left; what is kept as JSON."""
    counts: dict[str, Counter[str]] = {}
    slugs: Counter[str] = Counter()
    left = []
    for verdict in verdicts:
        counts.setdefault(verdict.file, Counter())[verdict.kind] += 1
        if verdict.kind == "refused":
            slugs.update(verdict.slugs)
        if verdict.kind in ("wrong", "crashed", "back end", "too slow"):
            left.append({"test": verdict.name, "file": verdict.file, "is": verdict.kind})
    return {
        "versions": versions,
        "files": {file: dict(sorted(count.items())) for file, count in sorted(counts.items())},
        "refused": dict(sorted(slugs.items(), key=lambda pair: (-pair[1], pair[0]))),
        "left": sorted(left, key=lambda row: (list(CLASSES).index(row["is"]), row["test"])),
    }


def render(summary: dict[str, Any], reasons: Reasons) -> str:
    """The page."""
    files: dict[str, dict[str, int]] = summary["files"]
    total = sum((Counter(count) for count in files.values()), Counter())
    left = _tabulate(
        ("test", "is", "because"),
        ((row["test"], row["is"], reasons.left.get(row["test"], "?")) for row in summary["left"]),
    )
    by_class = _tabulate(
        ("", "tests", "means"), ((kind, total[kind], CLASSES[kind]) for kind in CLASSES)
    )
    shown = [kind for kind in CLASSES if total[kind]]
    by_file = _tabulate(
        ("file", *shown),
        ((file, *(count.get(kind, "") for kind in shown)) for file, count in files.items()),
    )
    written = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    head = _HEAD.format(tests=total.total(), files=len(files), versions=written)
    listed = left if summary["left"] else "None."
    slugs: dict[str, int] = summary["refused"]
    by_slug = _tabulate(("reason", "tests"), ((f"`{s}`", count) for s, count in slugs.items()))
    by_hand = _tabulate(
        ("test", "is", "because"),
        (
            *((name, "its own", why) for name, why in reasons.own.items()),
            *((name, "internals", why) for name, why in reasons.internals.items()),
        ),
    )
    return (
        f"{head}\n{by_class}\n\n## Left\n\n{listed}\n\n{_REFUSED}\n{by_slug}\n\n"
        f"{_HOW}\n{by_file}\n\n"
        f"## Judged by hand\n\n{by_hand}\n"
    )


def _tabulate(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


_HEAD = """# PyTorch's own Dynamo tests

PyTorch's tests, run with tripwire in torch.compile's place and judged by their own assertions:
{tests} tests of {files} files of `test/dynamo` that compile something.
`benchmarks/peers/judge.py` writes this page. {versions}.
"""
_REFUSED = """## Refused

Why tests are refused; some for more than one reason. [messages.md](messages.md) explains each.
"""
_HOW = """## How

PyTorch's tests aren't part of this repository. Take `test/dynamo` of its branch release/2.13
(commit 78e737ad), name the folder in `DYNAMO_TESTS`, and run each side; a file takes ten seconds to
two minutes:

    export DYNAMO_TESTS=…/test/dynamo
    python benchmarks/peers/run.py plain    plain.json    test_misc test_repros …
    python benchmarks/peers/run.py tripwire tripwire.json test_misc test_repros …
    python benchmarks/peers/judge.py tripwire.json plain.json \\
        --markdown docs/peer-tests.md --json benchmarks/results/peer-tests.json

`torch.compile` and its like are replaced by `tripwire.compile`, Inductor by the plain graph. Each
compiled call is made twice: first on copies of its arguments, after which the random generators are
restored, so that the call whose result the test looks at is a hit. Every assertion is soft: one
that fails is noted with its line, and the test goes on. The plain side does the same with plain
calls. So a failure that only the second call causes shows on both sides, and isn't counted.

## Files
"""


def main() -> int:
    """Judge, tell what has no reason, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("plain", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reasons = Reasons.load()
    sides = [json.loads(path.read_text()) for path in (options.ours, options.plain)]
    verdicts = list(judge(*sides, reasons))
    summary = summarize(verdicts, _find_versions())
    unexplained = [v for v in verdicts if v.kind in _WANT_REASONS and v.name not in reasons.left]
    for verdict in unexplained:
        print(f"{verdict.kind}: {verdict.file} {verdict.name}", *verdict.notes, sep="\n    ")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(render(summary, reasons))
    print(dict(Counter(verdict.kind for verdict in verdicts)))
    return bool(unexplained)


_WANT_REASONS = ("wrong", "crashed", "back end", "too slow")


def _find_versions() -> dict[str, str]:
    import torch

    return {
        "Written": date.today().isoformat(),
        "Python": sys.version.partition(" ")[0],
        "torch": str(torch.__version__),
    }


if __name__ == "__main__":
    sys.exit(main())
