"""Insides: what an object is and holds, found without running any of its code.

Only `type(x)` and the descriptors that Python itself put into classes are used. Properties,
`__getattr__`, `__class__`, `__eq__` and `__hash__` of users never run: `isinstance` and `in`
would call them.
"""

from __future__ import annotations

import types

from tripwire.values.classes import class_dict, flags_of, mro, name_of, size_of

_item_size = type.__dict__["__itemsize__"].__get__
_dict_offset = type.__dict__["__dictoffset__"].__get__
_weak_offset = type.__dict__["__weakrefoffset__"].__get__
_POINTER = object.__basicsize__ // 2


def is_kind(cls: type, base: type) -> bool:
    """Whether a class is another or inherits from it, whatever their metaclasses say."""
    return any(k is base for k in mro(cls))


def is_heap_type(cls: type) -> bool:
    """Whether a class was made while Python ran: by a `class` statement, for one."""
    return bool(flags_of(cls) & 1 << 9)


def class_name(cls: type) -> str:
    """Module and qualified name, for reports."""
    module = class_dict(cls).get("__module__")
    name = name_of(cls)
    return f"{module}.{name}" if type(module) is str and module != "builtins" else name


def _is_python_class(cls: type) -> bool:
    """Whether a `class` statement made it, with slots: C types have members too."""
    return "__slots__" in class_dict(cls)


def slot_count(cls: type) -> int:
    """How many slots instances have."""
    return sum(
        type(member) is types.MemberDescriptorType
        for k in mro(cls)
        if _is_python_class(k)
        for member in class_dict(k).values()
    )


def has_hidden_state(cls: type, base: type) -> bool:
    """Whether instances hold more than their dict, their slots and what `base` holds.

    C types keep state in their own struct: the size of an instance tells.
    """
    size = size_of(base) + _POINTER * slot_count(cls)
    # -1 is a dict that lies before the object
    size += _POINTER * (_dict_offset(cls) not in (0, -1) and _dict_offset(base) == 0)
    size += _POINTER * (_weak_offset(cls) > 0 and _weak_offset(base) == 0)
    return bool(size_of(cls) > size or _item_size(cls) != _item_size(base))
