"""Plan files: their text, checked by the schema and by meaning.

In: text. Out: the JSON of a plan whose parts agree: axes that its mesh has, dimensions that they divide, bytes that follow from
both, strategies of layouts that the plan lists, stages in order on devices of their own. What can go wrong: text of another
version, or by another hand; PlanError says what does not agree with what. Whether a plan fits a program is for `restore`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from autopar.cost_model.cluster_files import FORMAT as CLUSTER_FORMAT
from autopar.cost_model.json_files import shown
from autopar.errors import PlanError
from autopar.files.checked import PLAN_SCHEMA, Fields, check_fields, load_text

VERSION = 2
_WHAT = f"a plan of version {VERSION}"
_MOST_DEVICES = _MOST_TASKS = 2**20
"""How many devices a plan may have, and how many microbatches all its stages together: what it says can be drawn and run."""
_MOST_PROBLEMS = 5


def is_pipeline(value: object) -> bool:
    """Whether the JSON of a file says that it is a pipeline."""
    return isinstance(value, dict) and value.get("kind") == "pipeline"


def load_plan(text: str) -> Fields:
    """The JSON of a plan of either kind. Raises PlanError."""
    value = load_text(text, "a plan")
    if isinstance(value, dict) and value.get("format") == CLUSTER_FORMAT:
        raise PlanError("this is a cluster file, which --cluster takes, not a plan")
    if not isinstance(value, dict) or "version" not in value:
        raise PlanError("not a plan: a JSON object with a 'version' is expected")
    if value["version"] != VERSION:
        raise PlanError(
            f"a plan of version {shown(value['version'])}, this autopar reads version {VERSION}: plan again"
        )
    fields = check_fields(value, PLAN_SCHEMA, _WHAT)
    found = _pipeline_problems(fields) if is_pipeline(value) else _mesh_problems(fields)
    problems = list(itertools.islice(found, _MOST_PROBLEMS))
    if problems:
        raise PlanError(f"not {_WHAT}: {'; '.join(problems)}")
    return fields


def _mesh_problems(plan: Fields, place: str = "") -> Iterator[str]:
    """What does not agree in the plan of one mesh."""
    names, sizes = plan["axis_names"], plan["mesh_shape"]
    if len(names) != len(sizes) or len(set(names)) < len(names):
        yield f"{place}axis_names: {len(sizes)} different names are expected, a name for each axis of mesh_shape"
        return
    if math.prod(sizes) > _MOST_DEVICES:
        yield f"{place}mesh_shape is {shown(sizes)}; at most {_MOST_DEVICES:,} devices are expected"
    mesh = dict(zip(names, sizes, strict=True))
    for side in ("inputs", "outputs"):
        for number, value in enumerate(plan[side]):
            for problem in _value_problems(value, mesh):
                yield f"{place}{side}.{number} ({value['path']}): {problem}"
    for number, collective in enumerate(plan["collectives"]):
        for problem in _axes_problems(collective["axes"], mesh):
            yield f"{place}collectives.{number}: {problem}"
    yield from _table_problems(plan, mesh, place)


def _value_problems(value: Fields, mesh: Mapping[str, int]) -> Iterator[str]:
    shape, spec = value["shape"], value["spec"]
    if len(spec) != len(shape):
        yield f"spec has {len(spec)} items; one for each of the {len(shape)} dimensions is expected"
        return
    found = list(_axes_problems([axis for axes in spec for axis in axes], mesh))
    yield from found
    if found:
        return
    for size, axes in zip(shape, spec, strict=True):
        ways = math.prod(mesh[axis] for axis in axes)
        if ways > 1 and (size == 0 or size % ways):
            yield f"the axes {shown(axes)} cut in {ways} parts, which do not divide a dimension of {size}"
            return
    ways = math.prod(mesh[axis] for axes in spec for axis in axes)
    itemsize = _itemsize(value["dtype"])
    if itemsize is not None and value["bytes_per_device"] * ways != math.prod(shape) * itemsize:
        each = math.prod(shape) * itemsize // ways
        yield f"bytes_per_device is {value['bytes_per_device']}; {each} of {value['dtype']} are expected"


def _itemsize(dtype: str) -> int | None:
    """Bytes of one element; None for types that are no numbers, such as random keys."""
    try:
        return jnp.dtype(dtype).itemsize
    except TypeError:
        return None


def _axes_problems(axes: Sequence[str], mesh: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with axes that do something together: they have to be the mesh's, and each is there once."""
    for axis in dict.fromkeys(axes):
        if axis not in mesh:
            yield f"{shown(axis)} is no axis of the mesh, which has {', '.join(mesh)}"
        elif axes.count(axis) > 1:
            yield f"axis {shown(axis)} is there twice"


def _table_problems(plan: Fields, mesh: Mapping[str, int], place: str) -> Iterator[str]:
    """What is wrong with the tables of layouts and strategies, and with what refers to them."""
    for table in ("layouts", "strategies"):
        known = [row["name"] for row in plan[table]]
        for name in {name for name in known if known.count(name) > 1} if len(set(known)) < len(known) else ():
            yield f"{place}{table}: {shown(name)} is there twice"
    for layout in plan["layouts"]:
        axes = [axis for axes in layout["spec"] for axis in axes] + [axis for axis, _ in layout.get("partial", ())]
        for problem in _axes_problems(axes, mesh):
            yield f"{place}layouts: {shown(layout['name'])}: {problem}"
    layouts, strategies = ({row["name"] for row in plan[table]} for table in ("layouts", "strategies"))
    for strategy in plan["strategies"]:
        for name in (*strategy["takes"], *strategy["gives"]):
            if name not in layouts:
                yield f"{place}strategies: {shown(strategy['name'])} has the layout {shown(name)}, which layouts lacks"
    for number, name in enumerate(plan["equations"]):
        if name not in strategies:
            yield f"{place}equations.{number} is {shown(name)}, which strategies lacks"
    if 2 * len(plan["equations"]) != len(plan["trail"]):
        yield f"{place}trail: two digits for each of the {len(plan['equations'])} equations are expected"


def _first_devices(stages: Sequence[Fields], sizes: Sequence[int]) -> list[int]:
    """Where the devices of each mesh begin: behind those of the mesh before it, on its kind of node if the nodes are unlike.

    Meshes lie in the order of their first devices, which need not be that of the pipeline. Kinds lie one behind the other, and
    a plan may leave a kind out.
    """
    kinds = [stage.get("node_kind", "") for stage in stages]
    begins = {
        kind: min(s["first_device"] for s, k in zip(stages, kinds, strict=True) if k == kind) for kind in kinds if kind
    }
    ends = {kind: begins[kind] + sum(n for n, k in zip(sizes, kinds, strict=False) if k == kind) for kind in begins}
    apart = all(ends[a] <= begins[b] or ends[b] <= begins[a] for a, b in itertools.combinations(begins, 2))
    free = begins | {"": 0} if apart else dict.fromkeys(kinds, 0)
    found = [0] * len(kinds)
    for number in sorted(range(len(kinds)), key=lambda number: stages[number]["first_device"]):
        found[number] = free[kinds[number]]
        free[kinds[number]] += sizes[number]
    return found


def _pipeline_problems(plan: Fields) -> Iterator[str]:
    """What does not agree in the plan of a pipeline."""
    stages, count = plan["stages"], len(plan["stages"])
    meshes, virtual = divmod(count, plan["virtual_stages"])
    if virtual or not meshes:
        yield f"virtual_stages is {plan['virtual_stages']}, which does not divide {count} stages among meshes"
        return
    if count * plan["num_microbatches"] > _MOST_TASKS:
        yield f"num_microbatches is {plan['num_microbatches']}; {count} stages may have {_MOST_TASKS // count:,} at most"
    if len(plan["cuts"]) not in (0, count - 1) or any(a >= b for a, b in itertools.pairwise(plan["cuts"])):
        yield f"cuts: {count - 1} ascending numbers are expected between {count} stages"
    if plan.get("recompute", False) != any(stage.get("recomputed_share", 0) for stage in stages):
        yield "recompute does not agree with recomputed_share of the stages"
    sizes = [math.prod(stage["plan"]["mesh_shape"]) for stage in stages]
    first = _first_devices(stages[:meshes], sizes)
    homes: dict[str, int] = {}
    for number, stage in enumerate(stages):
        place = f"stages.{number}."
        wanted = {"stage": number, "mesh": number % meshes, "first_device": first[number % meshes]}
        yield from (
            f"{place}{name} is {stage[name]}; {n} is expected" for name, n in wanted.items() if stage[name] != n
        )
        if sizes[number] != sizes[number % meshes]:
            yield f"{place}plan.mesh_shape has another number of devices than stage {number % meshes} of the same mesh"
        if stage["plan"].get("num_microbatches", 1) not in (1, plan["num_microbatches"]):
            yield f"{place}plan.num_microbatches is not that of the pipeline"
        for path in stage["leaves"]:
            if homes.setdefault(path, number) != number:
                yield f"{place}leaves: {shown(path)} lives on stage {homes[path]} already"
        yield from _mesh_problems(stage["plan"], f"{place}plan.")
    for number, transfer in enumerate(plan["transfers"]):
        if max(transfer["source"], transfer["target"]) >= count:
            yield f"transfers.{number} is between stages {transfer['source']} and {transfer['target']}; there are {count}"
