"""The compiled programs of a step against its plan, as a `Verification`.

In: a compiled step, its devices and arguments. Out: all rows: collectives of each stage, transfers, memory, arithmetic, values if
asked for. What can go wrong: nothing raises but arguments without values; what differs is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.program.call import PyTree
from autopar.verification import Verification, VerifiedRow
from autopar.verify import arithmetic, collectives, memory, transfers
from autopar.verify import values as compared_values
from autopar.verify.programs import parts_of


def verify(
    compiled: CompiledStep | CompiledPipeline,
    devices: Sequence[jax.Device],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    *,
    values: bool,
) -> Verification:
    """The rows of a compiled step; see `ParallelStep.verify`."""
    parts, platform = parts_of(compiled), devices[0].platform
    rows: list[VerifiedRow] = [row for part in parts for row in collectives.rows(part, platform=platform)]
    if isinstance(compiled, CompiledPipeline):
        rows += transfers.rows(compiled)
    rows += memory.rows(compiled, parts, platform=platform)
    rows += arithmetic.rows(parts, compiled.plan)
    if values:
        rows += compared_values.rows(compiled, devices, args, kwargs)
    return Verification(
        step=compiled.signature.name,
        fingerprint=compiled.plan.fingerprint,
        platform=platform,
        num_devices=compiled.plan.num_devices,
        jax_version=jax.__version__,
        rows=tuple(rows),
    )
