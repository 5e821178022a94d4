"""A profile of an H100, and programs and kernels written by hand.

`data/profiles` has the device's plane of the profile of one step of the MLP of `benchmarks/one_gpu.py`, JAX 0.11.2, and the
text of its program, without the places of sources.
"""

import gzip
from pathlib import Path

from autopar.measuring.profile import Seen

PROFILES = Path(__file__).resolve().parents[1] / "data" / "profiles"


def hlo_of(name: str) -> str:
    return gzip.decompress((PROFILES / f"{name}.hlo.txt.gz").read_bytes()).decode()


def profile_of(name: str, folder: Path) -> Path:
    """The profile, unpacked."""
    path = folder / f"{name}.xplane.pb"
    path.write_bytes(gzip.decompress((PROFILES / f"{name}.xplane.pb.gz").read_bytes()))
    return path


def ran(*names: str, graph: int | None = 1, module: str = "jit_run", device: int = 0, first: float = 0.0) -> list[Seen]:
    """Kernels of a millisecond, one behind the other; without a graph each has its instruction's name."""
    return [
        Seen(
            name="" if graph is not None else name,
            module=module,
            device=device,
            start_s=(first + number) * 1e-3,
            end_s=(first + number + 1) * 1e-3,
            kernel=name if graph is not None else "a kernel",
            graph=None if graph is None else (graph, graph),
        )
        for number, name in enumerate(names)
    ]


FUSIONS = """
%fused_add (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add.9 = f32[8]{0} add(%p, %p)
}

%fused_add.1 (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %add.8 = f32[8]{0} add(%q, %q)
}

%fused_exp (r: f32[8]) -> f32[8] {
  %r = f32[8]{0} parameter(0)
  ROOT %exp.1 = f32[8]{0} exponential(%r)
}
"""
HEAD = "HloModule jit_run, is_scheduled=true\n" + FUSIONS


def fusion(name: str, operand: str, calls: str) -> str:
    return f"  %{name} = f32[8]{{0}} fusion(%{operand}), kind=kLoop, calls=%{calls}\n"


def library(name: str, operand: str, target: str = "__cublas$lt$matmul") -> str:
    return f'  %{name} = f32[8]{{0}} custom-call(%{operand}), custom_call_target="{target}"\n'


def entry(*lines: str) -> str:
    return "\nENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n" + "".join(lines) + "}\n"
