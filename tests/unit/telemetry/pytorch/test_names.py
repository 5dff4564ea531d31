from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tripwire import telemetry
from tripwire.telemetry import pytorch

DOCUMENT = Path(__file__).parents[4] / "docs/coming-from-pytorch.md"


def mapped_names() -> list[str]:
    """What the table of measurement says that tripwire has."""
    text = DOCUMENT.read_text().partition("## Measurement")[2].partition("\n## ")[0]
    found = []
    for row in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)[2:]:
        theirs, ours, _ = map(str.strip, row.split("|"))
        spans = re.findall(r"`(\w+)[^`]*`", theirs if ours == "the same" else ours)
        found += [name for name in spans if not name.startswith("TRIPWIRE") and name[-1] != "_"]
    return found


@pytest.mark.parametrize("name", mapped_names())
def test_every_name_that_the_document_maps_is_exported_once(name):
    assert (name in telemetry.__all__) + (name in pytorch.__all__) == 1


def test_the_document_maps_most_names():
    assert {"timed", "count", "ChromiumEventLogger", "make_cell"} <= set(mapped_names())


def names_without_counterpart() -> list[str]:
    text = DOCUMENT.read_text().partition("without a counterpart")[2]
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[0])]


@pytest.mark.parametrize("name", names_without_counterpart())
def test_a_name_without_a_counterpart_is_one_of_the_installed_torch(name):
    from torch._dynamo import utils

    assert hasattr(utils, name)
    assert name not in pytorch.__all__


@pytest.mark.parametrize("module", ["replay_record", "mutation_guard"])
def test_every_name_of_the_small_origins_is_in_the_document(module):
    import importlib

    origin = importlib.import_module(f"torch._dynamo.{module}")
    own = [
        name
        for name, value in vars(origin).items()
        if name[0] != "_" and getattr(value, "__module__", "") == origin.__name__
    ]
    assert own
    text = DOCUMENT.read_text()
    for name in own:
        assert re.search(rf"`{name}\b", text), name


def test_every_field_of_pytorchs_metrics_is_one_of_ours_or_in_the_document():
    from torch._dynamo.utils import CompilationMetrics as Theirs

    ours = telemetry.CompilationMetrics
    text = DOCUMENT.read_text().partition("## Fields of CompilationMetrics")[2]
    text = text.partition("\n## ")[0]
    rows = [row.split("|") for row in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)[2:]]
    left, right = (
        {name for row in rows for name in re.findall(r"`(\w+)`", row[at])} for at in (0, 1)
    )
    theirs = {field.name for field in dataclasses.fields(Theirs)}
    assert left == {name for name in theirs if not hasattr(ours, name)}
    assert all(hasattr(ours, name) for name in right)


# Tools, files, environment variables, beginnings of names, and a class inside a function.
NO_NAMES = {"TORCH_TRACE", "TORCH_LOGS", "tlparse", "get_", "reset_", "error_recordings"}
NO_NAMES |= {"chromium_events.json", "TypeSafeSerializer"}


def names_of_pytorch() -> list[str]:
    """What the tables of the origins say that PyTorch has."""
    text = DOCUMENT.read_text().partition("## Mutation guarding")[2]
    text = text.partition("## Fields of CompilationMetrics")[0]
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    found = [name for row in rows for name in re.findall(r"`([\w.]+)", row.split("|")[0])]
    return [name for name in dict.fromkeys(found) if name not in NO_NAMES]


@pytest.mark.parametrize("name", names_of_pytorch())
def test_what_the_document_says_pytorch_has_is_there(name):
    import torch._dynamo.metrics_context
    import torch._logging
    from torch._dynamo import mutation_guard, replay_record, utils

    places = [utils, mutation_guard, replay_record, torch._dynamo, torch._dynamo.metrics_context]
    places += [replay_record.ExecutionRecord, replay_record.ExecutionRecorder, torch._logging]
    *owners, last = name.removeprefix("torch._dynamo.").removeprefix("torch._logging.").split(".")
    for owner in owners:
        places = [getattr(place, owner) for place in places if hasattr(place, owner)]
    assert any(hasattr(place, last) for place in places)
