"""Oracle: the bytes that the runtime's simulator counts on a device while it executes a planned pipeline's own instructions.

In: a plan and its stages. Out: `LiveBytes`, whose figures come from the tasks as they are compiled: from the shapes and shardings
of what they read and write, and from the instructions that the driver would execute. Nothing of the planner's account is used.
"""

import math

import jax

from autopar.avals import itemsize_of
from autopar.execution.contents import Made, Passed
from autopar.execution.devices import device_mesh
from autopar.execution.pipeline_tasks import PlannedStage, make_pipeline_tasks
from autopar.execution.slots import link_tasks
from autopar.inter_op.candidates.pipeline_seconds import schedule_of
from autopar.schedules.emit import emit
from autopar.schedules.instructions import Free, Receive, Run
from autopar.schedules.simulate import simulate

EQUAL = {"forward": 1, "backward": 2, "input_gradient": 1, "weight_gradient": 1}


class LiveBytes:
    """The instructions of a planned pipeline, and what values take on a device of each mesh."""

    def __init__(self, plan, staged):
        self.schedule = schedule_of(plan)
        stages = [
            PlannedStage(
                one.program,
                one.assignment,
                device_mesh(one.assignment.mesh, jax.devices()[where.first_device :]),
                where.mesh,
            )
            for one, where in zip(staged.stages, plan.stages, strict=True)
        ]
        self.tasks = make_pipeline_tasks(stages, split_backward="weight_gradient" in self.schedule.kinds)
        self.links = link_tasks(self.tasks, self.schedule)
        self.instructions = emit(
            self.schedule,
            self.links.specs,
            inputs=self.links.inputs,
            outputs=tuple(self.links.outputs),
            consumable=tuple(self.links.given),
        )

    def peak(self, mesh, *, run_s=lambda run: EQUAL.get(run.kind, 0)):
        """Most bytes of all values on a mesh."""
        return self._most(mesh, lambda value: True, run_s=run_s)

    def handed_on(self, stage, *, run_s=lambda run: EQUAL.get(run.kind, 0)):
        """Most bytes of what tasks of a stage's loop are handed by tasks of any stage's loop."""
        return self._most(self.tasks.mesh_of(stage), lambda value: self._is_handed_to(value, stage), run_s=run_s)

    def handed_on_at_most(self, stage):
        """The same with meshes elsewhere that are infinitely fast, so that all is there that can be."""
        mesh = self.tasks.mesh_of(stage)
        return self.handed_on(stage, run_s=lambda run: int(run.mesh == mesh and run.microbatch is not None))

    def peak_with_temporaries(self, mesh):
        """Most bytes on a mesh that executes its instructions, each task with the temporaries that XLA gives it.

        What an update returns takes the place of the leaves that it is given, of which the instructions know nothing.
        """
        tasks = {n: task for n, task in self.tasks.by_name.items() if self.tasks.mesh_of(n.stage) == mesh}
        accounts = {n: task.run.lower(*task.shapes).compile().memory_analysis() for n, task in tasks.items()}
        temporaries = {
            str(name): account.temp_size_in_bytes - (0 if name.in_loop else account.alias_size_in_bytes)
            for name, account in accounts.items()
        }
        there = {value: self._bytes(value, mesh) for home, value in self.instructions.inputs if home == mesh}
        most = 0
        for instruction in self.instructions.of(mesh):
            if isinstance(instruction, Run):
                there |= {value: self._bytes(value, mesh) for value in instruction.writes}
                most = max(most, sum(there.values()) + temporaries.get(instruction.task, 0))
                donated = {instruction.reads[place] for place in instruction.donated}
                there = {v: size for v, size in there.items() if v not in donated or v in instruction.writes}
            elif isinstance(instruction, Receive):
                there[instruction.value] = self._bytes(instruction.value, mesh)
            elif isinstance(instruction, Free):
                del there[instruction.value]
        return most

    def _most(self, mesh, counts, *, run_s):
        parts = self.instructions.of(mesh)
        there = {v for i in parts for v in ((*i.reads, *i.writes) if isinstance(i, Run) else (i.value,))}
        sizes = {value: self._bytes(value, mesh) for value in there if counts(value)}
        simulation = simulate(self.instructions, run_s=run_s, value_bytes=lambda value: sizes.get(value, 0))
        return simulation.peak_bytes[mesh]

    def _is_handed_to(self, value, stage):
        content = self.links.groups[value.name].content
        return (
            value.microbatch is not None
            and isinstance(content, Passed)
            and isinstance(content.source, Made)
            and content.source.task.in_loop
            and all(reader.stage == stage and reader.in_loop for reader in content.readers)
        )

    def _bytes(self, value, mesh):
        """What the arrays of a slot take: as their maker makes them, or as their reader is given them."""
        group = self.links.groups[value.name]
        source = group.content.source if isinstance(group.content, Passed) else None
        if source is not None and not isinstance(source, Made):
            reader = self.tasks.by_name[group.content.readers[0]]
            shapes = dict(zip(reader.reads, reader.shapes, strict=True))
            given = [shapes[ref] for _, ref in group.items]
            return sum(_bytes_of(shape[0] if isinstance(shape, list) else shape) for shape in given)
        made = [self.tasks.maker_of(item).results[item[1]] for item in group.items]
        if source is not None and self.tasks.mesh_of(source.task.stage) != mesh:
            return sum(map(_bytes_of, made, self.links.targets[value.name]))
        return sum(map(_bytes_of, made))


def _bytes_of(shape, sharding=None):
    """Bytes per device."""
    return math.prod((sharding or shape.sharding).shard_shape(shape.shape)) * itemsize_of(shape)
