"""autopar: automatic parallelization of JAX train steps.

`parallelize` turns a step written for one device into one that runs on all of them, under a plan it finds, explains and
predicts. Importing this package changes nothing: no environment variable, no device, no patched module.
"""

from autopar.api import ParallelStep, parallelize
from autopar.boundary import layer_boundary
from autopar.errors import (
    ArgumentError,
    AutoparError,
    AutoparWarning,
    ConstraintError,
    OutOfMemoryError,
    PlanError,
    RuleError,
    UnsupportedProgramError,
)
from autopar.options import Replicated, Split, data_parallel, zero2, zero3
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan
from autopar.rules import register_rule

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "AutoparError",
    "AutoparWarning",
    "ConstraintError",
    "OutOfMemoryError",
    "ParallelStep",
    "PipelinePlan",
    "Plan",
    "PlanError",
    "Replicated",
    "RuleError",
    "Split",
    "UnsupportedProgramError",
    "data_parallel",
    "layer_boundary",
    "parallelize",
    "plan_from_json",
    "register_rule",
    "zero2",
    "zero3",
]
