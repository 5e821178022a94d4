"""A plan as tables that a person can argue with.

In: a `Plan` or a `PipelinePlan`, which are data. Out: the same data as rich tables (`show`) or as text (`explain`): the
predictions, which strategies of the literature the layouts amount to, the layout of each leaf, each collective, what fills
the memory at its peak, the meshes that were compared; of a pipeline its stages, its transfers and what its bubble costs. What
can go wrong is saying more than the data shows: a strategy is named only by layouts and collectives that are in the plan.
"""

from autopar.explain.report import TEXT_WIDTH, explain, show, standard_output
from autopar.explain.strategies import findings
from autopar.explain.units import bytes_text, seconds_text

__all__ = ["TEXT_WIDTH", "bytes_text", "explain", "findings", "seconds_text", "show", "standard_output"]
