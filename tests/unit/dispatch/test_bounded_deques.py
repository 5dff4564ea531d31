"""Deques with a `maxlen`: what a full one holds moves with each append."""

from __future__ import annotations

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

APPENDS = {
    "tensors": "ring.append(x)",
    "tensors made in the run": "ring.append(x * 2)",
    "on the left": "ring.appendleft(x + 1)",
    "two at once": "ring.extend([x, x + 1])",
    "numbers": "ring.append(1.0)",
    "numbers out of tensors": "ring.append(x.sum().item())",
    "texts": "ring.append('a')",
    "tuples": "ring.append((x, 1.0))",
    "dicts": "ring.append({'loss': float(x[0])})",
}
PROGRAM = """
ring = collections.deque({start}, maxlen={limit})

def call(x):
    {append}
    return x.sin()

def go(f, see):
    for i in range(12):
        if i == 7:
            ring.append({outside})
        see(f(T(i)), list(ring))
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("kind", APPENDS)
def test_append_moves_what_is_there(kind, limit, backend, tmp_path) -> None:
    outside = {"texts": "'b'", "numbers": "5.0", "numbers out of tensors": "5.0"}.get(kind, "T(9)")
    text = PROGRAM.format(start="[]", limit=limit, append=APPENDS[kind], outside=outside)
    check_twins(text, backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_that_the_run_moved_are_read(backend, tmp_path) -> None:
    append = "ring.append(1.0)"
    text = PROGRAM.format(start="[0.0, 1.0]", limit=2, append=append, outside="5.0")
    in_thread = text.replace(
        "see(f(T(i)), list(ring))",
        "found = []\n"
        "        import threading\n"
        "        thread = threading.Thread(target=lambda: found.append(f(T(i))))\n"
        "        thread.start(); thread.join()\n"
        "        see(found, list(ring))",
    )
    assert in_thread != text
    check_twins(text, backend, tmp_path)
    check_twins(in_thread, backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_trace_fills_a_history_and_keeps_it_full(backend, tmp_path) -> None:
    text = PROGRAM.format(start="[]", limit=3, append="ring.append(x * 2)", outside="T(9)")
    check_twins(text, backend, tmp_path, hits=9)
