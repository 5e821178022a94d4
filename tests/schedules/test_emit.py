"""From schedule and tasks to instructions: sent once and early, freed after the last use, and the same results always.

`golden/instructions.txt` shows three small programs. After a change that is meant, write it anew with
`AUTOPAR_WRITE_GOLDEN=1 python -m pytest tests/schedules/test_emit.py -k golden` and read the difference.
"""

import dataclasses
import os
from pathlib import Path

import pytest

from autopar.errors import ScheduleError
from autopar.schedules.chain import make_chain
from autopar.schedules.emit import emit
from autopar.schedules.instructions import Free, Receive, Run, Send, Value
from autopar.schedules.schedules import make_schedule
from tests.schedules.chains import small_schedules
from tests.schedules.task_specs import spec

GOLDEN = Path(__file__).parents[1] / "golden" / "instructions.txt"


def test_the_instructions_are_those_of_the_golden_file():
    blocks = []
    for name, p, m, v in (("1f1b", 2, 2, 1), ("zb-h1", 2, 1, 1), ("inference", 2, 2, 2)):
        program = make_chain(make_schedule(name, num_meshes=p, num_microbatches=m, virtual_stages=v)).emit()
        blocks.append(f"{name}, {p} meshes, {m} microbatches, {v} chunks per mesh\n{program}")
    text = "\n".join(blocks)
    if os.environ.get("AUTOPAR_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_every_value_goes_to_a_mesh_once_right_after_its_task_and_is_received_right_before_its_reader():
    for schedule in small_schedules(max_meshes=3, max_microbatches=5, max_virtual=2):
        program = make_chain(schedule).emit()
        sends = [i for i in program.instructions if isinstance(i, Send)]
        assert len({(send.value, send.target_mesh) for send in sends}) == len(sends)
        assert [send.number for send in sends] == list(range(len(sends)))
        for mesh in range(program.num_meshes):
            row = program.of(mesh)
            for n, instruction in enumerate(row):
                if isinstance(instruction, Send):
                    run = next(i for i in reversed(row[:n]) if not isinstance(i, Send))
                    assert instruction.value in run.writes
                if isinstance(instruction, Receive):
                    run = next(i for i in row[n:] if not isinstance(i, Receive))
                    assert instruction.value in run.reads


def test_every_value_is_freed_right_after_its_last_use():
    for schedule in small_schedules(max_meshes=3, max_microbatches=5, max_virtual=2):
        program = make_chain(schedule).emit()
        for mesh in range(program.num_meshes):
            row = program.of(mesh)
            for n, instruction in enumerate(row):
                if isinstance(instruction, Free):
                    user = next(i for i in reversed(row[:n]) if not isinstance(i, Free))
                    run = next(i for i in reversed(row[:n]) if isinstance(i, Run))
                    used = (*run.reads, *run.writes)
                    assert instruction.value in used or instruction.value == getattr(user, "value", None)


def test_the_global_order_is_that_of_the_schedule_in_time():
    program = make_chain(make_schedule("1f1b", num_meshes=2, num_microbatches=3)).emit()
    runs = [f"{i.kind[0]}{i.stage}@{i.microbatch}" for i in program.instructions if isinstance(i, Run)]
    assert runs == ["f0@0", "f0@1", "f1@0", "b1@0", "b0@0", "f1@1", "b1@1", "f0@2", "b0@1", "f1@2", "b1@2", "b0@2"]


ONE = make_schedule("inference", num_meshes=2, num_microbatches=2)


def values(names):
    return tuple(Value(*(name.split("@")[0], int(name[-1])) if "@" in name else (name,)) for name in names.split())


def two_stages(*more, first="x*", second="h*", writes="h*", inputs=None, outputs=(), consumable=()):
    """Two forwards and whatever else; the inputs' default is x for both microbatches on mesh 0."""
    specs = [spec("f0", 0, "forward", first, writes), spec("f1", 1, "forward", second, "y*"), *more]
    inputs = {0: "x@0 x@1"} if inputs is None else inputs
    wanted = tuple((mesh, values(name)[0]) for mesh, name in outputs)
    eaten = tuple((mesh, value) for mesh, names in consumable for value in values(names))
    return emit(ONE, specs, inputs={m: values(n) for m, n in inputs.items()}, outputs=wanted, consumable=eaten)


def lines(program, mesh):
    return [str(instruction) for instruction in program.of(mesh)]


def test_an_input_that_another_mesh_reads_is_sent_at_the_very_start():
    program = two_stages(second="h* w", inputs={0: "x@0 x@1 w"})
    assert lines(program, 0)[0] == "send w to mesh 1 (transfer 0)"
    assert [line for line in lines(program, 1) if " w " in f"{line} "] == [
        "receive w from mesh 0 (transfer 0)",
        "run f1@0: h@0 w -> y@0",
        "run f1@1: h@1 w -> y@1",
        "free w",
    ]
    assert "free w" not in lines(program, 0), "it is not consumable there"


def test_the_earliest_reader_is_sent_to_first():
    three = make_schedule("inference", num_meshes=3, num_microbatches=1)
    forwards = [spec(f"f{n}", n, "forward", f"h{n}* w" if n else "x* w", f"h{n + 1}*") for n in range(3)]
    early = spec("early", 2, "prologue", "w", "u")
    program = emit(three, [early, *forwards], inputs={0: values("x@0 w")}, outputs=())
    assert lines(program, 0)[:2] == ["send w to mesh 2 (transfer 0)", "send w to mesh 1 (transfer 1)"]


def test_an_input_that_lies_on_both_meshes_is_not_sent():
    program = two_stages(first="x* w", second="h* w", inputs={0: "x@0 x@1 w", 1: "w"})
    assert [send.value.name for send in program.instructions if isinstance(send, Send)] == ["h", "h"]


def test_an_input_that_lies_on_several_meshes_is_sent_to_another_by_the_first_of_them():
    three = make_schedule("inference", num_meshes=3, num_microbatches=1)
    forwards = [spec(f"f{n}", n, "forward", f"h{n}*" if n else "x*", f"h{n + 1}*") for n in range(3)]
    reader = spec("reader", 2, "epilogue", "w", "z")
    program = emit(three, [*forwards, reader], inputs={0: values("x@0 w"), 1: values("w")}, outputs=())
    about_w = [str(i) for i in program.instructions if isinstance(i, Send | Receive) and i.value.name == "w"]
    assert about_w == ["send w to mesh 2 (transfer 0)", "receive w from mesh 0 (transfer 0)"]
    assert lines(program, 0)[0] == about_w[0]


def test_unused_inputs_and_results_are_freed_at_once():
    program = two_stages(inputs={0: "x@0 x@1 unused"}, consumable=[(0, "unused x@0 x@1")])
    assert lines(program, 0)[0] == "free unused"
    assert lines(program, 1)[1:3] == ["run f1@0: h@0 -> y@0", "free h@0"]
    assert lines(program, 1)[3] == "free y@0"


def test_a_prologue_makes_values_for_all_microbatches_and_an_epilogue_gathers_them():
    program = two_stages(
        spec("split", 0, "prologue", "batch", "x*", (0,)),
        spec("concat", 1, "epilogue", "y*", "all", (0,)),
        inputs={0: "batch"},
        outputs=[(1, "all")],
        consumable=[(0, "batch")],
    )
    assert lines(program, 0)[0] == "run split: batch! -> x@0 x@1"
    assert lines(program, 1)[-1] == "run concat: y@0! y@1! -> all"


def test_an_output_is_sent_to_the_mesh_that_wants_it_and_received_at_the_end():
    program = two_stages(
        spec("norm", 1, "epilogue", "y*", "norm"),
        spec("later", 0, "epilogue", "", "z"),
        outputs=[(0, "norm"), (1, "norm")],
    )
    assert lines(program, 0)[-1] == "receive norm from mesh 1 (transfer 2)"
    assert "free norm" not in lines(program, 1)


def test_an_update_keeps_its_name_and_readers_get_the_version_of_their_time():
    """Mesh 1 reads the old parameter in the schedule and the new one afterwards."""
    program = two_stages(
        spec("update", 0, "epilogue", "w", "w", (0,)),
        spec("compare", 1, "epilogue", "w", "gap"),
        second="h* w",
        inputs={0: "x@0 x@1 w"},
        outputs=[(0, "w"), (1, "gap")],
        consumable=[(0, "w")],
    )
    about_w = [line for line in lines(program, 1) if "w" in line.replace(":", " ").split()]
    assert about_w == [
        "receive w from mesh 0 (transfer 0)",
        "run f1@0: h@0 w -> y@0",
        "run f1@1: h@1 w -> y@1",
        "free w",
        "receive w from mesh 0 (transfer 3)",
        "run compare: w -> gap",
        "free w",
    ]


def test_a_new_version_that_is_not_donated_simply_takes_the_name():
    program = two_stages(
        spec("make", 0, "prologue", "", "w"),
        spec("update", 0, "epilogue", "w", "w"),
        outputs=[(0, "w")],
    )
    assert [line for line in lines(program, 0) if "w" in line.split()] == ["run make: - -> w", "run update: w -> w"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"more": [spec("f0", 0, "epilogue")]}, "2 specs are named 'f0'"),
        ({"more": [spec("b", 0, "backward")]}, "the backward of stage 0 does not occur in schedule 'inference'"),
        ({"more": [spec("again", 0, "forward")]}, "the forward of stage 0 has 2 specs, it needs one"),
        ({"more": [spec("e", 2, "epilogue")]}, "'e' is on mesh 2; there are meshes 0 to 1"),
        ({"more": [spec("e", 0, "epilogue", "x* x*")]}, "inputs of 'e' name 'x' more than once"),
        ({"more": [spec("e", 0, "epilogue", "x*", donated=(1,))]}, r"'e' donates inputs \(1,\); it has 1"),
        ({"more": [spec("e", 0, "epilogue", "nothing")]}, "'e' on mesh 0 reads nothing, which no earlier task writes"),
        ({"more": [spec("e", 0, "epilogue", "h")]}, "reads h, .* so far there is h@0, h@1"),
        ({"outputs": [(1, "loss")]}, "An output on mesh 1 is loss, which no earlier task writes and no mesh has"),
        (
            {"more": [spec("e", 1, "epilogue", "", "x*")]},
            "'e' on mesh 1 writes x@0, which is an input of mesh 0. Only a",
        ),
        ({"writes": "h* once"}, "'f0' on mesh 0 writes once, which task 'f0' on mesh 0 has written before"),
        ({"more": [spec("e", 0, "epilogue", "x*", donated=(0,))]}, "donates x@0, an input that is not consumable"),
        (
            {"more": [spec("e", 1, "epilogue", "y*", donated=(0,)), spec("g", 1, "epilogue", "y*")]},
            "task 'e' on mesh 1 donates y@1, and task 'g' reads it afterwards",
        ),
        (
            {"more": [spec("e", 1, "epilogue", "y*", donated=(0,))], "outputs": [(1, "y@1")]},
            "task 'e' on mesh 1 donates y@1, which is an output",
        ),
        (
            {
                "first": "x* count",
                "writes": "h* count",
                "second": "h* count",
                "inputs": {0: "x@0 x@1 count"},
            },
            "'f1' on mesh 1 reads count, which task 'f0' on mesh 0 rewrites for every microbatch",
        ),
    ],
)
def test_tasks_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ScheduleError, match=words):
        two_stages(*arguments.pop("more", ()), **arguments)


def test_a_stage_on_the_wrong_mesh_is_refused():
    work = make_chain(ONE)
    specs = tuple(dataclasses.replace(s, mesh=0) for s in work.specs)
    with pytest.raises(ScheduleError, match="'forward1' is on mesh 0; stage 1 lives on mesh 1"):
        dataclasses.replace(work, specs=specs).emit()
