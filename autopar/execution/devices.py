"""JAX devices arranged as a logical mesh."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from autopar.compat import (
    make_mesh,
)
from autopar.errors import ArgumentError
from autopar.layouts.mesh import LogicalMesh


def device_mesh(mesh: LogicalMesh, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Arrange JAX devices as a logical mesh. Raises ArgumentError if there are too few."""
    if mesh.size > len(devices):
        raise ArgumentError(
            f"mesh {mesh.shape} needs {mesh.size} devices, there are {len(devices)} ({', '.join(map(str, devices[:4]))}"
            f"{', ...' if len(devices) > 4 else ''}). Use a smaller mesh_shape; or, to try a plan on a CPU, start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}."
        )
    return make_mesh(np.array(devices[: mesh.size]).reshape(mesh.shape), mesh.axis_names)
