"""What a compiled step does beside what its plan says: rows of planned and compiled figures, each with a verdict.

Frozen data with a JSON form. `step.verify(...)` makes it; nothing here runs. What can go wrong: nothing is raised for a row that
differs until `check` is called.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Literal

from autopar.errors import VerificationError
from autopar.files.checked import VERIFICATION_SCHEMA, check_fields, load_text
from autopar.files.json_form import build, text_of

Verdict = Literal["matches", "explained", "differs", "unknown"]
Topic = Literal["collectives", "transfers", "memory", "arithmetic", "values"]
VERSION = 1
_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedRow:
    """One figure of the plan beside that of the compiled program.

    Attributes:
        topic: `collectives`, `transfers` between stages, `memory`, `arithmetic`, or `values` of results.
        what: what is compared: a kind of collective and its mesh axes, a part of the memory, the path of a result.
        unit: of both figures: `bytes` per device and step (of transfers, of the whole arrays), `flops` of all devices together,
            or `error`, the largest difference of an entry as a share of the result's largest entry.
        planned: what the plan says; of values, the error that is allowed. None: the plan says nothing of it.
        compiled: what the compiled program does. None: it cannot be told.
        verdict: `matches`: equal, or within the tolerance that the note gives. `explained`: another figure, for a reason that is
            known and that the note gives. `differs`. `unknown`: one of the figures is not known.
        stage: the number of the pipeline stage, or of the mesh for memory; None on one mesh.
        note: tolerance, reason, or number of values.
    """

    topic: Topic
    what: str
    unit: Literal["bytes", "flops", "error"]
    planned: float | None
    compiled: float | None
    verdict: Verdict
    stage: int | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The compiled programs of a step against its plan. Printed, it is a table of at most 40 lines; what differs comes first.

    Attributes:
        step: the name of the step.
        fingerprint: that of the plan.
        platform: of the devices that it is compiled for: `cpu`, `gpu` or `tpu`.
        num_devices: how many these are.
        jax_version: the version of JAX that compiled it.
        rows: what was compared.
        version: of the JSON form.
    """

    step: str
    fingerprint: str
    platform: str
    num_devices: int
    jax_version: str
    rows: tuple[VerifiedRow, ...]
    version: int = VERSION

    @property
    def ok(self) -> bool:
        """Whether no row differs."""
        return not self.differing

    @property
    def differing(self) -> tuple[VerifiedRow, ...]:
        """The rows in which plan and program differ."""
        return tuple(row for row in self.rows if row.verdict == "differs")

    def check(self) -> Verification:
        """Itself, if no row differs. Raises VerificationError, which names the first rows that do."""
        if self.ok:
            return self
        named = [
            f"{_where(row)}{row.what}: planned {row.planned}, compiled {row.compiled} {row.unit}"
            for row in self.differing
        ]
        more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        raise VerificationError(
            f"the compiled program of {self.step} is not what its plan says in {len(named)} of {len(self.rows)} rows: "
            f"{'; '.join(named[:_MOST_NAMED])}{more}. Print the verification for all of them; either the plan is for another "
            "version of JAX or another platform, or this is a defect of autopar."
        )

    def __str__(self) -> str:
        """The table."""
        return str(importlib.import_module("autopar.explain.verified").page(self))

    def to_json(self) -> str:
        """The verification as JSON text; `from_json` reads it back to an equal one."""
        return text_of({"version": self.version, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Verification:
        """A verification from the text that `to_json` wrote. Raises PlanError if it is none."""
        what = f"a verification of version {VERSION}"
        return build(cls, check_fields(load_text(text, what), VERIFICATION_SCHEMA, what))


def _where(row: VerifiedRow) -> str:
    return "" if row.stage is None else f"{'mesh' if row.topic == 'memory' else 'stage'} {row.stage}, "
