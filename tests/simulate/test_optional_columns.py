"""`simulate --table`: optional columns by plans of the parts and in closed form, and those that only the latter prices."""

import pytest

from autopar.cost_model.hardware import find_cluster
from tests.run_tables import GOOD, SMALL_PLAN, json_of, table

SMALL = GOOD | SMALL_PLAN | {
    "layers": "8", "hidden": "2048", "heads": "16", "kv_heads": "16", "ffn_hidden": "8192", "seq_len": "1024",
    "recompute": "none", "sequence_parallel": "0",
}  # fmt: skip

USUAL = {"context_parallel": "1", "context_exchange": "ring", "reduce_gradients": "each", "offload": "none"}
"""What columns say that change nothing."""


def priced(tmp_path, capsys, *rows: dict[str, str]) -> list[dict]:
    columns = dict.fromkeys(column for row in rows for column in row)
    text = [{column: row.get(column, "") for column in columns} | {"id": str(n)} for n, row in enumerate(rows)]
    status, found, errors = json_of(["--table", str(table(tmp_path / "rows.csv", *text))], capsys)
    assert (status, errors) == (0, "")
    return found["rows"]


def test_stages_of_unlike_nodes_are_planned_each_for_its_own(tmp_path, capsys):
    two = SMALL | {"cluster": "mixed-a100-v100", "devices": "4", "dp": "1", "tp": "2", "pp": "2", "global_batch": "16"}
    kinds = {"stage_kinds": "a100+v100"}
    even, uneven, lockstep = priced(
        tmp_path, capsys, two | kinds | {"stage_layers": "4+4"}, two | kinds | {"stage_layers": "6+2"}, two
    )
    for row in (even, uneven, lockstep):
        assert row["not_planned"] == ""
        assert abs(row["apart"]) < 0.15
    for way in ("predicted_step_s", "closed_form_step_s"):
        assert uneven[way] < even[way] <= lockstep[way] * 1.001


def test_hybrid_sharding_is_planned_on_the_ranks_that_share_states(tmp_path, capsys):
    plan = SMALL | {"devices": "4", "dp": "4", "tp": "1", "pp": "1", "global_batch": "16", "zero_stage": "3"}
    usual, hybrid, alike = priced(tmp_path, capsys, plan, plan | {"shard_ranks": "2"}, plan | {"shard_ranks": "4"})
    assert all(row["not_planned"] == "" and abs(row["apart"]) < 0.15 for row in (usual, hybrid, alike))
    assert hybrid["states_GB"] == pytest.approx(2 * usual["states_GB"])
    assert alike["predicted_step_s"] == usual["predicted_step_s"]


def test_an_offloaded_optimizer_adds_its_bytes_over_the_host_link_by_plans_too(tmp_path, capsys):
    plan = SMALL | {"devices": "1", "dp": "1", "tp": "1", "pp": "1", "global_batch": "4"}
    usual, offloaded = priced(tmp_path, capsys, plan, plan | {"offload": "optimizer"})
    assert offloaded["not_planned"] == ""
    saved = (usual["states_GB"] - offloaded["states_GB"]) * 1e9
    carried_s = 2 * saved / find_cluster(plan["cluster"]).device.host_bytes_per_s
    for way in ("predicted_step_s", "closed_form_step_s"):
        assert offloaded[way] == pytest.approx(usual[way] + carried_s)


def test_what_a_framework_lets_hide_and_its_buckets_count_by_plans_too(tmp_path, capsys):
    """One bucket of everything hides no more than none do; buckets of a layer's size hide, and blocking launches nothing."""
    plan = SMALL | {"devices": "16", "dp": "16", "tp": "1", "pp": "1", "global_batch": "16", "microbatch": "1"}
    options = [{"overlap": "blocking"}, {"overlap": "none"}, {"overlap": "gradients", "bucket_MiB": "100000"}]
    *waiting, hidden, fine = priced(
        tmp_path, capsys, *(plan | one for one in options), plan | {"overlap": "gradients"},
        plan | {"overlap": "gradients", "bucket_MiB": "100"},
    )  # fmt: skip
    for way in ("predicted_step_s", "closed_form_step_s"):
        assert [row[way] for row in waiting] == pytest.approx([waiting[0][way]] * 3)
        assert hidden[way] < waiting[0][way]
        assert fine[way] < waiting[0][way]
        assert fine[way] == pytest.approx(hidden[way], rel=0.1)


def test_a_deeper_decoder_is_planned(tmp_path, capsys):
    t5 = SMALL | {"family": "t5", "devices": "1", "dp": "1", "tp": "1", "pp": "1", "global_batch": "4", "layers": "2"}
    equal, deeper = priced(tmp_path, capsys, t5, t5 | {"decoder_layers": "3"})
    assert equal["not_planned"] == deeper["not_planned"] == ""
    assert deeper["predicted_step_s"] > equal["predicted_step_s"]


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("gpt", {"head_width": "256"}, "column 'head_width' is 256: models/ builds heads of hidden / heads = 128"),
        ("llama", {"gated": "0"}, "column 'gated' is 0: models/ builds a llama with a gated feed-forward"),
        (
            "moe",
            {"shared_experts": "1", "experts": "4"},
            "column 'shared_experts' is 1: models/ builds a moe without any",
        ),
        (
            "gpt",
            {"context_parallel": "2", "devices": "4"},
            "column 'context_parallel' is 2: models/ builds layers of whole sequences, so only the closed form prices it",
        ),
        (
            "gpt",
            {"recompute": "dots"},
            "column 'recompute' is 'dots': a part's plan repeats all of it or its scores, so only the closed form prices it",
        ),
        (
            "gpt",
            {"precision": "fp8", "cluster": "dgx-h100"},
            "column 'precision' is 'fp8': models/ multiplies in bf16, so only the closed form prices casts and 8-bit products",
        ),
    ],
)
def test_what_models_cannot_build_is_priced_in_closed_form_and_says_so(family, changes, text, tmp_path, capsys):
    one = SMALL | {"family": family, "devices": "2", "dp": "1", "tp": "2", "pp": "1", "global_batch": "4"} | changes
    (row,) = priced(tmp_path, capsys, one)
    assert text in row["not_planned"]
    assert row["predicted_step_s"] == row["closed_form_step_s"]


def test_optional_columns_at_their_usual_values_change_nothing(tmp_path, capsys):
    plan = SMALL | {"devices": "4", "dp": "2", "tp": "2", "pp": "1", "global_batch": "16", "zero_stage": "2"}
    empty, stated = priced(tmp_path, capsys, plan, plan | USUAL)
    assert stated["not_planned"] == ""
    assert stated == empty | {"id": stated["id"]}
