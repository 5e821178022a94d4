"""A plan, and answers about it, as the JSON that commands print.

In: a plan, an answer. Out: dictionaries as `plan.schema.json` and `error.schema.json` in `commands/schemas` say.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from autopar.commands.arguments.in_flags import in_flags
from autopar.errors import OutOfMemoryError
from autopar.explain.figures import figures_of, parts_of
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.settings import Settings, make_request
from autopar.why.classic import Classic
from autopar.why.report import Why, WhyNot
from autopar.why.what_if import WhatIf


def plan_document(plan: Plan | PipelinePlan) -> dict[str, object]:
    """What was decided and predicted, and the plan itself as `plan -o` writes it."""
    stages = [stage.plan for stage in plan.stages] if isinstance(plan, PipelinePlan) else [plan]
    return {
        "cluster": plan.cluster,
        "devices": plan.num_devices,
        "stages": len(stages),
        "meshes": [dict(zip(one.axis_names, one.mesh_shape, strict=True)) for one in stages],
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule if isinstance(plan, PipelinePlan) else None,
        "step_s": plan.step_s,
        "peak_bytes": plan.peak_bytes,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "planning_s": plan.planning_s,
        "figures": dataclasses.asdict(figures_of(plan)),
        "parts": [{"name": part.name, "seconds": part.seconds, "waited_s": part.waited_s} for part in parts_of(plan)],
        "plan": json.loads(plan.to_json()),
    }


def leaf_document(why: Why) -> dict[str, object]:
    """Why a leaf has its layout."""
    return {"why": dataclasses.asdict(why.answer)}


def answers_document(answers: Mapping[str, Classic | WhatIf]) -> dict[str, object]:
    """Other plans beside one, as rows."""
    return {name: [dataclasses.asdict(row) for row in answer.rows] for name, answer in answers.items()}


def conflict_document(found: WhyNot) -> dict[str, object]:
    """Why nothing fits, and what to give up."""
    return {"conflict": dataclasses.asdict(found.answer)}


def misfit_document(error: OutOfMemoryError) -> dict[str, object]:
    """That nothing fits: by how much, and what weighs most."""
    asked = error.asked[0] if error.asked is not None else None
    return {
        "error": {
            "kind": "out_of_memory",
            "message": in_flags(str(error)),
            "limit_bytes": make_request(asked).memory_limit_bytes if isinstance(asked, Settings) else None,
            "needed_bytes": error.needed_bytes,
            "bound_bytes": error.bound_bytes,
            "tensors": list(error.tensors),
            "is_settled": error.is_settled,
        }
    }
