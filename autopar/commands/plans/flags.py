"""What conflicts, in the flags of the command line.

In: an error that knows its step, and a clock. Out: the answer of `OutOfMemoryError.conflict`, in flags.
"""

from __future__ import annotations

import dataclasses

from autopar.commands.arguments.in_flags import in_flags
from autopar.errors import OutOfMemoryError
from autopar.why.deadline import Deadline
from autopar.why.report import WhyNot, why_not_until


def conflict_in_flags(error: OutOfMemoryError, deadline: Deadline) -> WhyNot:
    """Why nothing fits, as far as it is found by then, in words of the command line. Raises PlanError as `why_not`."""
    told = why_not_until(deadline, error).answer
    relaxations = tuple(dataclasses.replace(one, words=in_flags(one.words)) for one in told.relaxations)
    return WhyNot(dataclasses.replace(told, wishes=tuple(map(in_flags, told.wishes)), relaxations=relaxations))
