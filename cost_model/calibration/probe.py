"""A look of a second at the devices at hand: how fast they multiply matrices, beside what a cluster says of them.

In: devices, and the device that a plan was priced for. Out: the speed of products, measured and priced. It explains a step that
takes far longer than predicted; `calibrate` measures all else. What can go wrong: a busy machine; another program's work counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from autopar.cost_model.calibration.cases import Case, Sample, cases_for
from autopar.cost_model.calibration.fits import ITEM_BYTES, with_gradients
from autopar.cost_model.calibration.measure import measure
from autopar.cost_model.compute import matrix_product_s
from autopar.cost_model.device import Device


@dataclasses.dataclass(frozen=True)
class ProductSpeed:
    """Floating-point operations per second and device in large products, those of both gradients included.

    Attributes:
        measured: On the devices at hand, all at work.
        priced: As the cost model prices them for a device.
    """

    measured: float
    priced: float

    @property
    def ratio(self) -> float:
        """Measured over priced."""
        return self.measured / self.priced


def probe_products(devices: Sequence[jax.Device], device: Device) -> ProductSpeed | None:
    """Measure the product that tells most on these devices; None if nothing could be measured. It takes about a second.

    Args:
        devices: All are put to work at once, as in a step.
        device: What the cluster says of each of them.
    """
    case = cases_for(devices[0].platform, len(devices))[0]
    samples = [one for one in measure(devices, [case], seconds=0.0) if isinstance(one, Sample)]
    return speed_of(samples[-1], device) if samples else None


def speed_of(sample: Sample, device: Device) -> ProductSpeed:
    """The speed that a sample of a "product" tells, beside that of a device."""
    case = sample.case
    shapes = tuple(with_gradients(case.sizes))
    flops = sum(2.0 * m * n * k for m, n, k in shapes)
    return ProductSpeed(
        measured=flops / sample.seconds, priced=flops / sum(_product_s(device, case, *s) for s in shapes)
    )


def _product_s(device: Device, case: Case, m: int, n: int, k: int) -> float:
    return matrix_product_s(device, m, n, k, dtype=case.dtype, itemsize=ITEM_BYTES[case.dtype])
