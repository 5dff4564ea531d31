"""Keys by identity, held weakly, never found by another object."""

import gc
import threading
import weakref

import pytest
import torch

from tripwire.writes.subscriptions import ExactWeakKeyDictionary


class Thing:
    pass


class Equal:
    """Equal to everything, and unhashable."""

    def __eq__(self, other):
        return True

    __hash__ = None


def test_an_object_at_a_dead_keys_address_finds_nothing() -> None:
    table = ExactWeakKeyDictionary()
    reused = 0
    for _ in range(1000):
        key = Thing()
        address = id(key)
        table[key] = "mine"
        del key
        other = Thing()
        reused += id(other) == address
        assert other not in table
        assert table.get(other) is None
        assert len(table) == 0
        del other
    assert reused  # or this test says nothing


def test_a_stale_entry_is_not_found_even_while_its_callback_has_not_run() -> None:
    table = ExactWeakKeyDictionary()
    first, second = Thing(), Thing()
    table[first] = 1
    table._entries[id(second)] = table._entries[id(first)]  # as if the address were reused
    assert second not in table
    with pytest.raises(KeyError):
        table[second]
    table[second] = 2
    assert table[second] == 2
    assert table[first] == 1


def test_equal_keys_are_different_keys() -> None:
    table = ExactWeakKeyDictionary()
    a, b = Equal(), Equal()
    table[a] = "a"
    assert b not in table
    table[b] = "b"
    assert (table[a], table[b], len(table)) == ("a", "b", 2)


def test_tensors_can_be_keys() -> None:
    table = ExactWeakKeyDictionary()
    x, y = torch.ones(2), torch.ones(2)
    table[x] = 1
    assert x in table
    assert y not in table


def test_an_entry_goes_with_its_key_and_lets_go_of_its_value() -> None:
    table = ExactWeakKeyDictionary()
    key, value = Thing(), Thing()
    gone = weakref.ref(value)
    table[key] = value
    del value
    assert gone() is not None
    del key
    assert len(table) == 0
    assert gone() is None


def test_a_key_that_dies_in_a_cycle_takes_its_entry_along() -> None:
    table = ExactWeakKeyDictionary()
    key = Thing()
    key.itself = key
    table[key] = 1
    del key
    gc.collect()
    assert len(table) == 0


def test_items_can_be_replaced_and_deleted() -> None:
    table = ExactWeakKeyDictionary()
    key = Thing()
    table[key] = 1
    table[key] = 2
    assert (table[key], len(table)) == (2, 1)
    del table[key]
    assert key not in table
    with pytest.raises(KeyError):
        del table[key]
    table[key] = None
    assert table.get(key, "default") is None
    table.clear()
    assert len(table) == 0
    assert table.get(key, "default") == "default"


@pytest.mark.parametrize("key", [[], {}, 1, "text", (), None, object()])
def test_a_key_without_weak_references_is_an_error_that_says_so(key) -> None:
    table = ExactWeakKeyDictionary()
    with pytest.raises(TypeError, match="weakly referenced"):
        table[key] = 1
    assert key not in table
    assert table.get(key) is None
    assert len(table) == 0


def test_a_dictionary_that_is_let_go_dies_without_the_collector() -> None:
    key = Thing()
    table = ExactWeakKeyDictionary()
    table[key] = 1
    gone = weakref.ref(table)
    gc.disable()
    try:
        del table
        assert gone() is None
    finally:
        gc.enable()


def test_a_value_may_hold_another_table_with_the_same_key() -> None:
    outer, inner = ExactWeakKeyDictionary(), ExactWeakKeyDictionary()
    key = Thing()
    outer[key] = inner
    inner[key] = outer
    del key
    assert len(outer) == len(inner) == 0


def test_threads_that_make_and_drop_keys_leave_nothing() -> None:
    table = ExactWeakKeyDictionary()
    wrong = []

    def work(number: int) -> None:
        for _ in range(2000):
            key = Thing()
            if key in table:
                wrong.append("found before it was set")
            table[key] = number
            if table[key] != number:
                wrong.append("another thread's value")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(table) == 0
