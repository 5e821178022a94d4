"""`collectives`: its seconds are those of the cost model, and the winner is the cheapest that may be chosen."""

import pytest

from autopar.cost_model.hardware import find_cluster
from tests.commands.command_line import run
from tests.commands.documents import document


def rows_of(capsys, *argv):
    return document(capsys, "collectives", *argv)["rows"]


def test_rows_are_what_the_cost_model_says_of_every_set_of_axes(capsys):
    rows = rows_of(capsys, "--cluster", "p3.16xlarge", "--mesh", "2,1,8", "--bytes", "1KiB,16MiB")
    costs = find_cluster("p3.16xlarge").mesh_costs((2, 1, 8))
    assert {tuple(row["axes"]) for row in rows} == {(0,), (2,), (0, 2)}
    assert {row["devices"] for row in rows} == {2, 8, 16}
    for row in rows:
        best = costs.best(row["kind"], row["bytes"], row["axes"])
        assert (row["best"], row["seconds"][row["best"]]) == (best.algorithm, best.seconds)
        allowed = {name: s for name, s in row["seconds"].items() if name not in row["only_compared"]}
        assert allowed[row["best"]] == min(allowed.values())
    small, large = (
        next(r for r in rows if (r["kind"], tuple(r["axes"]), r["bytes"]) == ("all-reduce", (0, 2), size))
        for size in (2**10, 2**24)
    )
    assert small["seconds"][small["best"]] < large["seconds"][large["best"]]


def test_a_table_names_the_winner_and_the_others(capsys):
    assert run("collectives", "--cluster", "dgx-h100", "--mesh", "4", "--bytes", "1MiB") == 0
    printed = capsys.readouterr().out
    assert "4 devices along axis 0" in printed
    assert "all-to-all" in printed


def test_algorithms_that_are_priced_for_comparison_are_marked_and_explained_below(capsys):
    assert run("collectives", "--cluster", "dgx-h100", "--mesh", "2", "--bytes", "1KiB") == 0
    printed = capsys.readouterr().out
    assert "naive* " in printed
    assert printed.endswith(
        "*: for comparison: not implemented by the libraries that run collectives, so never chosen, however short\n"
    )


def test_a_mesh_that_the_cluster_cannot_hold_is_refused(capsys):
    assert run("collectives", "--cluster", "b200", "--mesh", "4,x") == 2
    assert "'x' is not a whole number" in capsys.readouterr().err
    assert run("collectives", "--cluster", "no-such", "--mesh", "4") == 2
    assert "no cluster preset 'no-such'" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["1", "1,1"])
def test_one_device_is_said_to_need_no_collectives(mesh, capsys):
    assert run("collectives", "--mesh", mesh) == 0
    said = f"1 device of cpu, mesh {mesh.replace(',', ' x ')}: one device needs no collectives\n"
    assert capsys.readouterr().out == said
    assert document(capsys, "collectives", "--mesh", mesh)["rows"] == []
