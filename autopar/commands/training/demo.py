"""`demo`: train a small GPT beside plain `jax.jit`, twice: on one mesh and as a pipeline."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

import jax
from rich.console import Console

from autopar.commands.arguments.devices import DEFAULT_DEVICES
from autopar.commands.parser import read
from autopar.commands.terminal.printing import print_json, reports
from autopar.commands.training.train import INTERRUPTED, train_model
from autopar.commands.training.training_run import Observe, Record, ignore

LARGEST_DIFFERENCES: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}
"""By how much the losses of two runs may differ, by the type that the model computes in."""


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    return demo(demo_options(options), as_json=options.json)


def demo(
    parts: Sequence[argparse.Namespace],
    *,
    as_json: bool = False,
    largest_difference: float | None = None,
    observe: Observe = ignore,
) -> int:
    """Train with autopar in each of the ways of `parts` and once without; 1 if a loss does not fall or runs disagree.

    All parts have the same model, steps and seed, so that one run of `jax.jit` serves all.

    Args:
        parts: The options of each way.
        as_json: Print one JSON document.
        largest_difference: By how much the losses of two runs may differ; None: by what their type allows.
        observe: Called after each step.
    """
    jax.config.update("jax_platforms", "cpu")
    problems: list[str] = []
    documents: list[dict[str, object]] = []
    reference: Record | None = None
    for options in parts:
        reports(as_json=as_json).rule(options.title, align="left")
        outcome = train_model(options, compare=True, reference=reference, observe=observe)
        reference = outcome.reference
        documents.append({"title": options.title, "model": options.model, **outcome.document()})
        if outcome.stopped or reference is None:
            if as_json:
                print_json({"parts": documents, "problems": problems})
            return INTERRUPTED
        allowed = largest_difference or LARGEST_DIFFERENCES[options.sizes.get("dtype", "float32")]
        found = _find_problems(outcome.record, reference, allowed)
        problems += [f"{options.title}: {problem}" for problem in found]
    if as_json:
        print_json({"parts": documents, "problems": problems})
    for problem in problems:
        Console(stderr=True).print(f"autopar demo: {problem}", markup=False)
    return 1 if problems else 0


def _find_problems(record: Record, reference: Record, largest_difference: float) -> Iterator[str]:
    first, last, difference = record.losses[0], record.losses[-1], record.difference(reference)
    if not last < first:
        yield f"the loss did not fall: {first:.4f} to {last:.4f}"
    if not difference <= largest_difference:
        yield f"the losses differ by {difference:.1e}, more than {largest_difference:.0e}"


def demo_options(options: argparse.Namespace) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The demo as two runs of `train`: the default GPT on 8 devices as one mesh, and as 2 stages of 4 devices."""
    shared = ["train", "gpt", f"--dtype={options.dtype}", f"--steps={options.steps}", f"--seed={options.seed}"]
    one = read([*shared, f"--devices={DEFAULT_DEVICES}", "--stages=1"])
    two = read([*shared, f"--devices={DEFAULT_DEVICES}", "--stages=2", "--microbatches=4"])
    one.title, two.title = "one mesh", "pipeline"
    one.json = two.json = options.json
    return one, two
