"""One step on one mesh: the strategy graph, quick bounds, and the best plan within the memory.

In: a traced step, a mesh, a request. Out: a `MeshSearch`, which is asked for more as long as the mesh may win: a choice without a
memory limit and what it takes, then the plan. What can go wrong: the bounds of a deep step are those of the step in which alike
layers choose alike, which may be a little above what the whole could reach; `at_least_s` is a bound of the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar.intra_op.choices.allowed_values import allowed_inputs, allowed_outputs, layouts_asked
from autopar.intra_op.choices.equal_axes import ClassNumbers, find_equal_axes
from autopar.intra_op.choices.graph import BatchSplit, StrategyGraph, build_graph
from autopar.intra_op.choices.least_costs import least_costs
from autopar.intra_op.choices.overlap import Exposure, least_exposure
from autopar.intra_op.choices.shared_copies import SharedCopies, share_copies
from autopar.intra_op.describe import describe_plan
from autopar.intra_op.lowering.assignment import assign
from autopar.intra_op.lowering.late_gathers import gather_late
from autopar.intra_op.lowering.settled_leaves import settle_leaves
from autopar.intra_op.memory.model import MemoryModel
from autopar.intra_op.memory_limit import Fits, Seen, TooLarge, choose_within_limit, nobody_s
from autopar.intra_op.out_of_memory import NothingFits
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.intra_op.step_memory import memory_of_step
from autopar.layouts.allowed import batch_axes
from autopar.layouts.mesh import LogicalMesh
from autopar.program.step import TracedStep
from autopar.solver.budget import SECONDS_PER_UNIT, Budget, LateError
from autopar.solver.classes import merge_classes
from autopar.solver.outcomes import Chosen, CutOff, DoesNotFit, NotSearched, Unfinished, Unreachable
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.repeated_layers import lift_bound, tie_layers
from autopar.solver.search import bound_quickly
from autopar.solver.solve import choose
from autopar.solver.tuning import TUNING


class MeshSearch:
    """The search on one mesh.

    Attributes:
        graph: what can be chosen.
        problem: the choice problem of it, without memory rows, which pays for a change of layout once for each reader.
        shared: the same where fan_outs may hand on two layouts; None of a stage, of several microbatches, of a large problem, and
            if nothing is shared.
        bound_s: seconds that no choice without a limit goes below, as far as planning has found out.
        choice_s: the same of choices in which alike layers choose alike, where only these are looked at.
        excess: how many times the memory that the least state leaves for temporaries these take without a limit; 0 if a plan
            without a limit fits.
        is_whole: whether this is a whole step, of which a run repays what is gained; of a stage there are many microbatches.
    """

    def __init__(
        self,
        traced: TracedStep,
        mesh: LogicalMesh,
        request: PlanRequest,
        exposure: Exposure | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        self.traced, self.mesh, self.request, self.is_whole = traced, mesh, request, is_whole
        self.excess = self.bound_s = self.choice_s = 0.0
        self._is_narrowed = exposure is not None
        self.exposure = exposure or least_exposure(traced, request.cluster.overlap)
        allowed = allowed_inputs(traced, mesh, request.constraints)
        batch = _batch_split(traced, mesh, request)
        self.graph = graph_for(
            traced, mesh, request, allowed, batch=batch, exposure=self.exposure, budget=request.budget
        )
        costs = Costs.of(self.graph.costs, self.graph.edges)
        classes = _classes(self.graph, request)
        gap_work = request.tuning.repaid_in_steps / SECONDS_PER_UNIT if is_whole else math.inf
        tuning = dataclasses.replace(TUNING, large_pairs=request.tuning.large_pairs, gap_work=gap_work)
        problem = ChoiceProblem(costs=costs, classes=classes, is_proven=False, budget=request.budget, tuning=tuning)
        self.problem = tie_layers(problem)
        # What is cut into microbatches is cut for the memory, and what a limit leaves is searched by the graph's own choices.
        self.shared = self._share_copies() if is_whole and traced.microbatches == 1 else None

    def _share_copies(self) -> SharedCopies | None:
        tuning, ties = self.request.tuning, self.problem.ties
        pairs = (self.problem if ties is None else ties).costs.pairs
        if self.problem.classes is not None or pairs > tuning.shared_pairs:
            return None
        shared = share_copies(self.graph, least_s=tuning.shared_part * self.evenly_divided_s())
        return shared if shared.more else None

    @functools.cached_property
    def _wider(self) -> ChoiceProblem:
        """What is searched first, as if there were no limit."""
        if self.shared is None:
            return self.problem
        return tie_layers(dataclasses.replace(self.problem, costs=self.shared.costs, ties=None))

    @functools.cached_property
    def memory(self) -> MemoryModel:
        """The memory of its choices."""
        return memory_of_step(self.traced, self.graph, self.request)

    def evenly_divided_s(self) -> float:
        """Seconds of the step's work if every device did an equal share of it, which no mesh of as many devices beats."""
        shares: dict[int, float] = {}
        for node in self.graph.nodes:
            key = id(node.choices)
            if key not in shares:
                ways = [strategy.ways for strategy in node.choices.strategies]
                shares[key] = float(np.min(node.choices.seconds * ways)) / self.mesh.size
        return sum(shares[id(node.choices)] * node.trips for node in self.graph.nodes)

    @functools.cached_property
    def at_least_s(self) -> float:
        """Seconds that no choice on this mesh goes below, at little cost."""
        return lift_bound(self._wider)

    def least_s(self, enough_s: float = math.inf) -> float:
        """Seconds that no step on this mesh takes less than, whatever the memory; takes a second or more. Raises LateError.

        `enough_s`: a bound of so many seconds is enough; it is not raised further.
        `at_least_s` and `bound_s` bound the objective, which pays for a change of layout once per reader; a step pays once.
        """
        request, catalogues = self.request, self.request.catalogues
        constant_s = request.cluster.dispatch_s(len(self.traced.inputs))
        request.budget.require_time()
        costs = least_costs(self.graph, catalogues.of(self.mesh, request.cluster, request.options))
        if costs is None:
            return constant_s + (self.bound_s or self.at_least_s)
        request.budget.require_time()
        budget = request.budget.clocked(work=request.tuning.bound_work)
        cutoff_s = enough_s - constant_s
        problem = dataclasses.replace(self.problem, costs=costs, ties=None, budget=budget, cutoff_s=cutoff_s)
        if problem.classes is not None:  # a tenth of the pairs, and often narrow where the whole is not
            problem = merge_classes(problem, problem.classes)
        if problem.costs.pairs > request.tuning.bounded_pairs:
            tied = tie_layers(problem)
            if tied.ties is not None:
                return constant_s + lift_bound(tied)
        if problem.costs.pairs > request.tuning.quick_pairs:
            bound_s = bound_quickly(problem.costs, cutoff_s=cutoff_s, tuning=problem.tuning, budget=budget)
            return constant_s + (bound_s if math.isfinite(bound_s) else 0.0)
        match choose(problem):
            case Chosen(lower_bound_s=bound_s) | CutOff(bound_s) | NotSearched(bound_s):
                return constant_s + bound_s
        return constant_s

    def plan(
        self,
        cutoff_s: float,
        *,
        rival_s: Callable[[], float] = nobody_s,
        most_work: float = math.inf,
        has_other_ways: bool = False,
        is_tight: bool = False,
    ) -> PlannedStep | NothingFits | CutOff | NotSearched | Unreachable | Unfinished:
        """The best plan within the memory; only plans that take less than `cutoff_s` matter, which are worth so much work.
        `rival_s` says what others have found so far; `has_other_ways`: see `choose_within_limit`. `is_tight`: what the bound on
        memory rules out is left before anything is chosen; nobody learns by how much a choice without a limit exceeds it.

        The search takes it that there is compute enough for all communication that can hide behind it. If a plan's step is much
        longer than that, the mesh is searched again for as much as that plan hides, and the faster plan counts.
        """
        find = functools.partial(
            MeshSearch._plan,
            cutoff_s=cutoff_s,
            rival_s=rival_s,
            most_work=most_work,
            has_other_ways=has_other_ways,
            is_tight=is_tight,
        )
        found = find(self)
        if not isinstance(found, PlannedStep) or self.exposure is None or self._is_narrowed:
            return found
        narrowed = self.exposure.narrowed(found.plan, self.request.cluster.overlap, least=self.request.tuning.narrowed)
        if narrowed is None or self.request.budget.is_over:
            return found
        try:
            search = MeshSearch(self.traced, self.mesh, self.request, narrowed, is_whole=self.is_whole)
            again = find(search)
        except LateError:
            return found
        if isinstance(again, PlannedStep) and again.plan.step_s < found.plan.step_s:
            return again
        return found

    def _plan(
        self,
        *,
        cutoff_s: float,
        rival_s: Callable[[], float],
        most_work: float,
        has_other_ways: bool,
        is_tight: bool,
    ) -> PlannedStep | NothingFits | CutOff | NotSearched | Unreachable | Unfinished:
        request, limit = self.request, self.request.memory_limit_bytes
        free_work, spent = min(most_work, request.tuning.mesh_work), request.budget.spent
        if limit is not None and self.memory.least_of_inputs() > limit:
            return self._nothing_fits()
        if limit is not None and is_tight and self.memory.bound() > limit:
            return self._nothing_fits()
        free = self._choose_free(self.problem if is_tight else self._wider, cutoff_s, free_work)
        if not isinstance(free, Chosen):
            return free
        late = self._gather_late(self._strategies_of(free))
        if limit is None or self.memory.required(late.numbers) <= limit:
            return self._describe(late, None, free.seconds)
        self._note_excess(self.memory.parts(late.numbers)[1], limit)
        if self.memory.bound() > limit:
            return self._nothing_fits()
        seen = Seen(self.memory, late.numbers)
        if has_other_ways and seen.leaves_nothing(self.problem, limit, request.tuning):
            return self._too_large(seen.too_large)
        if self.shared is not None and not is_tight:  # memory rows are of the graph's own choices
            free = self._choose_free(self.problem, cutoff_s, free_work)
            if not isinstance(free, Chosen):
                return free
        budget = self._budget_within_memory(cutoff_s, most_work - (request.budget.spent - spent))
        return self._plan_within(
            limit, free, seen, cutoff_s=cutoff_s, budget=budget, rival_s=rival_s, has_other_ways=has_other_ways
        )

    def _plan_within(
        self,
        limit: int,
        free: Chosen,
        seen: Seen,
        *,
        cutoff_s: float,
        budget: Budget,
        rival_s: Callable[[], float],
        has_other_ways: bool,
    ) -> PlannedStep | NothingFits | CutOff | NotSearched | Unreachable | Unfinished:
        """The best plan within a limit that `free`, the best choice, exceeds."""
        tuning = self.request.tuning
        problem = dataclasses.replace(self.problem, cutoff_s=cutoff_s, budget=budget, proof=tuning.limited_gap)
        found = choose_within_limit(
            problem,
            self.memory,
            limit,
            free=free,
            seen=seen,
            rival_s=rival_s,
            has_other_ways=has_other_ways,
            tuning=tuning,
        )
        match found:
            case Fits(choice, copy_span, unlimited_s):
                late = choice if copy_span is not None else self._gather_late(choice)
                does_fit = late.numbers == choice.numbers or self.memory.required(late.numbers) <= limit
                return self._describe(late if does_fit else choice, copy_span, unlimited_s)
            case TooLarge() as too_large:
                return self._too_large(too_large)
            case ended:
                return ended

    def _choose_free(
        self, problem: ChoiceProblem, cutoff_s: float, work: float
    ) -> Chosen | CutOff | NotSearched | Unreachable | Unfinished:
        """The best choice without a limit, for so much work."""
        request, problem = self.request, dataclasses.replace(problem, cutoff_s=cutoff_s)
        hurried = request.budget.hurried(work=work)
        free = choose(dataclasses.replace(problem, budget=hurried))
        if (hurried.is_late or isinstance(free, Unfinished)) and not request.budget.is_over:
            # There is no plan at all. What the clock left of this search is far from the best, and a search within the memory
            # that begins there takes ten times as long as one that ends here.
            free = choose(dataclasses.replace(problem, budget=request.budget.limit(work=work)))
        if isinstance(free, DoesNotFit):
            raise AssertionError("a problem without memory rows fits")
        if problem.ties is None and isinstance(free, Chosen | CutOff | NotSearched):
            self.bound_s = self.bound_s or free.lower_bound_s
        if isinstance(free, Chosen):
            self.choice_s = self.choice_s or free.lower_bound_s
        return free

    def _budget_within_memory(self, cutoff_s: float, most_work: float) -> Budget:
        """What a search within the memory may take; where there is no plan to fall back on, also where the clock has ended."""
        request = self.request
        if math.isfinite(cutoff_s):
            return request.budget.limit(work=min(most_work, request.tuning.mesh_work))
        return request.budget.limit(seconds=max(request.budget.clock_left_s, request.tuning.first_limited_s))

    def _strategies_of(self, choice: Chosen) -> Chosen:
        """The strategies that a choice of the wider objective stands for."""
        return choice if self.shared is None else self.shared.choose_strategies(choice)

    def _gather_late(self, choice: Chosen) -> Chosen:
        """The choice with inputs gathered where they are read, and state that lies where its moves cost a whole step least."""
        numbers = settle_leaves(self.graph, choice.numbers) if self.is_whole else choice.numbers
        return dataclasses.replace(choice, numbers=gather_late(self.graph, numbers))

    def _nothing_fits(self) -> NothingFits:
        """What is known before anything was tried."""
        bound, tensors = self.memory.bound(), self.memory.least()[1]
        return NothingFits(mesh=self.mesh, bound_bytes=bound, tried_bytes=None, tensors=tensors, is_settled=True)

    def _too_large(self, found: TooLarge) -> NothingFits:
        """What is known after some choices were tried."""
        return dataclasses.replace(self._nothing_fits(), tried_bytes=found.tried_bytes, is_settled=found.is_settled)

    def _note_excess(self, temporaries: int, limit: int) -> None:
        """State in its smallest layouts costs little, so it is what else is alive that has to shrink."""
        kept = self.memory.least_kept()
        self.excess = temporaries / (limit - kept) if kept < limit else math.inf

    def _describe(self, choice: Chosen, copy_span: int | None, unlimited_s: float) -> PlannedStep:
        request = self.request
        assignment = assign(self.graph, choice.numbers, copy_span=copy_span)
        plan = describe_plan(
            self.traced,
            self.graph,
            self.memory,
            assignment,
            choice,
            cluster=request.cluster,
            memory_limit_bytes=request.memory_limit_bytes,
            allow_redundant_compute=request.options.allow_redundant_compute,
        )
        part = unlimited_s / choice.seconds if choice.seconds > 0 else 1.0
        return PlannedStep(self.traced, dataclasses.replace(plan, unlimited_s=plan.step_s * part), assignment)


def graph_for(
    traced: TracedStep,
    mesh: LogicalMesh,
    request: PlanRequest,
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None = None,
    batch: BatchSplit | None = None,
    exposure: Exposure | None = None,
    budget: Budget | None = None,
) -> StrategyGraph:
    """The strategy graph of a step whose inputs may have the given layouts; outputs follow the state. Raises LateError."""
    following = allowed_outputs(traced, mesh, request.constraints) if outputs is None else list(outputs)
    return build_graph(
        traced.program,
        mesh,
        request.cluster,
        request.options,
        input_layouts=inputs,
        output_layouts=following,
        batch=batch,
        asked=layouts_asked(traced, mesh, request.constraints),
        exposure=exposure,
        catalogue=request.catalogues.of(mesh, request.cluster, request.options),
        budget=budget,
    )


def _batch_split(traced: TracedStep, mesh: LogicalMesh, request: PlanRequest) -> BatchSplit | None:
    """What a data-parallel preset says of the examples; under microbatches they are the dimension after those."""
    found = batch_axes([leaf.one for leaf in traced.inputs], mesh, request.constraints, shared=traced.shared)
    dims = {i: 1 if traced.inputs[i].microbatches > 1 else 0 for i in found}
    return BatchSplit(dims, next(iter(found.values()))) if found else None


def _classes(graph: StrategyGraph, request: PlanRequest) -> list[np.ndarray] | None:
    """Classes of each node's choices that exchanging equal axes makes alike; only three or more axes are worth it.

    Where no two axes have the same size, all that have the same link count as equal: a looser bound, and still one.
    """
    mesh = graph.mesh
    if sum(size > 1 for size in mesh.shape) < request.tuning.merged_axes:
        return None
    links = request.cluster.links_of(mesh.shape)
    groups = find_equal_axes(mesh.shape, links) or find_equal_axes([min(size, 2) for size in mesh.shape], links)
    numbers, known = ClassNumbers(groups), dict[int, np.ndarray]()
    for node in graph.nodes:
        strategies = node.choices.strategies
        if id(strategies) not in known:
            known[id(strategies)] = numbers.of([(*s.inputs, *s.outputs) for s in strategies])
    return [known[id(node.choices.strategies)] for node in graph.nodes]
