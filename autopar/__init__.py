"""autopar: automatic parallelization of JAX train steps.

`parallelize` turns a step written for one device into one that runs on all of them, under a plan it finds, explains and
predicts. Importing this package changes nothing: no environment variable, no device, no patched module. JAX is imported
when a name is first used, so that a command line which only prints its help answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from autopar.errors import (
    ArgumentError,
    AutoparError,
    AutoparWarning,
    ConstraintError,
    OutOfMemoryError,
    PipelineError,
    PlanError,
    RuleError,
    ScheduleError,
    UnsupportedProgramError,
)

if TYPE_CHECKING:
    from autopar.api import ParallelStep, parallelize
    from autopar.layouts.constraints import Replicated, Split, data_parallel, zero2, zero3
    from autopar.pipeline_plan import PipelinePlan, plan_from_json
    from autopar.plan import Plan
    from autopar.program.layer_boundary import layer_boundary
    from autopar.rules.table import register_rule
    from autopar.split_array import SplitArray

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "AutoparError",
    "AutoparWarning",
    "ConstraintError",
    "OutOfMemoryError",
    "ParallelStep",
    "PipelineError",
    "PipelinePlan",
    "Plan",
    "PlanError",
    "Replicated",
    "RuleError",
    "ScheduleError",
    "Split",
    "SplitArray",
    "UnsupportedProgramError",
    "data_parallel",
    "layer_boundary",
    "parallelize",
    "plan_from_json",
    "register_rule",
    "zero2",
    "zero3",
]
_WITH_JAX = {
    "ParallelStep": "api",
    "PipelinePlan": "pipeline_plan",
    "Plan": "plan",
    "Replicated": "layouts.constraints",
    "Split": "layouts.constraints",
    "SplitArray": "split_array",
    "data_parallel": "layouts.constraints",
    "layer_boundary": "program.layer_boundary",
    "parallelize": "api",
    "plan_from_json": "pipeline_plan",
    "register_rule": "rules.table",
    "zero2": "layouts.constraints",
    "zero3": "layouts.constraints",
}
"""Public names that are imported when they are used, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_JAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"autopar.{_WITH_JAX[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WITH_JAX})
