"""What a kept plan is known by: a digest of everything that decides what a search finds.

In: a traced step and the settings. Out: 64 hexadecimal digits: of the program with its parameters, its leaves and constants, the
cluster's figures, all options and constraints, the settings of JAX, and the versions of autopar, JAX and the solvers. The seconds
that planning may take are not part of it: an entry says how long was searched for it. What can go wrong: something that nobody
can compare decides as well, such as a rule that the user registered; then there is no key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from autopar.compat import module_path, source_line, transformations
from autopar.content import digest_of
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.progress import LOGGER
from autopar.rules.table import find_registered
from autopar.runtime.thread_settings import program_settings_here
from autopar.settings import Settings, count_devices, make_request, plan_to_follow

LARGE_BYTES = 2**24
"""A constant beyond this size counts by its shape and type."""
_PACKAGES = ("jax", "jaxlib", "highspy", "pulp", "numpy", "networkx")


def key_of(settings: Settings, traced: TracedStep) -> str | None:
    """The key of what is asked for; None if it cannot be told from another question."""
    own = find_registered(traced.program.walk())
    if own:
        LOGGER.info("no plan is kept of a step with rules of your own (%s), which cannot be compared", ", ".join(own))
        return None
    try:
        return digest_of((_versions(), _describe_step(traced), _describe_wishes(settings)))
    except RuntimeError as error:  # an array that the step closes over has parts in other processes, or is gone
        LOGGER.info("no plan is kept of a step whose constants cannot be read: %s", error)
        return None


def list_sources(traced: TracedStep) -> tuple[str, ...]:
    """The lines of the program, each once, in the order in which operations come from them."""
    return tuple(dict.fromkeys(map(source_line, traced.program.walk())))


def _describe_step(traced: TracedStep) -> object:
    """The step. Of the lines of its source only those count that are equal: a plan's lines can be brought up to date.

    The modules that its operations come from stand in a plan.
    """
    numbers = {source: number for number, source in enumerate(list_sources(traced))}
    equations = [
        (numbers[source_line(eqn)], sorted(transformations(eqn)), module_path(eqn)) for eqn in traced.program.walk()
    ]
    leaves = (traced.inputs, traced.outputs, traced.state_of_output, traced.microbatches)
    return traced.fingerprint, equations, leaves, [_describe_constant(value) for value in traced.constants]


def _describe_constant(value: jax.typing.ArrayLike) -> object:
    """A constant by its value; a large one, which is slow to copy from its devices, by shape and type, as planning sees it."""
    return jax.typeof(value).str_short() if getattr(value, "nbytes", 0) > LARGE_BYTES else value


def digest_of_wishes(settings: Settings) -> str:
    """What is asked of a plan, whatever the step: the cluster, devices, options, constraints, and the settings of JAX."""
    return digest_of((_describe_wishes(settings), settings.batch_statistics))


def _describe_wishes(settings: Settings) -> object:
    request = make_request(settings)
    return (
        (request.cluster, request.memory_limit_bytes, request.constraints, request.options, request.tuning),
        (count_devices(settings), settings.meshes, settings.num_microbatches, settings.num_stages),
        (settings.schedule, settings.virtual_stages, settings.recompute),
        _without_seconds(plan_to_follow(settings)),
        program_settings_here(),
    )


def _without_seconds(plan: Plan | PipelinePlan | None) -> Plan | PipelinePlan | None:
    """A plan without how long it took to find, which differs from run to run."""
    match plan:
        case Plan():
            return dataclasses.replace(plan, planning_s=0.0)
        case PipelinePlan():
            return dataclasses.replace(
                plan,
                planning_s=0.0,
                stages=tuple(
                    dataclasses.replace(one, plan=dataclasses.replace(one.plan, planning_s=0.0)) for one in plan.stages
                ),
            )
        case None:
            return None


@functools.cache
def _versions() -> object:
    """Versions of what takes part in planning; of autopar its source, which a checkout may change without a new version."""
    return sys.version_info[:2], [(name, _version(name)) for name in _PACKAGES], _digest_of_source()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest_of_source() -> str:
    """A digest of autopar's modules."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    folders = os.walk(root, followlinks=True)  # in a checkout, the cost model is a link
    for path in sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
