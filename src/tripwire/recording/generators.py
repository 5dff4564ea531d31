"""Generators: NumPy's own, each by what it draws from and where that stands.

A bit generator shows its state and its seed as plain data. A Generator or RandomState draws from
one, which others may draw from, too. None of them can be made empty: each is built with what it
draws from, and told its state when that is complete.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tripwire.recording import nodes
from tripwire.recording.nodes import AnyNode
from tripwire.recording.policy import Omission
from tripwire.values.classes import isinstance

if TYPE_CHECKING:
    from tripwire.recording.encode import Encoder

_SOURCES = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_NAMES = ("SeedSequence", "Generator", "RandomState", *_SOURCES)


def is_generator(cls: type) -> bool:
    """Whether a class is one of NumPy's; not what inherits from it."""
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and any(cls is vars(numpy).get(name) for name in _NAMES)


def encode_generator(encoder: Encoder, value: Any, cls: type) -> AnyNode:
    """A generator as it stands now."""
    content = encoder.slot(_find_content(encoder, value, cls))
    return nodes.Object(encoder.reference(cls, ".__class__"), (), (), content=content)


def _find_content(encoder: Encoder, value: Any, cls: type) -> tuple[object, ...]:
    match cls.__name__:
        case "SeedSequence":
            entropy, key = _freeze(value.entropy), tuple(value.spawn_key)
            return entropy, key, value.pool_size, value.n_children_spawned
        case "Generator":
            return (value.bit_generator,)
        case "RandomState":
            state = value.get_state(legacy=False)
            return value._bit_generator, state["has_gauss"], state["gauss"]
    seed = value.seed_seq
    if seed is not None and not is_generator(type(seed)):
        encoder.left_out.append(Omission(encoder.path(), "its seed: it spawns other generators"))
        seed = None
    return seed, value.state


def _freeze(entropy: object) -> object:
    """What a seed is made of: numbers, in something that is complete once it is made."""
    return tuple(map(_freeze, entropy)) if isinstance(entropy, list | tuple) else entropy


def build_generator(cls: Any, content: Any) -> object:
    """A generator that draws from the right thing, wherever that stands."""
    if cls.__name__ == "SeedSequence":
        entropy, key, size, spawned = content
        return cls(entropy, spawn_key=key, pool_size=size, n_children_spawned=spawned)
    return cls(content[0])


def restore_generator(made: Any, content: Any) -> None:
    """Go on from the recorded state."""
    name = type(made).__name__
    if name in _SOURCES:
        made.state = content[1]
    elif name == "RandomState":
        kept = dict(zip(("has_gauss", "gauss"), content[1:], strict=True))
        made.set_state({**made.get_state(legacy=False), **kept})
