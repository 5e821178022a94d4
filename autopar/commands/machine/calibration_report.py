"""What calibration found, in words and as a table, and warnings where the machine was busy."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from rich.table import Table

from autopar.commands.machine.whole_steps import Beside
from autopar.cost_model.calibration.cases import Case, Sample
from autopar.cost_model.calibration.fit_cluster import Calibrated
from autopar.cost_model.calibration.waiting import Waited, are_steady
from autopar.cost_model.machine import Cluster
from autopar.errors import warn

UNSTEADY = 1.5
"""Where the median round takes this many times the least, the machine counts as busy."""


MEASURED_WAITING = "waiting by the wall's clock, beside compute alone"
"""What the file says of waiting that was measured."""


def waiting_source(waited: Sequence[Waited], *, has_time: bool = True) -> str:
    """Where the file's figures of waiting come from."""
    if are_steady(waited):
        return MEASURED_WAITING
    nothing = "each device has a core of its own" if has_time else "time was over"
    return f"waiting was not measured: {'other programs ran' if waited else nothing}"


def list_left_out(cases: Sequence[Case], samples: Sequence[Sample]) -> Iterator[str]:
    """Yield how many cases of each kind and format there was no time for."""
    measured = {sample.case for sample in samples}
    every = collections.Counter((case.kind, case.dtype) for case in cases)
    left = collections.Counter((case.kind, case.dtype) for case in cases if case not in measured)
    for (kind, dtype), count in left.items():
        yield f"{count} of {every[kind, dtype]} {kind} {dtype}"


def describe_left_out(left_out: Sequence[str]) -> Iterator[str]:
    """Yield a line that says it, if anything was left out."""
    if left_out:
        yield f"left out for want of time (--seconds): {', '.join(left_out)}"


def describe_steps(beside: Beside) -> Iterator[str]:
    """Yield what whole steps take, if they were measured."""
    if beside.ratios:
        yield f"whole steps take longer than the sum of their parts: {in_words(beside)}; the file has it in the device's figures"


def in_words(beside: Beside) -> str:
    """The factors of rates and launches, and the ratio of each step."""
    each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in beside.ratios.items())
    factors = f"{beside.rates:.2f}"
    if beside.launches != beside.rates:
        factors = f"rates {beside.rates:.2f} times, launches {beside.launches:.2f} times"
    return f"{factors} ({each})"


def describe_waiting(cluster: Cluster, waited: Sequence[Waited]) -> Iterator[str]:
    """Yield what was found of waiting, line by line; nothing if other programs ran."""
    if not are_steady(waited):
        return
    for sample in waited:
        what = f"{sample.merged} all-reduces at once" if sample.merged > 1 else "an all-reduce"
        yield (
            f"{what} of {sample.ranks} ranks between {sample.grain.operation}s of {sample.compute_s * 1e3:.1f} ms: "
            f"{sample.seconds * 1e6:.0f} us"
        )
    per_rank_s = cluster.tiers[0].measured["all-reduce"].waiting_s_per_rank
    yield (
        f"collectives wait {per_rank_s * 1e6:.1f} n us for ranks that share cores; one of many all-reduces pays "
        f"{cluster.all_reduce_latency:.2f} of latency and waiting"
    )


def make_table(found: Calibrated, samples: Sequence[Sample]) -> Table:
    """Make a table of the figures, how well they explain the samples, and how steady these were."""
    cluster, device = found.cluster, found.cluster.device
    table = Table(title=f"cluster {cluster.name}: {device.name}")
    for heading in ("what", "found", "mean error", "median round / least"):
        table.add_column(heading)

    def row(what: str, text: str, key: str) -> None:
        kind = key.split(" ")[0]
        spreads = sorted(sample.spread for sample in samples if sample.case.kind == kind)
        table.add_row(what, text, f"{found.errors[key]:.0%}", f"{spreads[len(spreads) // 2]:.2f}")

    for dtype, peak in device.peak_flops_per_s.items():
        half = ", ".join(f"{length:.0f}" for length in device.efficiency_of(dtype).half)
        row(f"products, {dtype}", f"{peak / 1e9:,.1f} GFLOP/s, half lengths {half}", f"product {dtype}")
    moved = "read and written" if device.fuses else "written"
    row("pointwise equations", f"{device.memory_bytes_per_s / 1e9:.2f} GB/s {moved}", "pointwise")
    row("operands in another order", f"{device.reorder_s_per_byte * 1e9:.2f} ns a byte", "reordered")
    row("transposed copies", f"{device.transpose_s_per_byte * 1e9:.2f} ns a byte", "transposed")
    row("random bits", f"{device.random_s_per_byte * 1e9:.2f} ns a byte", "random")
    table.add_row("launch of an operation", f"{device.launch_s * 1e6:.1f} us")
    called = f"{cluster.call_s * 1e6:.0f} us + {cluster.call_s_per_array * 1e6:.1f} us an array"
    if cluster.call_s_per_byte:
        called += f" + {cluster.call_s_per_byte * 1e9:.2f} ns a byte of tasks"
    row("calls", called, "dispatch")
    if "transfer" in found.errors:
        first = cluster.tiers[0]
        sent = f"{first.latency_s * 1e6:.0f} us + {cluster.sent_s_per_array * 1e6:.1f} us an array"
        row("transfers between meshes", f"{sent} + {first.bytes_per_s / 1e9:.2f} GB/s a device", "transfer")
    for kind, figures in cluster.tiers[0].measured.items():
        latency = f"{figures.latency_s * 1e6:.0f} + {figures.latency_s_per_rank * 1e6:.1f} n us"
        per_byte = f"{figures.s_per_byte * 1e9:.3f} + {figures.s_per_byte_per_rank * 1e9:.4f} n ns a byte"
        row(kind, f"{latency}, {per_byte}", kind)
    return table


def warn_if_busy(samples: Sequence[Sample], waited: Sequence[Waited]) -> None:
    """Warn if other programs disturbed the measurements."""
    if waited and not are_steady(waited):
        warn(
            f"other programs ran: compute took {max(sample.disturbed for sample in waited):.1f} times its processor time, so "
            "what collectives wait for their ranks could not be measured. Predicted steps are those of processor time, too fast "
            "where a plan has many small collectives; close other programs and calibrate again"
        )
    spreads = sorted(sample.spread for sample in samples)
    typical = spreads[len(spreads) // 2]
    if typical > UNSTEADY:
        warn(
            f"the machine was busy while it was measured: a typical round took {typical:.1f} times the least one. Close other "
            "programs and calibrate again, or give more time with --seconds"
        )
