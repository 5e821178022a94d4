"""Matrix products and convolutions of many shapes on one GPU, each measured beside what the cluster file says of it.

    python benchmarks/product_shapes.py --cluster dgx-h100 [--seconds 240] [--save FILE]
    python benchmarks/product_shapes.py --cluster dgx-h100 --from benchmarks/data/products_h100.json

In: the cluster whose device is at hand, or with `--from` what was measured there before. The shapes are those that tell what a
short side costs: squares, one side from short to long, many small products at once as in attention, and the convolutions of a
Wide-ResNet. Operands are drawn at random, because constant ones draw less power and run faster. A program holds as many products
of operands of their own as take 2 ms by the prediction, and is called five times before anybody waits, so that neither the
host's calls nor the device's caches count. Out: for each shape the microseconds of one product, measured (the least of five
rounds) and predicted, their ratio, and per group of shapes the mean of |ln ratio|. What can go wrong: no GPU, which is said;
time that is over before the last shape, which is said too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from autopar.cost_model.compute import roofline_s
from autopar.cost_model.device import Device
from autopar.cost_model.hardware import find_cluster
from autopar.files.whole_file import save

ROUNDS, CALLS, PROGRAM_S, MOST_PRODUCTS, MOST_BYTES = 5, 5, 2e-3, 48, 6e9
ITEMSIZE = {"bfloat16": 2, "float32": 4}
PRICED_AS = {"float32": "tensorfloat32"}
"""By default JAX lets GPUs round float32 operands to TF32."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`batch` products (m, k) x (k, n); or a convolution of `batch` images of side m, k to n channels, `window` wide."""

    group: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    window: int = 0
    stride: int = 1

    @property
    def label(self) -> str:
        """The shape in a few words."""
        if self.window:
            return f"{self.window} x {self.window} of {self.batch} x {self.m}^2 x {self.k} to {self.n}, stride {self.stride}"
        return f"{self.batch} x ({self.m}, {self.k}) x ({self.k}, {self.n})"

    @property
    def operands(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the two operands."""
        if self.window:
            return (self.batch, self.m, self.m, self.k), (self.window, self.window, self.k, self.n)
        return (self.batch, self.m, self.k), (self.batch, self.k, self.n)

    @property
    def elements(self) -> tuple[int, int, int]:
        """Elements of both operands and of the result."""
        left, right = map(math.prod, self.operands)
        return left, right, self.batch * self.n * ((self.m // self.stride) ** 2 if self.window else self.m)

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.elements[2] * self.k * (self.window**2 if self.window else 1)

    def predicted_s(self, device: Device) -> float:
        """Seconds by the cost model."""
        return roofline_s(
            device,
            flops=self.flops,
            moved_bytes=ITEMSIZE[self.dtype] * sum(self.elements),
            dtype=PRICED_AS.get(self.dtype, self.dtype),
            launched=True,
            sizes=self.elements,
            convolves=self.window > 0,
        )


def shapes() -> Iterator[Shape]:
    """All shapes, the telling ones first."""
    for side in (4096, 8192, 1024, 2048, 512, 6144, 12288):
        yield Shape(group="squares", batch=1, m=side, n=side, k=side)
    attention = [(256, 1024, 64), (256, 1024, 128), (64, 2048, 128), (512, 512, 64), (2048, 128, 64), (1024, 256, 64)]
    for batch, seq, width in attention:
        yield Shape(group="short k, many", batch=batch, m=seq, n=seq, k=width)
        yield Shape(group="short n, many", batch=batch, m=seq, n=width, k=seq)
    for k in (64, 128, 256, 512, 1024, 2048):
        yield Shape(group="short k", batch=1, m=8192, n=8192, k=k)
    for n in (64, 128, 256, 512, 1024, 2048):
        yield Shape(group="short n", batch=1, m=16384, n=n, k=4096)
    for m in (128, 256, 512, 1024):
        yield Shape(group="long k", batch=1, m=m, n=m, k=16384)
    for tokens, hidden, ffn in ((16384, 2048, 8192), (16384, 1024, 4096), (8192, 6144, 24576), (4096, 256, 1024)):
        yield Shape(group="layers", batch=1, m=tokens, n=ffn, k=hidden)
        yield Shape(group="layers", batch=1, m=tokens, n=hidden, k=ffn)
        yield Shape(group="layers", batch=1, m=hidden, n=ffn, k=tokens)
    for batch, m, n, k in ((8, 2048, 4096, 1024), (8, 1024, 4096, 2048), (32, 512, 512, 512), (16, 1024, 1024, 1024)):
        yield Shape(group="several", batch=batch, m=m, n=n, k=k)
    for side in (1024, 2048, 4096, 8192):
        yield Shape(group="squares", batch=1, m=side, n=side, k=side, dtype="float32")
    for batch, seq, width in attention[:2]:
        yield Shape(group="short k, many", batch=batch, m=seq, n=seq, k=width, dtype="float32")
        yield Shape(group="short n, many", batch=batch, m=seq, n=width, k=seq, dtype="float32")
    for dtype in ("bfloat16", "float32"):
        for side, channels in ((56, 160), (28, 320), (14, 640), (7, 1280)):
            for n, window in ((channels, 3), (4 * channels, 1)):
                yield Shape(group="convolutions", batch=64, m=side, n=n, k=channels, dtype=dtype, window=window)


def make_program(shape: Shape, count: int) -> Callable[[], object]:
    """Calls of a compiled program of `count` products of operands of their own."""
    keys = jax.random.split(jax.random.key(0), 2)
    left, right = (
        [jax.random.normal(key, of, jnp.float32).astype(shape.dtype) for key in jax.random.split(whole, count)]
        for whole, of in zip(keys, shape.operands, strict=True)
    )

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        if not shape.window:
            return a @ b
        strides = (shape.stride, shape.stride)
        return jax.lax.conv_general_dilated(a, b, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    program = jax.jit(lambda left, right: [product(a, b) for a, b in zip(left, right, strict=True)])
    return lambda: jax.block_until_ready([program(left, right) for _ in range(CALLS)])


def measure(shape: Shape, device: Device) -> float:
    """Seconds of one product."""
    predicted_s = shape.predicted_s(device)
    fitting = int(MOST_BYTES / (ITEMSIZE[shape.dtype] * sum(shape.elements)))
    count = max(1, min(MOST_PRODUCTS, math.ceil(PROGRAM_S / predicted_s), fitting))
    run = make_program(shape, count)
    run()
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took) / (count * CALLS)


def show(rows: Sequence[tuple[Shape, float]], device: Device, console: Console) -> None:
    """Print each shape beside its prediction, and the errors of each group."""
    table = Table("group", "shape", "format", "measured us", "predicted us", "predicted / measured", "TFLOP/s", "TB/s")
    errors: dict[str, list[float]] = {}
    for shape, seconds in rows:
        predicted_s = shape.predicted_s(device)
        errors.setdefault(f"{shape.group}, {shape.dtype}", []).append(math.log(predicted_s / seconds))
        moved = ITEMSIZE[shape.dtype] * sum(shape.elements)
        figures = (f"{1e6 * seconds:.1f}", f"{1e6 * predicted_s:.1f}", f"{predicted_s / seconds:.2f}")
        rates = (f"{shape.flops / seconds / 1e12:.0f}", f"{moved / seconds / 1e12:.2f}")
        table.add_row(shape.group, shape.label, shape.dtype, *figures, *rates)
    console.print(table)
    for group, found in errors.items():
        mean, size = statistics.mean(found), statistics.mean(map(abs, found))
        console.print(f"{group}: mean |ln ratio| {size:.2f}, mean ratio {math.exp(mean):.2f}, {len(found)} shapes")


def main() -> int:
    """Measure, or read what was measured; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, help="the cluster whose device is at hand")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no shape after so long; default 240")
    parser.add_argument("--save", type=Path, help="a JSON file for what is measured")
    parser.add_argument("--from", dest="measured", type=Path, help="read such a file and measure nothing")
    options = parser.parse_args()
    device, console = find_cluster(options.cluster).device, Console(width=150)
    if options.measured is not None:
        document = json.loads(options.measured.read_text())
        rows = [(Shape(**row["shape"]), row["seconds"]) for row in document["rows"]]
    else:
        if jax.default_backend() != "gpu":
            print("product_shapes.py: there is no GPU here; --from reads what was measured on one.", file=sys.stderr)
            return 1
        rows, began = [], time.monotonic()
        for shape in shapes():
            if time.monotonic() - began > options.seconds:
                console.print(f"no time for {shape.label} and those after it")
                break
            rows.append((shape, measure(shape, device)))
        document = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        document["rows"] = [{"shape": asdict(shape), "seconds": seconds} for shape, seconds in rows]
        if options.save is not None:
            save(options.save, json.dumps(document, indent=1) + "\n")
    console.print(f"{document['device']}, JAX {document['jax']}, beside {device.name}")
    show(rows, device, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
