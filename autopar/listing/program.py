"""The program of a compiled step as text: what goes in, every operation and collective, what comes out.

In: a compiled step. Out: text. On one mesh it is one program; in stages one for each task, with the arrays that tasks hand to
each other. What can go wrong: a long model makes a long text; its lines stand under the modules that they come from.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.avals import Aval
from autopar.compat import Literal, Var
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.execution.pipeline_tasks import PlannedStage
from autopar.layouts.mesh import LogicalMesh
from autopar.listing.lines import Lines, Named
from autopar.program.walk import Scope
from autopar.stages.tasks.cuts import TaskCut, Write, cut_into_tasks
from autopar.stages.tasks.refs import AccumulatorRef, InputRef, NumberRef, OutputRef, Ref, RowRef, SendRef
from autopar.verify.programs import parts_of

_KEY = """\
Shapes are those of one device. Of layouts, [x, -] says that the first dimension is divided over mesh axis x and the second
is whole; partial(x: sum) that devices along x hold terms of a sum. Lines with >> are collectives, with the bytes that one
device holds."""


def text_of(compiled: CompiledStep | CompiledPipeline) -> str:
    """The text of a compiled step."""
    name = compiled.signature.name
    if isinstance(compiled, CompiledStep):
        lines = [f"{name} on {_mesh_text(compiled.assignment.mesh)}", _KEY, "", *_step_lines(compiled)]
        return "\n".join(lines)
    plan = compiled.plan
    lines = [
        f"{name} in {plan.num_stages} stages, {plan.num_microbatches} microbatches, schedule {plan.schedule}",
        _KEY,
    ]
    for part, stage, where in zip(parts_of(compiled), compiled.stages, plan.stages, strict=True):
        last = where.first_device + stage.assignment.mesh.size - 1
        lines += ["", f"stage {part.stage}: {_mesh_text(stage.assignment.mesh)}, {where.first_device} to {last}"]
        times = {program.name: program.times for program in part.programs}
        lines += _stage_lines(stage, times, split_backward="weight_gradient" in compiled.schedule.kinds)
    return "\n".join(lines)


def _mesh_text(mesh: LogicalMesh) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
    return f"mesh {axes}, {mesh.size} device{'s' if mesh.size > 1 else ''}"


def _step_lines(compiled: CompiledStep) -> list[str]:
    """The one program of one mesh."""
    assignment, traced = compiled.assignment, compiled.traced
    program, writer = assignment.program, Lines(assignment, depth=1)
    found = ["inputs"]
    given: dict[Var, Named] = {}
    for v, layout, leaf in zip(program.invars, assignment.inputs, traced.inputs, strict=True):
        given[v] = Named(leaf.path, layout)
        found.append(f"  {leaf.path}: {writer.type_text(v.aval, layout)}")
    scope = Scope(writer, given)
    writer.lines = [*found, "", "program"]
    scope.run(program.equations)
    writer.write("# results")
    results = []
    for atom, layout, leaf in zip(program.outvars, assignment.outputs, traced.outputs, strict=True):
        named = writer.bring(scope.value(atom), layout, atom.aval, scope)
        results.append(f"  {leaf.path}: {writer.type_text(atom.aval, layout)} is {named.name}")
    if writer.lines[-1].strip() == "# results":
        writer.lines.pop()
    return [*writer.lines, "", "outputs", *results]


def _stage_lines(stage: PlannedStage, times: dict[str, int], *, split_backward: bool) -> Iterator[str]:
    """The programs of one stage's tasks."""
    cuts = cut_into_tasks(stage.program, stage.assignment, split_backward=split_backward, kept=frozenset())
    names: dict[Ref, str] = {}
    for cut in cuts:
        runs = times.get(str(cut.name), 1)
        yield f"  task {cut.name}, {'once a step' if runs == 1 else f'{runs} times a step'}"
        yield from _task_lines(cut, stage, names)


def _task_lines(cut: TaskCut, stage: PlannedStage, names: dict[Ref, str]) -> list[str]:
    assignment = stage.assignment
    writer = Lines(assignment, depth=2)
    scope = Scope(writer, {})
    for v, placed in cut.operands.items():
        name = names.setdefault(placed.ref, _ref_text(placed.ref, stage, f"{cut.name}"))
        each = " of each microbatch" if cut.comes_as_list(placed.ref) else ""
        scope.values[v] = Named(name, placed.layout.prepend() if each else placed.layout)
        writer.write(f"takes {name}: {writer.type_text(placed.aval, placed.layout)}{each}")
        if v in cut.entries:
            scope.values[v] = writer.bring(scope.values[v], cut.entries[v], v.aval, scope)
    scope.run(cut.equations)
    for write in cut.writes:
        _write_result(write, stage, names, writer, scope, task=str(cut.name))
    return writer.lines


def _write_result(
    write: Write, stage: PlannedStage, names: dict[Ref, str], writer: Lines, scope: Scope[Named], *, task: str
) -> None:
    named, aval = scope.value(write.atom), _aval_of(write)
    for layout in write.path:
        named = writer.bring(named, layout, aval, scope)
    name = names.setdefault(write.ref, _ref_text(write.ref, stage, f"{named.name} of {task}"))
    writer.write(f"gives {name}: {writer.type_text(aval, write.path[-1])} is {named.name}")


def _aval_of(write: Write) -> Aval:
    atom: Var | Literal = write.atom
    return atom.aval


def _ref_text(ref: Ref, stage: PlannedStage, made: str) -> str:
    """What an array between tasks is called: a leaf's path, or where it is made."""
    step = stage.program.step
    match ref:
        case InputRef() | RowRef():
            return step.inputs[ref.port].path
        case OutputRef() | SendRef():
            return step.outputs[ref.port].path
        case NumberRef():
            return "number of the microbatch"
        case AccumulatorRef():
            return f"sum {ref.carry}"
    return f"<{made}>"
