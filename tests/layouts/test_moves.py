"""Moves between layouts: each path brings every device what the target layout says, at the price that is the least.

`global_value` reads a value back from what the devices hold; a value that is partial over an axis is the sum (or the
maximum, ...) of what they hold along it. So a path is right if it leaves the global value as it was.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from autopar.cost_model.hardware import PRESETS, Cluster
from autopar.intra_op.choices.catalogue import network_of
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import KINDS, LayoutSpace, Move, MoveTable, all_layouts, moves_from, permutation, size_key
from autopar.layouts.perform import perform_move
from tests.even_links import even_links
from tests.layouts.values import assert_holds, device_mesh, held_by_devices


def space_of(shape, mesh_shape, monoids=("sum",), cluster=PRESETS["cpu"], kinds=KINDS):
    mesh = LogicalMesh.of(mesh_shape)
    network = network_of(cluster, mesh, PlannerOptions(kinds=frozenset(kinds)))
    return LayoutSpace(shape, 4, network, monoids)


def moved_together(space, pairs, value, path=None):
    """What the devices hold after each (source, target) path; one program for all pairs, to compile once.

    `path`: from a source and a target to moves, in place of the cheapest path.
    """
    mesh = space.network.mesh

    def run(*shards):
        results = []
        for (source, target), shard in zip(pairs, shards, strict=True):
            array = shard.reshape(shard.shape[len(mesh.shape) :])
            for move in (path or space.path)(source, target):
                array = perform_move(move, array, mesh)
            results.append(array.reshape((1,) * len(mesh.shape) + array.shape))
        return results

    spec = PartitionSpec(*mesh.axis_names)
    mapped = jax.shard_map(run, mesh=device_mesh(mesh.shape), in_specs=spec, out_specs=spec, check_vma=False)
    held = [jnp.asarray(held_by_devices(value, source, mesh)) for source, _ in pairs]
    return [np.asarray(x) for x in jax.jit(mapped)(*held)]


def pairs_of(space, sample=None):
    pairs = list(itertools.permutations(space.layouts, 2))
    if sample is None or len(pairs) <= sample:
        return pairs
    chosen = np.random.default_rng(0).choice(len(pairs), size=sample, replace=False)
    return [pairs[i] for i in sorted(chosen)]


CASES = [
    ((4,), (8, 12), ("sum",), None),
    ((2, 2), (8, 4), ("sum",), None),
    ((2, 2), (8,), ("max", "sum"), None),
    ((4,), (4, 8), ("max", "min"), None),
    ((2, 2, 2), (8, 16), ("sum",), 250),
    ((2, 4), (8, 16), ("min", "sum"), 150),
    ((3,), (6, 9), ("sum",), None),
    ((2, 3), (6, 12, 6), ("sum",), 100),
]


FEW = 60


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mesh_shape", "shape", "monoids", "sample"),
    [(*case, FEW) for *case, _ in CASES] + [pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_every_path_keeps_the_value(mesh_shape, shape, monoids, sample):
    space = space_of(shape, mesh_shape, monoids)
    value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    pairs = pairs_of(space, sample)
    for start in range(0, len(pairs), 100):
        chunk = pairs[start : start + 100]
        for (_, target), holds in zip(chunk, moved_together(space, chunk, value), strict=True):
            assert_holds(holds, value, target, space.network.mesh)


@pytest.mark.parametrize(("mesh_shape", "shape"), [((4,), (8, 12)), ((2, 2), (8, 4))])
def test_every_single_move_keeps_the_value(mesh_shape, shape):
    """Which moves the cheapest paths have depends on a machine's prices: on CPUs no path may have a reduce-scatter."""
    space = space_of(shape, mesh_shape)
    moves = [move for layout in space.layouts for move in moves_from(layout, shape, space.network.mesh, ("sum",))]
    singles = {(move.source, move.target): move for move in moves if {move.source, move.target} <= {*space.layouts}}
    assert {move.kind for move in singles.values()} >= {"reduce-scatter", "all-gather", "all-to-all", "slice"}
    value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    moved = moved_together(space, list(singles), value, path=lambda source, target: (singles[source, target],))
    for (_, target), holds in zip(singles, moved, strict=True):
        assert_holds(holds, value, target, space.network.mesh)


@pytest.mark.parametrize("kinds", [KINDS, ("all-reduce", "all-gather"), ("all-reduce", "all-gather", "all-to-all")])
@pytest.mark.parametrize(("mesh_shape", "shape", "monoids", "sample"), CASES)
def test_seconds_are_the_sum_of_the_moves_and_a_path_leads_from_source_to_target(
    mesh_shape, shape, monoids, sample, kinds
):
    space = space_of(shape, mesh_shape, monoids, kinds=kinds)
    for source, target in pairs_of(space, sample):
        path = space.path(source, target)
        assert [path[0].source, path[-1].target] == [source, target]
        assert all(a.target == b.source for a, b in itertools.pairwise(path))
        assert {move.kind for move in path} <= {*kinds, "slice", "mask"}
        total = sum(space.network.seconds(move, shape, 4) for move in path)
        assert space.seconds[space.index[source], space.index[target]] == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("cluster", [PRESETS["cpu"], PRESETS["dgx-a100"], Cluster.uniform((2.0,) * 3, (1.0, 0.1, 3.0))])
@pytest.mark.parametrize(("mesh_shape", "shape", "monoids", "sample"), CASES)
def test_seconds_obey_the_triangle_inequality(mesh_shape, shape, monoids, sample, cluster):
    seconds = space_of(shape, mesh_shape, monoids, cluster).seconds
    assert np.isfinite(seconds).all()
    assert (np.diag(seconds) == 0).all()
    assert (seconds[~np.eye(len(seconds), dtype=bool)] > 0).all()
    for middle in range(len(seconds)):
        assert (seconds <= (seconds[:, middle, None] + seconds[None, middle, :]) * (1 + 1e-12)).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mesh_shape", "shape"), [((4,), (8, 8)), ((2, 2), (8, 8)), ((2, 2, 2), (8, 8, 8)), ((2, 3), (6, 6))]
)
def test_a_permutation_sends_once_and_receives_once_on_every_device_and_moves_the_right_tiles(mesh_shape, shape):
    mesh = LogicalMesh.of(mesh_shape)
    layouts = [la for la in all_layouts(shape, mesh, ()) if la.sharded_axes]
    value = np.arange(math.prod(shape)).reshape(shape)
    for source, target in itertools.product(layouts, repeat=2):
        if source.local_shape(shape, mesh) != target.local_shape(shape, mesh):
            continue
        pairs = permutation(source, target, mesh)
        senders, receivers = zip(*pairs, strict=True)
        assert sorted(senders) == sorted(receivers) == list(range(mesh.size))
        held = held_by_devices(value, source, mesh).reshape(mesh.size, *source.local_shape(shape, mesh))
        wanted = held_by_devices(value, target, mesh).reshape(held.shape)
        for sender, receiver in pairs:
            np.testing.assert_array_equal(held[sender], wanted[receiver])


def test_every_layout_is_there_once_and_fits():
    mesh = LogicalMesh.of((2, 4))
    layouts = all_layouts((4, 8), mesh, ("sum",))
    assert layouts[0] == Layout.replicated(2)
    assert len(set(layouts)) == len(layouts)
    per_axis = [("-", 0, 1, "sum")] * 2
    expected = set()
    for x, y in itertools.product(*per_axis):
        partial = tuple((axis, "sum") for axis, job in enumerate((x, y)) if job == "sum")
        for order in ((0, 1), (1, 0)):
            dims = tuple(tuple(axis for axis in order if (x, y)[axis] == dim) for dim in range(2))
            if Layout(dims, partial).fits((4, 8), mesh):
                expected.add(Layout(dims, partial))
    assert set(layouts) == expected


def test_an_axis_of_one_device_is_in_no_layout():
    layouts = all_layouts((4, 4), LogicalMesh.of((1, 2)), ("sum",))
    assert {axis for la in layouts for axis in (*la.sharded_axes, *la.partial_axes)} == {1}


def test_two_tilings_that_differ_by_the_order_of_axes_are_one_permute_apart():
    space = space_of((8, 8), (2, 2), cluster=Cluster.uniform((1.0, 1.0), (1.0, 1.0)))
    path = space.path(Layout(((0,), (1,))), Layout(((1,), (0,))))
    assert [move.kind for move in path] == ["collective-permute"]


def test_a_partial_sum_reaches_a_split_by_one_reduce_scatter_and_the_whole_by_one_all_reduce():
    space = space_of((8, 8), (4,), cluster=Cluster.uniform((1.0,), (1.0,)))
    partial = Layout(((), ()), ((0, "sum"),))
    assert [m.kind for m in space.path(partial, Layout(((0,), ())))] == ["reduce-scatter"]
    assert [m.kind for m in space.path(partial, Layout(((), ())))] == ["all-reduce"]


def test_two_partial_axes_are_reduced_by_one_collective_where_the_cluster_prices_them_jointly():
    space = space_of((8, 8), (2, 2), cluster=PRESETS["dgx-a100"])
    (move,) = space.path(Layout(((), ()), ((0, "sum"), (1, "sum"))), Layout(((), ())))
    assert (move.kind, move.axes) == ("all-reduce", (0, 1))


def test_what_is_scattered_or_gathered_behind_other_dimensions_pays_for_a_transposed_copy():
    cpu = even_links()
    device = dataclasses.replace(cpu.device, transpose_s_per_byte=1e-3)
    dear = dataclasses.replace(cpu, device=device)
    whole, summed = Layout(((), ())), Layout(((), ()), ((0, "sum"),))
    first, second = Layout(((0,), ())), Layout(((), (0,)))
    networks = [space_of((8, 16), (4,), cluster=cluster).network for cluster in (cpu, dear)]

    def added_s(move, shape=(8, 16)):
        before_s, after_s = (network.seconds(move, shape, 4) for network in networks)
        return after_s - before_s

    copy_s = 4 * 8 * 16 * 1e-3
    assert added_s(Move(kind="all-gather", axes=(0,), source=first, target=whole, from_dim=0)) == 0.0
    assert added_s(Move(kind="reduce-scatter", axes=(0,), source=summed, target=first, to_dim=0, monoid="sum")) == 0.0
    assert added_s(Move(kind="all-gather", axes=(0,), source=second, target=whole, from_dim=1)) == pytest.approx(copy_s)
    scattered = Move(kind="reduce-scatter", axes=(0,), source=summed, target=second, to_dim=1, monoid="sum")
    assert added_s(scattered) == pytest.approx(copy_s)
    assert added_s(scattered, (1, 16)) == 0.0  # a dimension of length 1 stands before: nothing is in another order


def test_a_dear_transposed_copy_is_gone_around_by_sending_each_device_its_part():
    cpu = even_links()
    device = dataclasses.replace(cpu.device, transpose_s_per_byte=2e-9)
    space = space_of((256, 1024), (8,), cluster=dataclasses.replace(cpu, device=device))
    path = space.path(Layout(((), ()), ((0, "sum"),)), Layout(((), (0,))))
    assert [(move.kind, move.to_dim) for move in path] == [("reduce-scatter", 0), ("all-to-all", 1)]


LIKE = [
    ((4,), (8, 12), (40, 52)),
    ((2, 2), (8, 4), (24, 4)),
    ((2, 2), (8, 6), (16, 10)),
    ((2, 4), (2, 8, 24), (2, 8, 40)),
    ((2, 2, 2), (16, 6), (48, 14)),
    ((2, 3), (6, 12, 9), (6, 18, 15)),
    ((2, 4), (0, 24), (0, 48)),
]


@pytest.mark.parametrize("cluster", [PRESETS["dgx-a100"], Cluster.uniform((2.0,) * 3, (1.0, 0.1, 3.0))])
@pytest.mark.parametrize(("mesh_shape", "shape", "like"), LIKE)
def test_shapes_of_one_key_have_the_moves_of_one_table(mesh_shape, shape, like, cluster):
    own = space_of(like, mesh_shape, ("max", "sum"), cluster)
    assert size_key(shape, own.network.mesh) == size_key(like, own.network.mesh)
    table = MoveTable(shape, own.network, ("max", "sum"))
    shared = LayoutSpace(like, 4, own.network, ("max", "sum"), table=table)
    assert shared.layouts == own.layouts
    assert np.array_equal(shared.seconds, own.seconds)
    assert all(shared.path(*pair) == own.path(*pair) for pair in pairs_of(own, 100))


@given(sizes=st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 40]), min_size=4, max_size=4))
@settings(max_examples=30, deadline=None)
def test_shapes_of_one_key_have_the_same_layouts_and_each_pair_the_cheapest_single_move_or_less(sizes):
    mesh_shape, shape, like = (2, 4), tuple(sizes[:2]), tuple(sizes[2:])
    space = space_of(shape, mesh_shape, cluster=PRESETS["dgx-a100"])
    mesh = space.network.mesh
    if size_key(shape, mesh) == size_key(like, mesh):
        assert all_layouts(shape, mesh, ("sum",)) == all_layouts(like, mesh, ("sum",))
    for layout in space.layouts:
        for move in moves_from(layout, shape, mesh, ("sum",)):
            seconds = space.network.seconds(move, shape, 4)
            assert space.seconds[space.index[layout], space.index[move.target]] <= seconds


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (4, 0, 8)])
def test_a_dimension_without_elements_is_in_no_layout_split(shape):
    space = space_of(shape, (2, 2))
    split = {d for layout in space.layouts for d, axes in enumerate(layout.dims) if axes}
    assert split == {d for d, size in enumerate(shape) if size}
    for source, target in pairs_of(space):
        assert all(move.target in space.index for move in space.path(source, target))
