"""The ways in which each step of the corpus is run, on 8 virtual devices."""

from collections.abc import Mapping
from typing import Any

import autopar

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "data parallel": {"mesh_shape": (8,), "constraints": autopar.data_parallel()},
    "zero3": {"mesh_shape": (8,), "constraints": autopar.zero3()},
    "microbatches": {"mesh_shape": (2,), "num_microbatches": 4},
    "stages": {"mesh_shape": (2,), "num_stages": 2, "num_microbatches": 4},
    "recompute": {"mesh_shape": (2,), "recompute": "layer"},
}
