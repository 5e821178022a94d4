"""`run`: a few steps under a plan that `plan -o` wrote.

In: the plan and the model, or the step of the user's own, that it was made for. Out: losses, and measured beside predicted
seconds. What can go wrong: the plan is for other sizes; the error says so and how the two programs differ.
"""

from __future__ import annotations

import argparse

from autopar.commands.arguments.subject import find_trainee
from autopar.commands.terminal.printing import print_json, reports
from autopar.commands.training.saved_plan import parallel_under, read_plan_for_here
from autopar.commands.training.train import INTERRUPTED, Outcome, compare_with_jit, first_state_of, run_steps, summarise
from autopar.commands.training.training_run import Record, Training, run_jit


def run(options: argparse.Namespace) -> int:
    """Run the command; 0, or 130 after Ctrl-C."""
    plan = read_plan_for_here(options.file)
    console = reports(as_json=options.json)
    trainee = find_trainee(options.model, options.sizes, options.seed)
    training = Training(trainee=trainee, steps=options.steps, console=console)
    training.check_data()
    step = parallel_under(plan, trainee.subject, options.file)
    console.print(f"{plan!r}", markup=False, highlight=False, soft_wrap=True)
    first_state = first_state_of(training, step) if options.compare_jit else None
    record, reference = Record(), None
    stopped = run_steps(training, step, record, first_state)
    summarise(training, plan, record, stopped)
    if first_state is not None and stopped is None:
        reference = run_jit(training, first_state)
        if reference is not None:
            compare_with_jit(training, record, reference)
    outcome = Outcome(
        plan=plan,
        record=record,
        reference=reference,
        stopped_by=stopped,
        is_compared=not options.compare_jit or reference is not None,
    )
    if options.json:
        print_json({"plan": str(options.file), "model": options.model, **outcome.document()})
    return INTERRUPTED if outcome.stopped else 0
