"""Values of flags: sizes, meshes, layouts, devices; what is read, and what is refused in words."""

import argparse
import os

import pytest

from autopar.commands.arguments import devices, values
from autopar.errors import ArgumentError
from autopar.layouts.constraints import Replicated, Split


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("16GB", 16 * 10**9), ("16GiB", 16 * 2**30), ("1.5 kib", 1536), (".5MB", 500_000), ("2TB", 2 * 10**12)],
)
def test_sizes_are_read_with_decimal_and_binary_units(text, size):
    assert values.byte_count(text) == size


@pytest.mark.parametrize("text", ["", "GB", "16G", "-1GB", "1e9", "16 XB"])
def test_a_size_that_is_ambiguous_or_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; write a number and one of B, KB, MB"):
        values.byte_count(text)


@pytest.mark.parametrize("text", ["0", "0.1B"])
def test_a_size_of_nothing_is_refused_as_such(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is less than a byte"):
        values.byte_count(text)


def test_words_between_commas_are_not_empty():
    assert values.names("a, b") == ("a", "b")
    with pytest.raises(argparse.ArgumentTypeError, match="has nothing before or after a comma"):
        values.names(",")


@pytest.mark.parametrize(
    ("text", "shape"),
    [("8", (8,)), ("2,4", (2, 4)), ("2, 2,2", (2, 2, 2)), ("data=2,model=4", {"data": 2, "model": 4})],
)
def test_meshes_are_read_with_and_without_names(text, shape):
    assert values.mesh_shape(text) == shape
    assert values.mesh_size(values.mesh_shape(text)) in (4, 8)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0", "as each axis has at least one device;"),
        ("-2", "as each axis has at least one device;"),
        ("0,8", "as each axis has at least one device;"),
        ("data=-1", "as each axis has at least one device;"),
        ("data=2,4", "as either all axes have names or none;"),
        ("data=2,data=4", "as each axis has a name of its own;"),
    ],
)
def test_a_mesh_that_is_none_is_told_why(text, why):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not a mesh, {why} write the sizes"):
        values.mesh_shape(text)


def test_seconds_are_a_positive_number_or_none():
    assert [values.seconds(text) for text in ("60", "0.5", "1e3", "none", " None ")] == [60.0, 0.5, 1000.0, None, None]
    for text in ("0", "-1", "inf", "nan", "a minute", ""):
        with pytest.raises(
            argparse.ArgumentTypeError, match="is not a positive number of seconds, or none for no limit"
        ):
            values.seconds(text)


def test_a_mesh_for_each_stage_is_read():
    assert values.mesh_shapes("2,4") == ((2, 4),)
    assert values.mesh_shapes("1,2/1,2/1,4") == ((1, 2), (1, 2), (1, 4))
    assert values.mesh_shapes("data=2/4") == ({"data": 2}, (4,))


@pytest.mark.parametrize("text", ["", "2,", "3,x", "x=", "=2", "2.0"])
def test_a_mesh_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a mesh; write the sizes"):
        values.mesh_shape(text)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ("replicated", Replicated()),
        ("split", Split()),
        ("split:x", Split(("x",))),
        ("split:x+y", Split(("x", "y"))),
        ("x", ("x",)),
        ("-,x", (None, "x")),
        ("x+y,-", (("x", "y"), None)),
    ],
)
def test_layouts_are_read(spec, layout):
    glob, read = values.constraint(f"state/*={spec}")
    assert glob == "state/*"
    made = values.layout(read)
    assert (tuple(made) if isinstance(layout, tuple) else made) == layout


@pytest.mark.parametrize("text", ["state/*", "=x", "state/*=", "state/*=x,", "state/*=x;y", "state/*=split:", "a=1"])
def test_a_constraint_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not GLOB=SPEC"):
        values.constraint(text)


def test_missing_devices_are_told_with_the_way_to_get_them():
    with pytest.raises(ArgumentError, match="9 devices are asked for, JAX has 8 of platform cpu"):
        devices.find_devices(9)


def test_more_virtual_devices_than_xla_runs_are_refused_and_never_made(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    devices.ask_for_virtual_devices(9999)
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2048"
    with pytest.raises(
        ArgumentError, match="9999 devices are asked for, and XLA runs at most 2048 virtual CPU devices"
    ):
        devices.find_devices(9999)
