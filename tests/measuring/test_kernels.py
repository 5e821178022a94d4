"""Kernels of GPUs are led back to the instructions of a program, those of CUDA graphs too, which name none."""

import collections
import dataclasses

import pytest

from autopar.cost_model.hardware import preset
from autopar.hlo.contractions import arithmetic
from autopar.hlo.text import parse_module
from autopar.measuring.kernels import instructions_of
from autopar.measuring.operations import operations_that_ran
from autopar.measuring.profile import Seen, _of_device, read_profile
from autopar.recording.compare import compare
from autopar.recording.device_times import device_times
from autopar.recording.recorded import KERNEL, RecordedCall
from autopar.recording.refit import refit
from autopar.recording.run import RecordedRun
from tests.measuring.gpu_profiles import HEAD, entry, fusion, hlo_of, library, profile_of, ran
from tests.plan_examples import collective, plan_of
from tests.recording.recordings import on_one_mesh

ONE = plan_of(mesh_shape=(1,), axis_names=("x",))
LONG = "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<xmma__5x_cudnn::implicit_gemm>"


def names_of(kernels, hlo_text):
    return instructions_of(kernels, parse_module(hlo_text))


def recording(found, plan=ONE):
    """A call that was looked into, as the recorder makes it."""
    return on_one_mesh(
        plan_text=plan.to_json(),
        calls=(RecordedCall(number=1, wall_s=25e-3, is_detailed=True),),
        program=tuple(found.program.values()),
        operations=tuple(found.operations),
        missing=found.missing,
    )


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    return read_profile(profile_of("mlp_h100", tmp_path_factory.mktemp("profile")))


@pytest.fixture(scope="module")
def mlp_recording(mlp):
    return recording(operations_that_ran([(1, one) for one in mlp], hlo_of("mlp_h100"), ONE, {0: 0}))


def test_a_real_graph_is_the_program_in_its_order(mlp_recording):
    """All 110 fusions and library calls of the entry, each once, though one kernel serves up to seven of them."""
    computations = parse_module(hlo_of("mlp_h100")).values()
    (program,) = [list(one.instructions.values()) for one in computations if one.is_entry]
    wanted = [one.name for one in program if one.opcode in ("fusion", "custom-call")]
    executed = [one.name for one in mlp_recording.operations if not one.goes_on]
    assert executed == wanted
    assert len(wanted) == 110
    assert mlp_recording.missing == ()


def test_products_of_a_real_graph_are_those_of_the_program(mlp_recording):
    seen = [mlp_recording.operation(one) for one in mlp_recording.operations if not one.goes_on]
    assert sum(one.flops for one in seen) == arithmetic(hlo_of("mlp_h100")).flops > 1e13
    further = collections.Counter(one.name for one in mlp_recording.operations if one.goes_on)
    assert set(further.values()) == {1}
    assert {one.opcode for one in mlp_recording.program if one.name in further} == {"custom-call"}


def test_the_seconds_of_a_real_graph_are_all_there(mlp_recording):
    (times,) = device_times(mlp_recording, 1)
    assert sum(one.seconds for one in mlp_recording.operations) == pytest.approx(24.922e-3, abs=1e-6)
    assert times.compute_s == pytest.approx(24.898e-3, abs=1e-6)
    assert times.compute_s + times.idle_s == pytest.approx(24.966e-3, abs=1e-6)


def test_the_page_names_operations_of_the_program(mlp_recording):
    text = str(RecordedRun(mlp_recording))
    assert "not measured" not in text
    *rows, rest = text[text.index("The operations that took longest") :].splitlines()[2:]
    assert rest.startswith("... ")
    assert all(row.split()[0].startswith("custom-call.") and row.split()[1] == "1" for row in rows)


def test_a_profile_without_modules_and_operations_tells_as_much(mlp, mlp_recording):
    bare = [(1, dataclasses.replace(one, module="")) for one in mlp]
    assert recording(operations_that_ran(bare, hlo_of("mlp_h100"), ONE, {0: 0})) == mlp_recording


def test_what_other_programs_ran_is_left_out():
    text = HEAD + entry(fusion("add.1", "x", "fused_add"))
    seen = [*ran("add_1"), *ran("add_1", module="jit_other", first=5), *ran("add_1", device=3, first=9)]
    found = operations_that_ran([(1, one) for one in seen], text, ONE, {0: 0})
    assert [(one.name, one.start_s) for one in found.operations] == [("add.1", 0.0)]


def test_operations_that_the_program_does_not_name_are_said_to_be_left_out():
    text = HEAD + entry(fusion("add.1", "x", "fused_add"))
    seen = [dataclasses.replace(one, kernel="") for one in ran("add.1", "renamed.5", graph=None)]
    found = operations_that_ran([(1, one) for one in seen], text, ONE, {0: 0})
    assert [one.name for one in found.operations] == ["add.1"]
    assert found.missing == ("1.00 ms of operations that the compiled program does not name, such as renamed.5",)


TWO_CALLS = HEAD + entry(
    fusion("add.1", "x", "fused_add"),
    library("gemm.1", "add.1"),
    library("gemm.2", "gemm.1"),
    fusion("add.2", "gemm.2", "fused_add.1"),
)


def test_each_of_several_library_calls_has_a_kernel_and_the_fills_before_it():
    kernels = ran("add_1", "Memset 0", "nvjet", "nvjet", "add_1")
    assert names_of(kernels, TWO_CALLS) == ["add.1", "gemm.1", "gemm.1", "gemm.2", "add.2"]


def test_kernels_that_may_be_of_either_call_are_recorded_under_their_own_names_and_that_is_said():
    found = operations_that_ran([(1, one) for one in ran("add_1", "a", LONG, "b", "add_1")], TWO_CALLS, ONE, {0: 0})
    recorded = recording(found)
    assert [one.name for one in found.operations] == ["add.1", "a", LONG, "b", "add.2"]
    assert {one.opcode for one in recorded.program if one.name in ("a", LONG, "b")} == {KERNEL}
    assert compare(recorded)["compute"].measured_s == pytest.approx(5e-3)
    text = str(RecordedRun(recorded))
    assert "not measured: which operations of the program 3.00 ms of kernels (60.0%) ran for" in text
    (row,) = [line for line in text.splitlines() if line.startswith("void cask_plugin")]
    assert row.split()[-4:] == ["1", "1.00", "ms", "-"]
    assert "implicit_gemm" not in row


def test_a_graph_that_no_stretch_explains_keeps_the_fusions_names():
    assert names_of(ran("add_1", "nvjet", "add_2", "add_1"), TWO_CALLS) == ["add.1", None, "add.2", "add.1"]


def test_the_stretch_that_goes_on_where_the_program_was_is_the_one():
    text = HEAD + entry(
        fusion("add.1", "x", "fused_add"),
        library("conv.1", "add.1", "__cudnn$convForward"),
        fusion("add.2", "conv.1", "fused_add.1"),
        library("conv.2", "add.2", "__cudnn$convForward"),
        fusion("exp.7", "conv.2", "fused_exp"),
    )
    alone = {"graph": None}
    kernels = [
        *ran("add_1", graph=1),
        *ran("conv.1", "conv.1", **alone),
        *ran("add_1", graph=2),
        *ran("conv.2", **alone),
        *ran("exp_7", graph=3),
    ]
    assert names_of(kernels, text) == ["add.1", "conv.1", "conv.1", "add.2", "conv.2", "exp.7"]
    assert names_of(ran("add_1", graph=2), text) == ["add.1"]


LOOP = """
%body{n} (b{n}: f32[8]) -> f32[8] {{
  %b{n} = f32[8]{{0}} parameter(0)
  %add.{n} = f32[8]{{0}} fusion(%b{n}), kind=kLoop, calls=%{calls}
  ROOT %gemm.{n} = f32[8]{{0}} custom-call(%add.{n}), custom_call_target="__cublas$lt$matmul"
}}

%condition{n} (c{n}: f32[8]) -> pred[] {{
  %c{n} = f32[8]{{0}} parameter(0)
  ROOT %less.{n} = pred[] compare(%c{n}, %c{n}), direction=LT
}}
"""


def test_equal_loops_are_told_apart_by_where_the_program_is():
    loops = LOOP.format(n=1, calls="fused_add") + LOOP.format(n=2, calls="fused_add.1")
    text = (
        HEAD
        + loops
        + entry(
            fusion("exp.7", "x", "fused_exp"),
            *(
                f"  %while.{n} = f32[8]{{0}} while(%{of}), condition=%condition{n}, body=%body{n}\n"
                for n, of in ((1, "exp.7"), (2, "while.1"))
            ),
        )
    )
    first, second = ran("add_1", "nvjet", graph=2), ran("add_1", "nvjet", graph=3)
    kernels = [*ran("exp.7", graph=None)]
    for loop, turn in ((1, first), (1, first), (2, second), (2, second)):
        kernels += [*ran(f"less.{loop}", f"while.{loop}", graph=None), *turn]
    names = names_of(kernels, text)
    assert [name for name in names if str(name).startswith(("add", "gemm", "None"))] == [
        *("add.1", "gemm.1") * 2,
        *("add.2", "gemm.2") * 2,
    ]


def all_reduce(name: str, operand: str) -> str:
    return f"  %{name} = f32[8]{{0}} all-reduce-start(%{operand}), replica_groups={{{{0,1}}}}, to_apply=%fused_add\n"


COLLECTIVES = HEAD + entry(
    fusion("add.1", "x", "fused_add"),
    all_reduce("reduce.1", "add.1"),
    fusion("exp.7", "add.1", "fused_exp"),
    all_reduce("reduce.2", "exp.7"),
)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
TWO = plan_of(collectives=(collective("all-reduce", "x"),), mesh_shape=(2,), axis_names=("x",))


def test_kernels_of_collectives_beside_compute_are_those_of_the_program_in_order():
    found = operations_that_ran([(1, one) for one in ran("add_1", NCCL, "exp_7", NCCL)], COLLECTIVES, TWO, {0: 0})
    assert [one.name for one in found.operations] == ["add.1", "reduce.1", "exp.7", "reduce.2"]
    assert found.program["", "reduce.1"].axes == ("x",)


def test_a_kernel_of_collectives_that_is_nobody_s_is_communication_and_leaves_its_row_open():
    found = operations_that_ran([(1, one) for one in ran("add_1", NCCL, "exp_7")], COLLECTIVES, TWO, {0: 0})
    comparison = compare(recording(found, TWO))
    assert comparison["communication that is waited for"].measured_s == pytest.approx(1e-3)
    part = comparison["all-reduce over x"]
    assert (part.measured_s, part.note) == (None, "its kernels could not be told from others")


def test_products_and_the_rest_are_refitted_together_if_kernels_are_nobody_s():
    found = operations_that_ran([(1, one) for one in ran("add_1", "a", "b", "c", "add_1")], TWO_CALLS, ONE, {0: 0})
    said = refit(preset("dgx-h100"), [recording(found)]).fitted
    assert said[0].startswith("all compute takes")


@dataclasses.dataclass
class Event:
    name: str
    stats: list
    start_ns: float = 0.0
    duration_ns: float = 1000.0


@dataclasses.dataclass
class Row:
    name: str
    events: list


def test_copies_of_jax_s_own_are_no_part_of_a_program_and_those_of_graphs_are():
    graph = [("cuda_graph_id", 3), ("correlation_id", 8)]
    events = [
        Event("MemcpyH2D", []),
        Event("MemcpyD2D", graph),
        Event("nvjet", graph),
        Event("gemm", [("hlo_op", "gemm.1"), ("hlo_module", "jit_run")]),
    ]
    plane = Row("/device:GPU:1", [])
    plane.lines = [Row("Stream #14(Compute)", events), Row("XLA Ops", [Event("step", [("hlo_op", "whole")])])]
    seen = list(_of_device(plane))
    assert [(one.kernel, one.name, one.graph) for one in seen] == [
        ("MemcpyD2D", "", (3, 8)),
        ("nvjet", "", (3, 8)),
        ("gemm", "gemm.1", None),
    ]
    assert all(isinstance(one, Seen) and one.device == 1 for one in seen)
