"""XLA's flags of the tests: virtual CPU devices and quick compilation. It may be imported before JAX and behind it."""

from importlib.metadata import version

DEVICE_COUNT = 8
DEVICES = f"--xla_force_host_platform_device_count={DEVICE_COUNT}"

QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Later ones have no other emitter, and end the process at a flag that they do not know.
if version("jaxlib").startswith("0.10."):
    QUICK_COMPILE += " --xla_cpu_use_fusion_emitters=false"
