"""The yardstick's formulas of a training step, each with a value worked out by hand."""

import pytest

from autopar.simulate.closed_forms.memory import (
    ActivationShape,
    StateBytes,
    layer_activation_bytes,
    layers_in_flight,
    states_of,
)
from autopar.simulate.closed_forms.schedule_time import pipeline_s
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

# s = 4, b = 2, h = 8, a = 2: s b h = 64, a s^2 b = 64, so 5 a s/h = 5.
SMALL = {"seq_len": 4, "samples": 2, "hidden": 8, "heads": 2, "ffn_hidden": 32}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, 64 * (34 + 5)),
        ({"tensor_ranks": 2}, 64 * (10 + 24 / 2 + 5 / 2)),
        ({"tensor_ranks": 2, "sequence_parallel": True}, 64 / 2 * (34 + 5)),
        ({"tensor_ranks": 2, "sequence_parallel": True, "recompute": "selective"}, 34 * 64 / 2),
        ({"recompute": "selective"}, 34 * 64),
        ({"recompute": "full"}, 2 * 64),
        ({"recompute": "full", "tensor_ranks": 2}, 2 * 64),
    ],
)
def test_a_plain_block_keeps_what_the_formula_says(plan, expected):
    assert layer_activation_bytes(ActivationShape(**SMALL, **plan)) == expected


def test_fewer_key_value_heads_keep_less_and_a_gate_keeps_one_more_result():
    # Keys and values are half as wide: 2 (1/2) h in place of 2 h, times 2 bytes and 8 tokens of width 8.
    grouped = layer_activation_bytes(ActivationShape(**SMALL, kv_heads=1))
    assert layer_activation_bytes(ActivationShape(**SMALL)) - grouped == 2 * 8 * 8
    gated = layer_activation_bytes(ActivationShape(**SMALL, gated=True))
    assert gated - layer_activation_bytes(ActivationShape(**SMALL)) == 2 * 8 * 32


def test_korthikanti_22b_keeps_what_was_published():
    """34 s b h/t over 48 layers, t = 8: 9.5625 GiB."""
    shape = ActivationShape(
        seq_len=2048,
        samples=4,
        hidden=6144,
        heads=64,
        ffn_hidden=24576,
        tensor_ranks=8,
        sequence_parallel=True,
        recompute="selective",
    )
    assert 48 * layer_activation_bytes(shape) / 2**30 == 9.5625


@pytest.mark.parametrize(
    ("zero_stage", "expected"),
    [(0, 16.0), (1, 4 + 12 / 4), (2, 2 + 14 / 4), (3, 16 / 4)],
)
def test_states_of_adam_in_mixed_precision_divide_as_zero_says(zero_stage, expected):
    assert states_of("bf16").per_parameter(zero_stage, 4) == expected


def test_gradients_in_float32_make_eighteen_bytes():
    assert states_of("fp16", accumulate_fp32=True).per_parameter(0, 1) == 18
    assert states_of("fp16", accumulate_fp32=True).per_parameter(1, 8) == 6 + 12 / 8


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("fp32", "adam", StateBytes(4, 4, 8)),
        ("fp32", "momentum", StateBytes(4, 4, 4)),
        ("fp16", "adafactor", StateBytes(2, 2, 4)),
    ],
)
def test_other_optimizers_keep_their_own_states(precision, optimizer, expected):
    assert states_of(precision, optimizer=optimizer) == expected


def test_gpipe_and_1f1b_idle_for_p_minus_1_over_m():
    # Four stages of 2 s, 12 microbatches: 24 s of work and 6 s of filling and draining.
    step_s = pipeline_s([2.0] * 4, microbatches=12)
    assert step_s == 30.0
    assert step_s / 24.0 - 1 == 3 / 12


def test_interleaving_divides_the_bubble_by_the_virtual_stages():
    step_s = pipeline_s([2.0] * 4, microbatches=12, virtual_stages=3)
    assert step_s == 24.0 + 2.0
    assert step_s / 24.0 - 1 == pytest.approx(3 / 36)


def test_the_slowest_stage_sets_the_pace():
    """Three microbatches at 5 s, and 1 + 2 s of the other stages once."""
    assert pipeline_s([1.0, 5.0, 2.0], microbatches=3) == 18.0


def test_the_first_stage_of_1f1b_holds_all_layers_once_and_a_later_one_less():
    assert layers_in_flight(24, stages=4, microbatches=100) == 24
    assert layers_in_flight(24, stages=4, microbatches=100, stage=3) == 6
    assert layers_in_flight(24, stages=4, microbatches=2) == 12


def test_interleaving_holds_a_part_more():
    """L (1 + (p-1)/(p v)): 96 layers, p = 8, v = 3 make 96 (1 + 7/24) = 124."""
    assert layers_in_flight(96, stages=8, virtual_stages=3, microbatches=64) == pytest.approx(124.0)


GPT = TransformerShape(
    family="gpt", layers=24, hidden=2304, heads=24, kv_heads=24, ffn_hidden=9216, vocab=51200, seq_len=2048
)


def job(shape: TransformerShape, recompute: str) -> TrainingJob:
    """A step of 512 sequences."""
    return TrainingJob(
        shape=shape,
        devices=32,
        global_batch=512,
        microbatch=16,
        data_ranks=32,
        tensor_ranks=1,
        stages=1,
        virtual_stages=1,
        recompute=recompute,
    )


def test_model_flops_without_recomputation():
    """72 B s L h^2 (1 + s/(6 h) + V/(12 h L)) for 512 sequences of a GPT of 1.7 billion."""
    by_hand = 72 * 512 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51200 / (12 * 2304 * 24))
    assert by_hand == pytest.approx(1.1777e16, rel=1e-3)
    assert job(GPT, "none").model_flops == pytest.approx(by_hand, rel=1e-12)
    assert job(GPT, "selective").model_flops == pytest.approx(by_hand, rel=1e-12)


def test_model_flops_with_full_recomputation():
    """96 B s L h^2 (1 + s/(6 h) + V/(16 L h))."""
    by_hand = 96 * 512 * 2048 * 24 * 2304**2 * (1 + 2048 / (6 * 2304) + 51200 / (16 * 24 * 2304))
    assert by_hand == pytest.approx(1.5455e16, rel=1e-3)
    assert job(GPT, "full").model_flops == pytest.approx(by_hand, rel=1e-12)


def test_alpas_model_flops():
    """96 B S H^2 L (1 + S/(6 H)) + 6 B S H V."""
    shape = TransformerShape(
        family="gpt", layers=8, hidden=2048, heads=16, kv_heads=16, ffn_hidden=8192, vocab=25600, seq_len=1024
    )
    by_hand = 96 * 8 * 1024 * 2048**2 * 8 * (1 + 1024 / (6 * 2048)) + 6 * 8 * 1024 * 2048 * 25600
    assert by_hand == pytest.approx(3.1165e13, rel=1e-4)
    alpa = TrainingJob(
        shape=shape,
        devices=1,
        global_batch=8,
        microbatch=8,
        data_ranks=1,
        tensor_ranks=1,
        stages=1,
        virtual_stages=1,
        recompute="full",
    )
    assert alpa.model_flops == pytest.approx(by_hand, rel=1e-12)


def test_parameters_of_the_families_by_hand():
    h, f, v = 8, 32, 100
    plain = 4 * h * h + 4 * h + 2 * h * f + f + h + 4 * h
    gpt = TransformerShape(family="gpt", layers=2, hidden=h, heads=2, kv_heads=2, ffn_hidden=f, vocab=v, seq_len=4)
    assert gpt.parameters == 2 * plain + v * h
    t5 = TransformerShape(
        family="t5", layers=2, hidden=h, heads=2, kv_heads=2, ffn_hidden=f, vocab=v, seq_len=4
    )  # two stacks; the decoder attends twice
    assert t5.parameters == 4 * plain + 2 * (4 * h * h + 4 * h + 2 * h) + v * h
    llama = TransformerShape(
        family="llama", layers=1, hidden=h, heads=2, kv_heads=1, ffn_hidden=f, vocab=v, seq_len=4
    )  # keys and values half as wide, three matrices, a head
    assert llama.parameters == 3 * h * h + 3 * h + 3 * h * f + f + h + 4 * h + 2 * v * h
    moe = TransformerShape(
        family="moe", layers=2, hidden=h, heads=2, kv_heads=2, ffn_hidden=f, vocab=v, seq_len=4, experts=4
    )
    expert = 2 * h * f + f + h
    assert moe.parameters == 2 * plain + 3 * expert + 4 * h + v * h
