"""Errors go to other processes: they can be pickled and copied, whatever they carry."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tripwire
from tripwire import errors

tell = print  # under another name a compiled call doesn't print it: it is refused


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.TripwireError)
]


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_error_comes_back_as_it_was(kind, again) -> None:
    error = kind("what happened", slug="a-slug")
    error.note = ["kept"]
    back = again(error)
    assert type(back) is kind
    assert str(back) == str(error) == "what happened [a-slug]"
    assert back.slug == "a-slug"
    assert back.note == ["kept"]


def test_the_error_of_a_back_end_is_pickled_without_its_graph() -> None:
    def broken(graph, examples):
        raise RuntimeError("broken")

    with pytest.raises(errors.BackendFailed) as caught:
        tripwire.compile(lambda x: x + 1, backend=broken)(torch.ones(2))
    back = pickle.loads(pickle.dumps(caught.value))
    assert str(back) == str(caught.value)
    assert back.slug == "backend-failed"


def test_a_refusal_is_pickled_with_its_place() -> None:
    def f(x):
        tell("here")
        return x + 1

    with pytest.raises(tripwire.CannotTrace) as caught:
        tripwire.compile(f, backend="eager", fullgraph=True)(torch.ones(2))
    back = pickle.loads(pickle.dumps(caught.value))
    assert back.place == caught.value.place
    assert str(back) == str(caught.value)


def give_nothing():
    pass


def test_a_refusal_raised_ends_with_its_slug_behind_the_sentence_or_below_the_line() -> None:
    with pytest.raises(tripwire.CannotTrace, match=r"Return the [^\n]*\. \[returns-nothing\]$"):
        tripwire.trace(give_nothing)

    def loud(x):
        tell("here")
        return x * 2

    compiled = tripwire.compile(loud, backend="eager", fullgraph=True)
    with pytest.raises(tripwire.CannotTrace, match=r'\n    tell\("here"\)\n \[prints\]$'):
        compiled(torch.ones(2))


def test_what_torch_compile_raises_as_a_runtime_error_is_one() -> None:
    from torch._dynamo import exc

    pairs = {exc.Unsupported: errors.CannotTrace, exc.BackendCompilerFailed: errors.BackendFailed}
    for theirs, ours in pairs.items():
        assert issubclass(theirs, RuntimeError)
        assert issubclass(ours, RuntimeError)
