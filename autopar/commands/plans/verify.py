"""`verify`: plan a step, compile it for the devices at hand, and compare the compiled programs with the plan.

Without accelerators it compiles for virtual CPU devices, or for GPUs that are not there. The exit status is 1 if something
differs.
"""

from __future__ import annotations

import argparse
import json
import os

import jax
import numpy as np

from autopar.api import ParallelStep
from autopar.commands.arguments.devices import ask_for_virtual_devices, find_devices
from autopar.commands.arguments.own_step import PyTree
from autopar.commands.arguments.subject import Subject, find_subject, find_trainee
from autopar.commands.plans.parallel import count_devices, make_parallel
from autopar.commands.plans.plan import plan_step
from autopar.commands.terminal.interruption import interruptible
from autopar.commands.terminal.printing import print_json
from autopar.errors import ArgumentError
from autopar.explain import standard_output
from autopar.explain.verified import page
from autopar.files.whole_file import save
from autopar.live_line import show_progress
from autopar.progress import COMPILING, enter
from autopar.reports.report import html
from autopar.verify.compile_only import compile_only_devices

DIFFERS = 1
"""The exit status where a compiled program is not what was planned."""


def verify(options: argparse.Namespace) -> int:
    """Plan, compile and compare; write the programs where files are named."""
    devices = _devices(options)
    with show_progress(options.verbose):
        enter("building the model")
        subject = find_subject(options.model, options.sizes)
        given = _arguments(options) if options.values else (subject.state, subject.batch)
        step = make_parallel(subject.step, devices, options)
        with interruptible(step.stop_planning) as interruption:
            plan = plan_step(step, subject, options)
        enter(COMPILING)
        found = step.verify(*given, values=options.values)
    interruption.finish()
    if options.json:
        print_json(json.loads(found.to_json()))
    else:
        standard_output().print(page(found, full=options.full), markup=False, highlight=False, soft_wrap=True)
    _write(options, step, subject)
    if options.html is not None:
        html(plan, options.html, verified=found)
    return 0 if found.ok else DIFFERS


def _devices(options: argparse.Namespace) -> list[jax.Device]:
    """The devices at hand, virtual ones if these are CPUs; or those that are only compiled for."""
    asked = count_devices(options)
    if options.compile_for is not None:
        if "JAX_PLATFORMS" not in os.environ:
            jax.config.update("jax_platforms", "cpu")  # or the plugin for GPUs looks for a driver first
        return compile_only_devices(options.compile_for, asked)
    ask_for_virtual_devices(asked)
    return find_devices(options.devices if options.mesh is None and options.nodes is None else asked)


def _arguments(options: argparse.Namespace) -> tuple[PyTree, PyTree]:
    """State and batch as arrays, the first ones that `train` would take. Raises ArgumentError for shapes."""
    try:
        trainee = find_trainee(options.model, options.sizes, 0)
    except ArgumentError as error:
        raise ArgumentError(f"--values runs the step, and {error}; or leave --values out") from None
    batch = next(iter(trainee.batches()))
    return trainee.create_state(*trainee.args), jax.tree.map(np.asarray, batch)


def _write(options: argparse.Namespace, step: ParallelStep, subject: Subject) -> None:
    """Write the modules and the program to the files that are named."""
    if options.hlo is not None:
        save(options.hlo, str(step.hlo(subject.state, subject.batch)))
    if options.program is not None:
        save(options.program, step.program(subject.state, subject.batch))
