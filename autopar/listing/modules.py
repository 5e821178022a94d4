"""The texts of a compiled step's modules by name.

In: a compiled step. Out: `Texts`, a mapping that prints its texts under their names. Nothing can go wrong that compiling does not
refuse.
"""

from __future__ import annotations

from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline


class Texts(dict[str, str]):
    """Texts by name; printed, each follows its name."""

    def __str__(self) -> str:
        """All of them."""
        return "\n\n".join(f"// {name}\n{text}" for name, text in self.items())


def texts_of(compiled: CompiledStep | CompiledPipeline, *, optimized: bool) -> Texts:
    """The optimised HLO, or the StableHLO that XLA is given: one text on one mesh, in stages one for each task."""
    if isinstance(compiled, CompiledStep):
        text = compiled.as_text() if optimized else compiled.lower().as_text()
        return Texts({compiled.signature.name: str(text)})
    if optimized:
        return Texts({str(name): str(one.as_text()) for name, one in compiled.executables().items()})
    return Texts({str(name): str(compiled.lower(name).as_text()) for name in compiled.tasks})
