"""Tasks written in one line."""

from autopar.schedules.instructions import Slot, TaskSpec


def spec(name, mesh, kind, reads="", writes="", donated=(), stage=None):
    """Slots by name; a name that ends in * is per microbatch."""

    def slots(names):
        return tuple(Slot(name.rstrip("*"), name.endswith("*")) for name in names.split())

    return TaskSpec(
        name=name,
        mesh=mesh,
        kind=kind,
        stage=mesh if stage is None else stage,
        inputs=slots(reads),
        outputs=slots(writes),
        donated=donated,
    )
