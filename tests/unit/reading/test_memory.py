"""Memory: views share a number, a number never goes to a second storage, inputs are one."""

import torch

from tripwire.reading.tensors import OUTSIDE, MemoryTable


def number_in(table: MemoryTable, tensor: torch.Tensor) -> int:
    (number,) = table.add_results(tensor, may_be_outside=False)
    return number


def test_views_have_the_number_of_their_base() -> None:
    table, base = MemoryTable(), torch.zeros(4)
    number = number_in(table, base)
    views = (base[1:], base.view(2, 2), base.detach(), base.data, base.view(torch.int32))
    assert table.add_results(views, may_be_outside=True) == (number,)
    assert number_in(table, base.clone()) not in (number, OUTSIDE)


def test_inputs_are_one_memory_and_so_are_their_views() -> None:
    table, first, second = MemoryTable(), torch.zeros(4), torch.zeros(4)
    table.add_outside(first)
    table.add_outside(second)
    assert number_in(table, first[1:]) == number_in(table, second) == OUTSIDE


def test_the_number_of_a_dead_storage_is_not_given_again() -> None:
    table = MemoryTable()
    numbers = [number_in(table, torch.zeros(4)) for _ in range(100)]
    assert len(set(numbers)) == 100


def test_a_table_keeps_no_tensors_memory_alive() -> None:
    table, tensor = MemoryTable(), torch.zeros(4)
    number_in(table, tensor)
    ref = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert ref.expired()


def test_what_may_come_from_elsewhere_is_outside() -> None:
    table = MemoryTable()
    assert table.add_results(torch.zeros(4), may_be_outside=True) == (OUTSIDE,)


def test_nothing_is_told_apart_once_a_tensor_hides_its_memory() -> None:
    table, before = MemoryTable(), torch.zeros(4)
    number = number_in(table, before)
    sparse = torch.eye(2).to_sparse()
    assert number_in(table, sparse) == OUTSIDE
    assert number_in(table, sparse._values()) == OUTSIDE
    assert table.find(before) == number
