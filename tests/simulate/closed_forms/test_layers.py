"""The operations of a layer: products, collectives and bytes that a plan leads to."""

from collections import Counter
from collections.abc import Iterable

import pytest

from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.operations import Exchange, FusedGroup, MatrixProduct, Operation
from autopar.simulate.closed_forms.residual_network import BlockSplit, ResidualNetworkShape, bottleneck_work
from autopar.simulate.closed_forms.transformer import block_work, embedding_work, head_work
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

# x = s b h = 4 x 2 x 8 = 64 elements; heads of 4.
GPT = TransformerShape(family="gpt", layers=2, hidden=8, heads=2, kv_heads=2, ffn_hidden=32, vocab=64, seq_len=4)
X_BYTES = 2 * 64


def exchanges(operations: Iterable[Operation]) -> Counter[tuple[str, str, float]]:
    """How many collectives of each kind, bytes and what they run behind."""
    found = (op for op in operations if isinstance(op, Exchange) and op.group != "data")
    return Counter((op.kind, op.behind, op.full_bytes) for op in found)


def flops(operations: Iterable[Operation]) -> float:
    return sum(op.flops for op in operations if isinstance(op, MatrixProduct))


def moved(operations: Iterable[Operation]) -> float:
    return sum(op.moved_bytes for op in operations if isinstance(op, FusedGroup))


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_backward_has_twice_the_products_of_forward_and_ranks_share_them(tensor_ranks):
    work = block_work(GPT, LayerSplit(samples=2, tensor_ranks=tensor_ranks))
    by_hand = 24 * 2 * 4 * 8**2 + 4 * 2 * 4**2 * 8  # 24 b s h^2 + 4 b s^2 h
    assert flops(work.forward) * tensor_ranks == by_hand
    assert flops(work.backward) == 2 * flops(work.forward)


def test_tensor_parallelism_has_two_all_reduces_a_direction_and_those_of_backward_run_behind_products():
    work = block_work(GPT, LayerSplit(samples=2, tensor_ranks=2))
    assert exchanges(work.forward) == {("all-reduce", "nothing", X_BYTES): 2}
    assert exchanges(work.backward) == {("all-reduce", "product", X_BYTES): 2}


def test_sequence_parallelism_scatters_and_gathers_and_gathers_the_saved_inputs_again():
    work = block_work(GPT, LayerSplit(samples=2, tensor_ranks=2, sequence_parallel=True))
    assert exchanges(work.forward) == {("reduce-scatter", "nothing", X_BYTES): 2, ("all-gather", "nothing", X_BYTES): 2}
    assert exchanges(work.backward) == {
        ("all-gather", "nothing", X_BYTES): 2,
        ("all-gather", "product", X_BYTES): 2,
        ("reduce-scatter", "product", X_BYTES): 2,
    }


def test_sequence_parallelism_divides_norms_and_dropouts():
    """Two norms read and write, two dropout sums read twice, write once and write a mask: 22 bytes per element."""
    whole = block_work(GPT, LayerSplit(samples=2, tensor_ranks=2))
    parts = block_work(GPT, LayerSplit(samples=2, tensor_ranks=2, sequence_parallel=True))
    assert moved(whole.forward) - moved(parts.forward) == 22 * 64 / 2


def test_full_recomputation_repeats_forward_with_its_collectives():
    work = block_work(GPT, LayerSplit(samples=2, tensor_ranks=2, recompute="full"))
    assert work.recomputed == work.forward
    assert work.kept_bytes == X_BYTES
    assert work.kept_bytes + work.transient_bytes == 64 * (10 + 24 / 2 + 5 / 2)


def test_selective_recomputation_repeats_the_scores_alone():
    work = block_work(GPT, LayerSplit(samples=2, recompute="selective"))
    assert flops(work.recomputed) == 4 * 2 * 4**2 * 8
    scores = 2 * 2 * 4 * 4
    assert moved(work.recomputed) == (4 + 5) * scores
    assert exchanges(work.recomputed) == {}


def test_a_fused_attention_keeps_no_scores_skips_what_is_masked_and_computes_them_again_in_backward():
    plain = block_work(GPT, LayerSplit(samples=2))
    fused = block_work(GPT, LayerSplit(samples=2, fused_attention=True))
    core = 4 * 2 * 4**2 * 8
    assert flops(plain.forward) - flops(fused.forward) == core / 2
    assert flops(plain.backward) - flops(fused.backward) == 2 * core - 2.5 * core / 2
    assert fused.kept_bytes == 34 * 64


def test_weight_gradients_are_added_in_their_own_format():
    work = block_work(GPT, LayerSplit(samples=2, gradient_bytes=4))
    gradients = [op for op in work.backward if isinstance(op, MatrixProduct) and op.extra_bytes]
    assert sum(op.extra_bytes for op in gradients) == (2 * 4 - 2) * 12 * 8**2


def test_grouped_heads_shrink_the_projection_and_a_gate_widens_the_feed_forward():
    llama = TransformerShape(
        family="llama", layers=2, hidden=8, heads=2, kv_heads=1, ffn_hidden=32, vocab=64, seq_len=4
    )
    work = block_work(llama, LayerSplit(samples=2))
    tokens = 8
    attention = 2 * tokens * 8 * (8 + 8) + 2 * tokens * 8 * 8 + 4 * 2 * 4**2 * 8
    assert flops(work.forward) == attention + 3 * 2 * tokens * 8 * 32


def test_a_decoder_of_t5_attends_twice():
    t5 = TransformerShape(family="t5", layers=1, hidden=8, heads=2, kv_heads=2, ffn_hidden=32, vocab=64, seq_len=4)
    assert t5.blocks == ("plain", "decoder")
    attention = 8 * 2 * 4 * 8**2 + 4 * 2 * 4**2 * 8
    difference = flops(block_work(t5, LayerSplit(samples=2), "decoder").forward) - flops(
        block_work(t5, LayerSplit(samples=2)).forward
    )
    assert difference == attention


MOE = TransformerShape(
    family="moe", layers=2, hidden=8, heads=2, kv_heads=2, ffn_hidden=32, vocab=64, seq_len=4, experts=4
)


def test_every_second_block_is_a_mixture_whose_experts_swap_two_copies_of_each_token():
    assert MOE.blocks == ("plain", "expert")
    work = block_work(MOE, LayerSplit(samples=2, expert_ranks=2), "expert")
    assert exchanges(work.forward) == {("all-to-all", "nothing", 2 * X_BYTES): 2}
    assert exchanges(work.backward) == {("all-to-all", "nothing", 2 * X_BYTES): 2}
    assert work.expert_parameters == 2 * (2 * 8 * 32 + 32 + 8)


def test_expert_ranks_do_not_change_the_work_of_a_device():
    alone = block_work(MOE, LayerSplit(samples=2), "expert")
    shared = block_work(MOE, LayerSplit(samples=2, expert_ranks=4), "expert")
    assert flops(alone.forward) == flops(shared.forward)
    experts = 2 * (4 * 8 * 8 * 32)  # two choices of each of 8 tokens
    gate = 2 * 8 * 8 * 4
    dense = 8 * 2 * 4 * 8**2 + 4 * 2 * 4**2 * 8
    assert flops(alone.forward) == dense + gate + experts


def test_one_hot_dispatch_and_combination_are_products():
    grouped = TransformerShape(
        family="moe",
        layers=2,
        hidden=8,
        heads=2,
        kv_heads=2,
        ffn_hidden=32,
        vocab=64,
        seq_len=4,
        experts=4,
        expert_group=4,
    )
    split = LayerSplit(samples=2)
    extra = flops(block_work(grouped, split, "expert").forward) - flops(block_work(MOE, split, "expert").forward)
    assert extra == 2 * (2 * 8 * (2 * 4) * 8)  # tokens x places x hidden, twice


def test_the_embedding_joins_partial_rows_and_the_head_multiplies_a_part_of_the_vocabulary():
    split = LayerSplit(samples=2, tensor_ranks=2)
    assert exchanges(embedding_work(GPT, split).forward) == {("all-reduce", "nothing", X_BYTES): 1}
    assert embedding_work(GPT, split).parameters == 64 * 8 / 2
    head = head_work(GPT, split)
    assert flops(head.forward) == 2 * 8 * 8 * 64 / 2
    assert flops(head.backward) == 2 * flops(head.forward)
    assert exchanges(head.backward) == {("all-reduce", "product", X_BYTES): 1}


@pytest.mark.parametrize(
    ("channels", "width", "published_billions"), [(160, 2, 0.254123), (448, 2, 1.965011), (320, 16, 6.7277)]
)
def test_residual_networks_have_the_published_parameters(channels, width, published_billions):
    shape = ResidualNetworkShape(depth=50, channels=channels, width_factor=width, image_size=224, classes=1024)
    assert shape.parameters / 1e9 == pytest.approx(published_billions, rel=1e-4)


def test_a_bottleneck_shares_its_products_between_tensor_ranks_and_sums_them():
    block = ResidualNetworkShape(depth=50, channels=8, width_factor=2, image_size=64, classes=10).blocks[1]
    alone = bottleneck_work(block, BlockSplit(samples=2))
    shared = bottleneck_work(block, BlockSplit(samples=2, tensor_ranks=2))
    assert flops(alone.forward) == 2 * sum(conv.flops for conv in block.convolutions)
    assert flops(shared.forward) == flops(alone.forward) / 2
    assert flops(alone.backward) == 2 * flops(alone.forward)
    pixels = 2 * 16 * 16 * 4  # images, positions, bytes
    assert exchanges(shared.forward) == {
        ("all-reduce", "nothing", pixels * 8): 1,
        ("all-reduce", "nothing", pixels * 32): 1,
    }
    assert exchanges(shared.backward) == {
        ("all-reduce", "nothing", pixels * 8): 1,
        ("all-gather", "nothing", pixels * 32): 1,
    }


def test_a_recomputed_bottleneck_keeps_its_input():
    block = ResidualNetworkShape(depth=50, channels=8, width_factor=2, image_size=64, classes=10).blocks[1]
    work = bottleneck_work(block, BlockSplit(samples=2, recompute=True))
    assert work.kept_bytes == 4 * 2 * 16 * 16 * 32
    assert work.recomputed == work.forward


def test_norms_over_the_whole_batch_reduce_two_sums_a_channel_in_both_directions():
    block = ResidualNetworkShape(depth=50, channels=8, width_factor=2, image_size=64, classes=10).blocks[1]
    work = bottleneck_work(block, BlockSplit(samples=2))
    for operations in (work.forward, work.backward):
        sums = [op.full_bytes for op in operations if isinstance(op, Exchange) and op.group == "data"]
        assert sorted(sums) == [2 * 4 * 8, 2 * 4 * 16, 2 * 4 * 32]
