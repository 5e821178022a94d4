"""Files that are changed at random: plans, clusters and tables are used, or refused as an AutoparError, in a bounded time."""

import copy
import csv
import io
import json
import random
import re
import signal

import pytest
from rich.console import Console

import autopar
from autopar import AutoparError
from autopar.commands.simulated.simulate import price_rows
from autopar.cost_model.cluster_files import ClusterFileError, load_cluster
from autopar.cost_model.json_files import schema_at, violations
from autopar.files.checked import PLAN_SCHEMA
from autopar.reports.report import show
from autopar.rules.notation import parse
from autopar.simulate.error_summary import PricedRow
from autopar.simulate.rows import RowError, read_table
from tests.run_tables import FAMILIES, GOOD, SMALL_PLAN
from tests.test_plan import make_batch, make_state, train_step

LONGEST_S = 20
OTHERS = (None, True, -1, 0, 1, 2, 7, 0.5, 1e300, 2**70, "", "x", "nope", [], {}, [[]], [["x"]], {"x": 1})


@pytest.fixture(scope="module")
def texts():
    """Plans of a step on one mesh and in stages."""
    ways = ({"mesh_shape": (8,)}, {"mesh_shape": (2, 4)}, {"num_stages": 2, "num_microbatches": 4})
    plans = [autopar.parallelize(train_step, devices=8, **way).plan(make_state(), make_batch()) for way in ways]
    return [plan.to_json() for plan in plans]


def places(value, path=()):
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def change(draw: random.Random, text: str, others: list[str]) -> str:
    """A text with one to three changes."""
    fields = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        path = draw.choice([*places(fields)][1:])
        holder, key = at(fields, path[:-1]), path[-1]
        match draw.choice(("value", "delete", "double", "swap", "number", "other", "unknown")):
            case "value":
                holder[key] = copy.deepcopy(draw.choice(OTHERS))
            case "delete":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
            case "swap":
                other = draw.choice([*(holder if isinstance(holder, dict) else range(len(holder)))])
                holder[key], holder[other] = holder[other], holder[key]
            case "number" if isinstance(holder[key], int | float):
                holder[key] = draw.choice((holder[key] + 1, holder[key] * 2, -holder[key], 10**9))
            case "other":
                given = json.loads(draw.choice(others))
                holder[key] = at(given, draw.choice([*places(given)][1:]))
            case "unknown" if isinstance(holder, dict):
                holder[draw.choice("abc")] = holder[key]
        if not any(True for _ in [*places(fields)][1:]):
            break
    changed = json.dumps(fields)
    match draw.randrange(40):
        case 0:
            return changed[: draw.randrange(len(changed))]
        case 1:
            return changed.replace("1", draw.choice(("NaN", "Infinity", "1e999", "9" * 5000, "[" * 5000)), 1)
    return changed


class _TooLongError(Exception):
    """A file took too long."""


def bounded(use) -> bool:
    """Whether a use went well; False if it was refused. Anything else is an error of the test."""

    def late(*_):
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    try:
        use()
    except (AutoparError, ClusterFileError):
        return False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return True


def use_plan(text):
    plan = autopar.plan_from_json(text)
    show(plan, Console(file=io.StringIO(), width=160), full=True)
    autopar.parallelize(train_step, plan=plan, devices=8).plan(make_state(), make_batch())


def test_plans_that_are_written_follow_the_schema(texts):
    assert [violations(json.loads(text), schema_at(PLAN_SCHEMA)) for text in texts] == [[], [], []]
    assert all(bounded(lambda text=text: use_plan(text)) for text in texts)


@pytest.mark.fault(23)
@pytest.mark.parametrize("count", [150, pytest.param(8000, marks=pytest.mark.slow)])
def test_changed_plans_are_used_or_refused(count, texts):
    draw, refused = random.Random(count), 0
    for _ in range(count):
        text = change(draw, draw.choice(texts), texts)
        refused += not bounded(lambda text=text: use_plan(text))
    assert refused > 0.5 * count


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_changed_clusters_are_used_or_refused(count, tmp_path, request):
    folder = request.config.rootpath / "cost_model" / "clusters"
    texts = [(folder / name).read_text() for name in ("cpu.json", "mixed-a100-v100.json", "tpu-v4.json")]
    draw, refused = random.Random(count), 0
    for _ in range(count):
        (tmp_path / "c.json").write_text(change(draw, draw.choice(texts), texts))

        def use():
            load_cluster(tmp_path / "c.json").mesh_costs((2,)).all_reduce_s(1e6, (0,))

        refused += not bounded(use)
    assert refused > 0.3 * count


CELLS = ("", "0", "1", "-1", "2", "3", "7", "64", "1000", "0.5", "1e9", "1e400", "nan", "x", "gpt", "moe", "full", "é,")
ROWS = [GOOD | SMALL_PLAN | {"family": family} | changes for family, changes in FAMILIES.items()]
ROWS += [GOOD, GOOD | {"step_s": "-1"}]


def change_table(draw: random.Random) -> bytes:
    """A table of one to three runs with one to four changes, of cells mostly."""
    header, *rows = [[*GOOD], *([*draw.choice(ROWS).values()] for _ in range(draw.randint(1, 3)))]
    for _ in range(draw.randint(1, 4)):
        row = draw.choice(rows)
        match draw.randrange(11):
            case 0 if len(header) > 1:
                del header[draw.randrange(len(header))]
            case 1:
                header[draw.randrange(len(header))] = draw.choice([*GOOD, "width_factor", "experts", ""])
            case 2:
                row.insert(draw.randrange(len(row)), draw.choice(CELLS))
            case 3 if row:
                del row[draw.randrange(len(row)) :]
            case _ if row:
                place = draw.randrange(len(row))
                other = draw.choice(ROWS)[[*GOOD][place % len(GOOD)]]
                row[place] = draw.choice((*CELLS, other, row[place] + draw.choice("05x")))
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    made = text.getvalue().encode()
    match draw.randrange(40):
        case 0:
            return made[: draw.randrange(len(made))]
        case 1:
            return made.replace(b"1", draw.choice((b"\xff", b'"', b"\0", b"9" * 5000)), 1)
    return made


def price_table(path) -> bool:
    """Whether all rows of a table could be priced; those that could not are told by row and column."""
    found = price_rows(read_table(path), None)
    wrong = [str(row) for row in found if isinstance(row, RowError)]
    assert all(re.match(r"row \d+ \(.*\): (column '|has (more|fewer) cells)", text, re.DOTALL) for text in wrong), wrong
    assert all(row.predicted.step.step_s > 0 for row in found if isinstance(row, PricedRow))
    return not wrong


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_changed_tables_are_priced_or_told_by_row_and_column(count, tmp_path):
    draw, told = random.Random(count), 0
    for _ in range(count):
        (tmp_path / "rows.csv").write_bytes(change_table(draw))
        complete = []
        is_table = bounded(lambda complete=complete: complete.append(price_table(tmp_path / "rows.csv")))
        told += not is_table or not complete[0]
    assert 0.3 * count < told < count


@pytest.mark.parametrize("count", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_text_is_a_rule_or_a_rule_error(count):
    draw = random.Random(count)
    words = [
        "a",
        "b",
        "c",
        "1",
        ".",
        "(",
        ")",
        "(a b)",
        ",",
        "->",
        "|",
        "sum: a",
        "linear:",
        "0",
        ";",
        "any",
        ":",
        "é",
        " ",
    ]
    read = 0
    for _ in range(count):
        text = " ".join(draw.choices(words, k=draw.randint(0, 9)))
        read += bounded(lambda text=text: parse(text, [(4,)], [(4,)]))
    assert read + bounded(lambda: parse("a -> a", [(4,)], [(4,)])) > 0


@pytest.mark.parametrize("name", ["allow_redundant_compute", "plan_cache"])
@pytest.mark.parametrize("given", [[], {}, 1, "yes", None])
def test_a_switch_that_is_none_is_refused_by_its_name(name, given):
    with pytest.raises(autopar.ArgumentError, match=rf"{name}=.*: True or False is expected"):
        autopar.parallelize(train_step, **{name: given})


@pytest.mark.parametrize("number", [2**31, 10**40, -(10**400)])
def test_a_whole_number_that_no_type_holds_is_refused(number):
    with pytest.raises(autopar.ArgumentError, match="which int32 does not hold: pass a float"):
        autopar.parallelize(train_step, devices=8).plan(make_state(), make_batch() | {"x": number})
