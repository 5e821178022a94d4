"""The report says which numbers of microbatches and schedules were compared, and what won by how much."""

import dataclasses

from autopar.explain import explain
from autopar.explain.compared import repeated_text
from autopar.plan import Alternative, Candidate
from tests.explain.test_pipelines import pipeline_of, stage_of
from tests.plan_examples import BATCH, plan_of


def way(num_stages, num_microbatches, schedule, **more):
    """A way to run a step in stages."""
    return Alternative(num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, **more)


def compared(*rows):
    plan = pipeline_of(stage_of(0), stage_of(1))
    chosen = way(2, plan.num_microbatches, plan.schedule, step_s=plan.step_s)
    return dataclasses.replace(plan, compared=(*rows, chosen))


def test_the_fastest_comes_first_and_what_was_not_planned_is_marked():
    step_s = pipeline_of(stage_of(0), stage_of(1)).step_s
    text = explain(
        compared(
            way(4, 8, "interleaved", virtual_stages=2, estimate_s=1.25 * step_s),
            way(2, 16, "zb-h1", recompute=True, step_s=1.125 * step_s),
            way(2, 1, "1f1b"),
            way(2, 2, "1f1b", obstacle="memory"),
            way(2, 64, "1f1b", obstacle="constraints"),
            way(2, 4, "interleaved", virtual_stages=4, obstacle="cut"),
            way(None, 32, "1f1b", at_least_s=1.5 * step_s),
        ),
        full=True,
    )
    assert (
        "is the fastest of 8 ways compared; next is 16 microbatches in schedule zb-h1 with recomputation, 12.5% slower"
        in text
    )
    table = text[text.index("Compared (~: estimated, >: at least)") :].splitlines()[2:10]
    assert [line.split()[1] for line in table] == ["4", "16", "8", "32", "1", "2", "64", "4"]
    assert [line.split("  ")[-1] for line in table] == [
        "chosen",
        "12.5% slower",
        "25.0% slower",
        "at least 50.0% slower",
        "does not fit, or cannot be cut so",
        "does not fit the memory",
        "cannot meet the constraints",
        "cannot be cut so",
    ]
    assert "interleaved x 2  -          ~" in table[2]
    assert table[3].startswith("     -  ")
    assert "  >" in table[3]


def test_many_rows_are_cut_short_unless_all_are_asked_for():
    rows = [way(2, 2**n, "1f1b", estimate_s=float(n)) for n in range(1, 13)]
    assert "... 8 more" in explain(compared(*rows))
    assert "... 8 more" not in explain(compared(*rows), full=True)


def test_where_nothing_else_fits_the_report_says_so_and_where_nothing_was_compared_nothing():
    assert "is the fastest of 2 ways compared: nothing else fits the memory" in explain(compared(way(2, 1, "1f1b")))
    assert "2 ways compared: no other one is possible" in explain(compared(way(2, 1, "1f1b", obstacle="cut")))
    assert "ways compared" not in explain(compared())
    assert "Compared" not in explain(pipeline_of(stage_of(0), stage_of(1)))


def test_a_plan_that_ended_early_says_after_how_long_and_what_was_not_compared():
    plan = dataclasses.replace(compared(), planning_s=60.0, ended_early=True, not_compared=("mesh (2, 4)", "4 stages"))
    more = "more planning seconds would"
    assert f"- planning stopped after 60.0 s; {more} also compare: mesh (2, 4); 4 stages\n" in explain(plan)
    many = dataclasses.replace(plan, not_compared=tuple(f"{n} stages" for n in range(2, 10)))
    assert "; 7 stages; and 2 more\n" in explain(many)
    assert f"- planning stopped after 60.0 s, before everything was compared: {more} compare the rest\n" in explain(
        dataclasses.replace(plan, not_compared=())
    )


def test_a_search_that_ended_by_itself_says_that_more_time_would_find_nothing():
    said = "the search came to its end: more planning seconds would find the same plan"
    plan = dataclasses.replace(compared(), ended_early=False)
    assert said in explain(plan)
    assert "planning stopped" not in explain(plan)
    assert said in " ".join(str(plan).split()), "the page of print(plan) says it too"
    one = stage_of(0).plan
    assert said in explain(dataclasses.replace(one, lower_bound_s=0.5 * one.step_s))
    assert "planning seconds" not in explain(dataclasses.replace(one, lower_bound_s=one.step_s)), "it is proven"


def test_the_end_of_a_search_names_the_meshes_it_left_and_their_rows_have_the_tighter_of_two_bounds():
    plan = stage_of(0).plan
    near, far = Candidate((2, 2, 2), None, 0.92 * plan.step_s), Candidate((2, 1, 4), None, 0.8 * plan.step_s)
    text = " ".join(explain(dataclasses.replace(plan, lower_bound_s=0.9 * plan.step_s, candidates=(near, far))).split())
    assert (
        "came to its end, and left x=2, y=2, z=2 and x=2, y=1, z=4 for the little that could be saved there: mor"
        in text
    )
    assert "another plan could save at most 10.0% of the step" in text
    assert text.count("could save at most 8.0%: left") == 1, "its own bound"
    assert text.count("could save at most 10.0%: left") == 1, "that of all meshes"


def test_a_plan_of_one_mesh_that_ended_early_says_so_too():
    plan = dataclasses.replace(stage_of(0).plan, planning_s=2.0, ended_early=True, not_compared=("2 microbatches",))
    assert "- planning stopped after 2.00 s; " in explain(plan)
    assert " would also compare: 2 microbatches\n" in explain(plan)


def test_what_the_clock_left_out_may_be_faster_than_the_plan():
    step_s = pipeline_of(stage_of(0), stage_of(1)).step_s
    rows = way(2, 16, "zb-h1", estimate_s=0.5 * step_s), way(None, 32, "1f1b", at_least_s=0.75 * step_s)
    plan = compared(*rows, way(2, 1, "1f1b", step_s=2 * step_s))
    text = explain(dataclasses.replace(plan, ended_early=True))
    assert "; next is 1 microbatch in schedule 1f1b, 100.0% slower\n" in text
    assert "- 16 microbatches in schedule zb-h1 may be faster: no time to look into it\n" in text
    assert text.count("may be faster: no time to look into it") == 3
    ended = explain(dataclasses.replace(plan, ended_early=False))
    assert ended.count("may be faster: left, as the estimated gain is not worth planning it") == 3, (
        "the clock had no part in it"
    )
    assert "-50.0%" not in text


def test_ways_that_differ_in_the_layers_of_recomputation_alone_say_of_how_many():
    def again(layers, step_s):
        return Alternative(num_stages=None, num_microbatches=1, recompute=True, recomputed_layers=layers, step_s=step_s)

    plan = plan_of(BATCH, recompute=True, recomputed_layers=1)
    rows = (again(1, plan.step_s), again(3, 1.5 * plan.step_s))
    text = explain(dataclasses.replace(plan, compared=rows))
    assert (
        "1 microbatch with recomputation of 1 layer is the fastest of 2 ways compared; next is 1 microbatch with recomputation "
        "of 3 layers, 50.0% slower"
    ) in text
    assert "backward repeats 1 layer's forward work" in text


def test_ways_that_differ_in_their_stages_alone_are_told_by_these():
    step_s = pipeline_of(stage_of(0), stage_of(1)).step_s
    plan = compared(way(4, 4, "1f1b", step_s=1.5 * step_s), way(8, 4, "1f1b", estimate_s=0.5 * step_s))
    assert (plan.num_microbatches, plan.schedule) == (4, "1f1b")
    text = explain(plan)
    assert (
        "- 4 microbatches in 2 stages in schedule 1f1b is the fastest of 3 ways compared; next is 4 microbatches in 4 stages in "
        "schedule 1f1b, 50.0% slower\n"
    ) in text
    assert "- 4 microbatches in 8 stages in schedule 1f1b may be faster: " in text
    twice = compared(way(2, 4, "1f1b", step_s=1.25 * step_s), way(2, 8, "1f1b", step_s=1.5 * step_s))
    assert "is the fastest of 3 ways compared; next is 8 microbatches in schedule 1f1b, 50.0% slower\n" in explain(
        twice
    )


def test_one_layer_is_not_several():
    ways = [way(1, number, None, step_s=1.0) for number in (1, 2)]
    one, two = (dataclasses.replace(a, recompute=True, recomputed_layers=n) for n, a in zip((1, 2), ways, strict=True))
    assert (repeated_text(one), repeated_text(two)) == ("1 layer's forward work", "2 layers' forward work")


def test_beside_a_plan_that_takes_no_time_others_are_slower_by_their_seconds():
    plan = pipeline_of(stage_of(0), stage_of(1))
    chosen = way(2, plan.num_microbatches, plan.schedule, step_s=0.0)
    text = explain(
        dataclasses.replace(plan, step_s=0.0, compared=(chosen, way(2, 16, "zb-h1", step_s=0.002))), full=True
    )
    assert "2.00 ms slower" in text
    other = Candidate(mesh_shape=(2, 2), step_s=None, at_least_s=0.003)
    one = plan_of(BATCH, compute_s=0.0, comm_s=0.0, hidden_s=0.0, lower_bound_s=0.001, candidates=(other,))
    assert one.step_s == 0
    assert "at least 3.00 ms slower" in explain(one, full=True)
