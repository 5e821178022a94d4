"""A machine whose collectives take as long among any number of devices, so that meshes of fewer axes lose nothing."""

import dataclasses

from autopar.cost_model.hardware import preset
from autopar.cost_model.machine import Cluster
from autopar.cost_model.tiers import MeasuredCollective


def even_links() -> Cluster:
    """Slow virtual devices with short launches; each collective takes 170 us and 1 ns a byte."""
    cluster = preset("cpu")
    (tier,) = cluster.tiers
    measured = {kind: MeasuredCollective(latency_s=1.7e-4, s_per_byte=1e-9) for kind in tier.measured}
    device = dataclasses.replace(
        cluster.device,
        peak_flops_per_s={"float32": 12e9},
        matrix_efficiency={},
        memory_bytes_per_s=2e9,
        launch_s=2e-6,
        reorder_s_per_byte=0.0,
        random_s_per_byte=0.0,
        transpose_s_per_byte=0.0,
    )
    return dataclasses.replace(
        cluster, device=device, tiers=(dataclasses.replace(tier, measured=measured),), all_reduce_latency=0.3
    )
