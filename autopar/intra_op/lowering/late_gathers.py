"""Inputs that are gathered where they are read, and not before.

In: a choice for a strategy graph. Out: the choice with other strategies for some fan_outs of inputs. Several operations read such
an input. If its fan_out gathers it, the copy is there until the last of them has read it, also if that one wants a shard, as the
update of a weight does. If the fan_out leaves it as it lies, the gathered copy ends with the last operation that needs it, and
what wants a shard has one. The search does not see this: it counts bytes only where there is a limit, and pays for a gathering
once for each of its readers, where the program pays once. What can go wrong: a donated input that is read late is copied, which
may need more, by a shard; so who has a limit asks again.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from autopar.avals import Aval
from autopar.intra_op.choices.graph import StrategyGraph
from autopar.intra_op.choices.uses import Use
from autopar.intra_op.lowering.assignment import is_gathered
from autopar.layouts.mesh import Layout
from autopar.layouts.moves import LOCAL_KINDS, Move
from autopar.solver.outcomes import Numbers


def gather_late(graph: StrategyGraph, numbers: Numbers) -> Numbers:
    """The choice in which no fan_out gathers an input of which its readers want that copy, or what each device has of it.

    Args:
        graph: the strategies of each node.
        numbers: the strategy that is chosen for each of them.
    """
    readers: Mapping[int, list[Use]] = collections.defaultdict(list)
    for use in graph.uses:
        readers[use.source.node].append(use)
    found = list(numbers)
    for use in graph.uses:
        giver, spread = graph.nodes[use.source.node], graph.nodes[use.target]
        if giver.input_number is None or not spread.is_fan_out or use.held:
            continue
        strategies = spread.choices.strategies
        given = giver.choices.strategies[numbers[use.source.node]].outputs[0]
        taken = strategies[numbers[use.target]].outputs[0]
        as_given = next((i for i, s in enumerate(strategies) if s.inputs[0] == s.outputs[0] == given), None)
        if as_given is None or not is_gathered(_path(graph, use.aval, given, taken)):
            continue
        needed = {wanted_layout(graph, numbers, reader) for reader in readers[use.target]}
        if all(_is_local(_path(graph, use.aval, given, layout)) for layout in needed - {taken}):
            found[use.target] = as_given
    return tuple(found)


def wanted_layout(graph: StrategyGraph, numbers: Numbers, use: Use) -> Layout:
    """The layout in which a value is read; of a stack of rows, that of the stack."""
    layout = graph.nodes[use.target].choices.strategies[numbers[use.target]].inputs[use.operand]
    return layout.prepend() if use.stacked else layout


def _path(graph: StrategyGraph, aval: Aval, given: Layout, needed: Layout) -> Sequence[Move]:
    return () if given == needed else graph.spaces.between(aval, given, needed).path(given, needed)


def _is_local(path: Sequence[Move]) -> bool:
    return all(move.kind in LOCAL_KINDS for move in path)
