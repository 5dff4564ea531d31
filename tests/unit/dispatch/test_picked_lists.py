"""`history[name].append(x)`: what a list holds that only grows is nothing to compiled code.

Which list it is counts all the same, and so does what it holds where the code looks at it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

GROWS = {
    "a dict": ("HISTORY = {'a': [], 'b': []}", "HISTORY[name].append(x.shape[0])"),
    "a defaultdict": (
        "HISTORY = collections.defaultdict(list)",
        "HISTORY[name].append(x.sum().item())",
    ),
    "a computed name": (
        "HISTORY = collections.defaultdict(list)",
        "HISTORY['train_' + name].extend([1, 2])",
    ),
    "many names": (
        "HISTORY = collections.defaultdict(list)",
        "for key, value in (('loss', 1), ('top', 2)): HISTORY[key].append(value)",
    ),
    "sets": ("HISTORY = {'a': set(), 'b': set()}", "HISTORY[name].add(x.shape[0])"),
    "an attribute": (
        "class Log: pass\nLOG = Log()\nLOG.rows = HISTORY = {'a': [], 'b': []}",
        "LOG.rows[name].append(0)",
    ),
}
LOOKS = {
    "its length": "return x * len(HISTORY['a'])",
    "its length, by a computed name": "return x * len(HISTORY[name])",
    "its last element": "return x * HISTORY[name][-1]",
    "all of them": "return x * sum(map(sum, HISTORY.values()))",
    "itself": "rows = HISTORY[name]\n    return x * (rows[0] + len(rows))",
    "as another name": "return x * len(SAME)",
}
CHANGES = {
    "another list": "HISTORY['a'] = [9]",
    "another list of the same content": "HISTORY['a'] = list(HISTORY['a'])",
    "both exchanged": "HISTORY['a'], HISTORY['b'] = HISTORY['b'], HISTORY['a']",
    "one list for both": "HISTORY['a'] = HISTORY['b']",
    "cleared": "HISTORY['a'].clear()",
    "another dict": "HISTORY = {'a': [7], 'b': []}",
    "another class": "HISTORY['b'] = Twice(HISTORY['b'])",
    "gone": "HISTORY.pop('a', None) if i == 6 else HISTORY.setdefault('a', [])",
}

PROGRAM = """
class Twice(list):
    def append(self, value): super().append(2 * value)
{state}
def call(x, name):
    {grows}
    {end}
def go(f, see):
    global HISTORY
    for i in range(12):
        if i in (4, 6, 7):
            {change}
        try:
            see(f(T(i), "ab"[i % 2]), HISTORY)
        except KeyError as error:
            see(str(error))
"""


def play(folder: Path, backend: str, state: str, grows: str, end: str, change: str, hits: int):
    source = PROGRAM.format(state=state, grows=grows, end=end, change=change)
    return check_twins(source, backend, folder, hits=hits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", GROWS)
def test_a_list_that_grows_behind_a_computed_name_retires_nothing(case, backend, tmp_path) -> None:
    play(tmp_path, backend, *GROWS[case], "return x * 2", "None", 8)


@pytest.mark.parametrize("case", LOOKS)
def test_what_it_holds_counts_where_the_code_looks(case, tmp_path) -> None:
    state = "HISTORY = {'a': [1], 'b': [2]}\nSAME = HISTORY['a']"
    play(tmp_path, "eager", state, "HISTORY[name].append(3)", LOOKS[case], "None", 0)


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_appended_goes_to_the_list_that_is_there(case, tmp_path) -> None:
    state = "HISTORY = {'a': [1], 'b': [2]}"
    grows = "HISTORY[name].append(x.shape[0])"
    play(tmp_path, "eager", state, grows, "return x * 2", CHANGES[case], 2)


def test_what_a_custom_function_appends_is_no_other_codes_to_read(tmp_path: Path) -> None:
    state = """
HISTORY = {'a': [1], 'b': [2]}
class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        HISTORY[name].append(1)
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None
"""
    end = "return y * len(HISTORY['a'])"
    play(tmp_path, "aot_eager", state, "y = Noted.apply(x, name)", end, "None", 0)
