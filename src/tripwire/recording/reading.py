"""Reading: entries of dicts and lists from their nodes, where the objects aren't filled yet."""

from __future__ import annotations

from collections.abc import Iterator

from tripwire.recording import nodes
from tripwire.recording.nodes import Slot


def read_dict(table: nodes.Table, slot: Slot) -> Iterator[tuple[str, Slot]]:
    """The entries of a dict with names for keys, from its node: it may not be filled yet."""
    node = table.nodes[slot[0]] if type(slot) is tuple else None
    if isinstance(node, nodes.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield read_text(table, key), value


def read_items(table: nodes.Table, slot: Slot) -> tuple[Slot, ...]:
    """The items of a list or tuple, from its node."""
    node = table.nodes[slot[0]] if type(slot) is tuple else None
    return node.items if isinstance(node, (nodes.List, nodes.Tuple)) else ()


def read_text(table: nodes.Table, slot: Slot) -> str:
    """A string, from its slot."""
    if isinstance(slot, str):
        return slot
    node = table.nodes[slot[0]] if type(slot) is tuple else None
    if isinstance(node, nodes.String):
        return node.text
    raise ValueError("a name isn't a string")


def find_hook_ids(table: nodes.Table) -> Iterator[int]:
    """The ids under which hooks of modules and optimizers are kept."""
    for node in table.nodes:
        match node:
            case nodes.Object():
                names = node.names
            case nodes.ModuleObject():
                form = table.nodes[node.form[0]]
                names = form.names if isinstance(form, nodes.ModuleForm) else ()
            case _:
                continue
        for name, slot in zip(names, node.values, strict=False):  # more values are in tables
            hooks = table.nodes[slot[0]] if type(slot) is tuple else None
            if name.endswith("_hooks") and isinstance(hooks, nodes.Dict):
                yield from (key for key in hooks.keys if type(key) is int)
