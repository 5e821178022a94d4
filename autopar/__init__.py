"""autopar: automatic parallelization of JAX train steps.

`parallelize` turns a step written for one device into one that runs on all of them, under a plan it finds, explains and
predicts. Importing this package changes nothing: no environment variable, no device, no patched module. JAX is imported
when a name is first used, so that a command line which only prints its help answers at once.
"""

import importlib
import importlib.metadata
import pathlib
import tomllib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar import checkpoints as checkpoints
    from autopar import data as data
    from autopar import launch as launch
    from autopar import monitor as monitor
    from autopar import solver as solver
    from autopar import testing as testing
    from autopar import training as training
    from autopar.api import ParallelStep as ParallelStep
    from autopar.api import parallelize as parallelize
    from autopar.attention.primitive import dot_product_attention as dot_product_attention
    from autopar.checkpoints.save import restore as restore
    from autopar.checkpoints.save import save as save
    from autopar.errors import ArgumentError as ArgumentError
    from autopar.errors import AutoparError as AutoparError
    from autopar.errors import AutoparWarning as AutoparWarning
    from autopar.errors import CheckpointError as CheckpointError
    from autopar.errors import ConstraintError as ConstraintError
    from autopar.errors import OutOfMemoryError as OutOfMemoryError
    from autopar.errors import PipelineError as PipelineError
    from autopar.errors import PlanError as PlanError
    from autopar.errors import RuleError as RuleError
    from autopar.errors import ScheduleError as ScheduleError
    from autopar.errors import TrainingError as TrainingError
    from autopar.errors import UnsupportedProgramError as UnsupportedProgramError
    from autopar.errors import VerificationError as VerificationError
    from autopar.execution.plain_jit import plain_jit as plain_jit
    from autopar.layouts.constraints import Replicated as Replicated
    from autopar.layouts.constraints import Split as Split
    from autopar.layouts.constraints import data_parallel as data_parallel
    from autopar.layouts.constraints import zero1 as zero1
    from autopar.layouts.constraints import zero2 as zero2
    from autopar.layouts.constraints import zero3 as zero3
    from autopar.live_line import show_progress as show_progress
    from autopar.measuring.recorder import record as record
    from autopar.pipeline_plan import PipelinePlan as PipelinePlan
    from autopar.pipeline_plan import plan_from_json as plan_from_json
    from autopar.plan import Plan as Plan
    from autopar.program.layer_boundary import layer_boundary as layer_boundary
    from autopar.recording.run import RecordedRun as RecordedRun
    from autopar.rules.unlisted.register import register_rule as register_rule
    from autopar.split_array import SplitArray as SplitArray
    from autopar.training.run import Run as Run
    from autopar.verification import Verification as Verification
    from autopar.verify.compile_only import compile_only_devices as compile_only_devices

_MODULES = {
    "ArgumentError": "errors",
    "AutoparError": "errors",
    "AutoparWarning": "errors",
    "CheckpointError": "errors",
    "ConstraintError": "errors",
    "OutOfMemoryError": "errors",
    "ParallelStep": "api",
    "PipelineError": "errors",
    "PipelinePlan": "pipeline_plan",
    "Plan": "plan",
    "PlanError": "errors",
    "RecordedRun": "recording.run",
    "Replicated": "layouts.constraints",
    "RuleError": "errors",
    "Run": "training.run",
    "ScheduleError": "errors",
    "Split": "layouts.constraints",
    "SplitArray": "split_array",
    "TrainingError": "errors",
    "UnsupportedProgramError": "errors",
    "Verification": "verification",
    "VerificationError": "errors",
    "compile_only_devices": "verify.compile_only",
    "data_parallel": "layouts.constraints",
    "dot_product_attention": "attention.primitive",
    "layer_boundary": "program.layer_boundary",
    "parallelize": "api",
    "plain_jit": "execution.plain_jit",
    "plan_from_json": "pipeline_plan",
    "record": "measuring.recorder",
    "register_rule": "rules.unlisted.register",
    "restore": "checkpoints.save",
    "save": "checkpoints.save",
    "show_progress": "live_line",
    "zero1": "layouts.constraints",
    "zero2": "layouts.constraints",
    "zero3": "layouts.constraints",
}
"""The module that holds each public name; type checkers read the same from the imports above."""

_PACKAGES = ("checkpoints", "data", "launch", "monitor", "solver", "testing", "training")
"""Packages with public names of their own: `autopar.data.sharded` needs no other import."""

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name in _PACKAGES:
        return importlib.import_module(f"autopar.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"autopar.{_MODULES[name]}"), name)


def _version() -> str:
    """The version that is installed; of a checkout that is not, the one that its pyproject.toml states."""
    try:
        return importlib.metadata.version("autopar")
    except importlib.metadata.PackageNotFoundError:
        project = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
        if not project.is_file():
            return "0+unknown"
        return f"{tomllib.loads(project.read_text(encoding='utf-8'))['project']['version']}+checkout"


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES})
