from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from plait.core_ir.errors import UsageError
from plait.core_ir.mesh import Layout, Mesh, part_of, part_type, whole_type
from plait.core_ir.types import type_of

AXES = {"data": 2, "stage": 2, "expert": 2}
MESH = Mesh(AXES, data_axes=("data", "expert"), named_axes=("expert",))


def test_ranks_stand_in_row_major_order() -> None:
    numbers = np.arange(8).reshape(2, 2, 2)
    for rank, place in enumerate(MESH.places()):
        assert numbers[tuple(place.values())] == rank == MESH.rank(place)
        assert MESH.place(rank) == place


def test_groups() -> None:
    assert MESH.groups(("stage",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert MESH.groups(("expert",)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert MESH.groups(("data", "expert")) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert MESH.groups(()) == tuple((rank,) for rank in range(8))


def test_the_last_axes_stay_inside_a_node() -> None:
    mesh = Mesh({"stage": 2, "data": 2, "tensor": 4})
    assert mesh.axes_between_nodes(16) == ()
    assert mesh.axes_between_nodes(8) == ("stage",)
    assert mesh.axes_between_nodes(4) == ("stage", "data")
    assert mesh.axes_between_nodes(2) == ("stage", "data", "tensor")
    assert Mesh({"tensor": 2, "stage": 2}).axes_between_nodes(2) == ("tensor",)


def test_parts_of_a_microbatch_and_gradients_to_sum() -> None:
    assert [MESH.part(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert MESH.num_parts == 4
    assert MESH.summed_axes("w", ()) == ("data", "expert")
    assert MESH.summed_axes("w", (("expert",),)) == ("data",)
    mesh = replace(MESH, data_axes=("data",), partial_grads={"w": ("expert",)})
    assert mesh.summed_axes("w", ()) == ("data", "expert")
    assert mesh.summed_axes("v", ()) == ("data",)


@pytest.mark.parametrize(
    "layout",
    [(), (("a",),), ((), ("b",)), (("b", "a"),), (("a", "b"), ()), (("b",), ("a",))],
    ids=str,
)
def test_parts_are_those_of_jax(layout: Layout) -> None:
    axes = {"a": 2, "b": 4}
    mesh = Mesh(axes, stage_axis="none")
    array = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    spec = PartitionSpec(*(dim or None for dim in layout))
    sharding = NamedSharding(jax.sharding.Mesh(devices, ("a", "b")), spec)
    index = sharding.devices_indices_map(array.shape)
    for rank, place in enumerate(mesh.places()):
        part = part_of(array, layout, axes, place)
        np.testing.assert_array_equal(part, array[index[jax.devices()[rank]]])
        assert part_type(type_of(array), layout, axes) == type_of(part)
        assert whole_type(type_of(part), layout, axes) == type_of(array)


def test_what_does_not_divide() -> None:
    with pytest.raises(UsageError, match=r"dim 1 of f32\[4, 6\] is cut over b.*6 by 4"):
        part_type(type_of(np.zeros((4, 6), np.float32)), ((), ("b",)), {"b": 4})
    with pytest.raises(UsageError, match=r"f32\[\] has no dim 0"):
        part_type(type_of(np.zeros((), np.float32)), (("b",),), {"b": 4})
