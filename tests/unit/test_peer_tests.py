"""The page on PyTorch's own tests says what the kept results say, and why each test is left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

from judge import CLASSES, Reasons, judge, render, summarize  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "peer-tests.json"
NO_REASONS = Reasons({}, {}, {})


def row(*notes, compiles=1, refused=False, outcome="ran"):
    compiled = [{"full": True, "refused": {"prints": 1} if refused else {}}]
    return {"outcome": outcome, "notes": list(notes), "compiles": compiles, "compiled": compiled}


def note(line=1, text="self.assertEqual(a, b)", msg="differs", **more):
    return {"k": "assertEqual", "line": line, "text": text, "msg": msg, **more}


RAISED = {"k": "exc", "type": "builtins.KeyError", "tb": ["/tripwire/dispatch/entry.py:1 run: x"]}
FAILED = {"k": "exc", "type": "tripwire.errors.BackendFailed", "tb": [""]}
FORBIDDEN = {"k": "exc", "type": "tripwire.errors.CannotTrace", "slug": "prints", "tb": [""]}
CASES = {
    "passed": (row(), row()),
    "refused": (row(refused=True), row()),
    "wrong": (row(note()), row()),
    "crashed": (row(note(**RAISED)), row()),
    "back end": (row(note(**FAILED)), row()),
    "internals": (row(note(text="self.assertEqual(cnt.frame_count, 1)")), row()),
    "too slow": (row(outcome="timeout"), row()),
}


def kind_of(ours, plain, reasons=NO_REASONS):
    found = [v.kind for v in judge({"f": {"T.t": ours}}, {"f": {"T.t": plain}}, reasons)]
    return found[0] if found else None


@pytest.mark.parametrize("kind", CASES)
def test_a_test_is_of_the_class_that_its_notes_show(kind) -> None:
    assert kind_of(*CASES[kind]) == kind


def test_what_plain_python_fails_in_the_same_words_counts_for_nothing() -> None:
    same = note(msg="0x7f12 is no number\n\nTo execute this test, run")
    assert kind_of(row(note(msg="0x7f34 is no number")), row(same)) == "internals"
    assert kind_of(row(note(msg="3 is no number")), row(note(msg="2 is no number"))) == "wrong"


def test_an_error_of_fullgraph_is_a_refusal() -> None:
    assert kind_of(row(note(**FORBIDDEN)), row()) == "refused"


def test_refused_tests_are_counted_by_reason() -> None:
    tests = {"T.a": row(refused=True), "T.b": row(note(**FORBIDDEN)), "T.c": row()}
    summary = summarize(judge({"f": tests}, {}, NO_REASONS), {})
    assert summary["refused"] == {"prints": 2}
    assert "| `prints` | 2 |" in render(summary, NO_REASONS)


def test_a_wrong_result_beside_a_refusal_is_wrong() -> None:
    assert kind_of(row(note(), refused=True), row()) == "wrong"


def test_tests_that_compile_nothing_or_are_skipped_are_not_counted() -> None:
    assert kind_of(row(compiles=0), row()) is None
    assert kind_of(row(outcome="skip"), row()) is None
    assert kind_of(row(outcome="timeout"), row(outcome="timeout")) is None


def test_verdicts_by_hand_hold_for_what_would_be_wrong() -> None:
    assert kind_of(row(note()), row(), Reasons({}, {}, {"T.t": "why"})) == "internals"
    assert kind_of(row(note(**FAILED)), row(), Reasons({}, {"T.t": "why"}, {})) == "its own"


def test_a_page_without_anything_left_says_so() -> None:
    verdicts = judge({"f": {"T.t": row()}}, {"f": {"T.t": row()}}, NO_REASONS)
    assert "## Left\n\nNone.\n" in render(summarize(verdicts, {}), NO_REASONS)


def test_the_page_is_what_the_kept_results_say() -> None:
    page = (ROOT / "docs" / "peer-tests.md").read_text()
    assert page == render(json.loads(RESULTS.read_text()), Reasons.load())


def test_every_test_that_is_left_has_a_reason_and_no_reason_is_left_over() -> None:
    left = {row["test"] for row in json.loads(RESULTS.read_text())["left"]}
    assert left == set(Reasons.load().left)
    assert set(CLASSES) >= set(CASES)
