"""Which harnesses run on which mesh: lines `MESH NAME` for the processes, and what these find."""

import os
from collections import defaultdict

from tests.harnesses.cases import MESHES, all_harnesses, seed_of
from tests.in_processes import run

TOGETHER = 12
"""Harnesses in one compiled program."""
EVERY_MESH = os.environ.get("AUTOPAR_HARNESS_MESHES") == "all"


def by_group():
    """The harnesses of each group."""
    groups = defaultdict(list)
    for harness in all_harnesses():
        groups[harness.group_name].append(harness)
    return groups


def names_by_group():
    """The names of the harnesses of each group."""
    return {group: [harness.fullname for harness in harnesses] for group, harnesses in by_group().items()}


def one_of_every_group():
    """The name of one harness of every group."""
    return [names[seed_of(group) % len(names)] for group, names in names_by_group().items()]


def on_meshes(names, *, every=False):
    """Lines of harnesses, those of a mesh one after the other; each on the mesh that its name picks, or on `every` one."""
    meshes = range(len(MESHES))
    return [f"{mesh} {name}" for mesh in meshes for name in names if every or seed_of(name) % len(MESHES) == mesh]


def run_lines(lines):
    """What differs, is not run by JAX, ends its process or hangs, by the name of the harness."""
    return run("tests.harnesses.run", lines, together=TOGETHER)
