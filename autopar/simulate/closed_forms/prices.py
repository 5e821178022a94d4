"""Seconds of the operations of a training step on one stage's devices.

In: a cluster, the number format of the products, the stage's logical mesh (stages, data ranks outside an expert group,
expert ranks, context ranks, tensor ranks), row-major: tensor ranks are neighbours, context ranks come next, as in Megatron-LM
and Llama 3. Out: seconds of a product (peak times the measured efficiency of its shape, or the memory traffic of its operands,
whichever is longer), of a fused group (bytes over sustained bandwidth) and of an exchange (cheapest algorithm over the tiers
that its group crosses). What can go wrong: a mesh larger than the machine, which raises ValueError with both numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from autopar.cost_model.collectives import MeshCosts
from autopar.cost_model.machine import Cluster
from autopar.simulate.closed_forms.operations import Exchange, FusedGroup, Group, MatrixProduct, Operation, Timed


@dataclasses.dataclass(frozen=True)
class InTraining:
    """What operations reach inside a training step, as parts of what they reach in a loop of their own.

    `matrix`: clocks fall under hours of full power, operands come cold from memory, and no shape is the one a library was
    tuned for. `memory`: pointwise kernels of a framework against a large copy.
    """

    matrix: float = 1.0
    memory: float = 1.0


# The only constant of training steps that is fitted on measurements: least squared error of the closed form on the eight rows of
# Korthikanti et al. (2022), in steps of 0.01 (`benchmarks/cost_model_error.py --fit`). It holds for every cluster.
FITTED = InTraining(matrix=0.94)
FITTED_PLANS = InTraining(matrix=0.94, memory=0.75)
"""The same where a planner's plans say what the parts of a step do. Its kernels merge more than those of the frameworks, so they
move fewer bytes: `memory` is what makes both ways agree in the mean over a grid of plans (test_plans_and_closed_forms). A device
whose plans know it already, by its `kernel_efficiency`, pays the rest."""
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
"""The format of products in each precision; under fp8 of those that are not `narrow`."""
NARROW = "float8"
_DATA, _EXPERT, _CONTEXT, _TENSOR = 1, 2, 3, 4
_AXES: dict[Group, tuple[int, ...]] = {
    "tensor": (_TENSOR,),
    "context": (_CONTEXT,),
    "expert": (_EXPERT,),
    "data": (_DATA, _EXPERT, _CONTEXT),
}


def multiplies_narrow(cluster: Cluster) -> bool:
    """Whether the device file states what products of 8-bit operands reach: a peak and an efficiency."""
    device = cluster.device
    return NARROW in device.peak_flops_per_s and NARROW in device.matrix_efficiency


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePrices:
    """Prices of operations on one pipeline stage; see the module."""

    cluster: Cluster
    dtype: str
    element_bytes: int
    mesh: tuple[int, int, int, int, int]
    reached: InTraining = FITTED

    @functools.cached_property
    def _costs(self) -> MeshCosts:
        return self.cluster.mesh_costs(self.mesh)

    def seconds(self, operation: Operation) -> float:
        """Seconds of one operation run alone."""
        match operation:
            case MatrixProduct():
                return self.product_s(operation)
            case FusedGroup():
                return self.fused_s(operation.moved_bytes)
            case Exchange(seconds=float(known)):
                return known
            case Exchange():
                return self.exchange_s(operation.kind, operation.full_bytes, operation.group)
            case Timed():
                return operation.seconds

    def product_s(self, product: MatrixProduct) -> float:
        """Seconds of a matrix product: arithmetic at the efficiency of its shape, or its traffic; padding, and the launch."""
        device = self.cluster.device
        m, n, k = product.m, product.n, product.k
        dtype, padding_s = NARROW if product.narrow else self.dtype, 0.0
        rate = device.product_flops_per_s(dtype, m, n, k, batch=product.batch, convolution=product.convolution)
        rate *= device.sustained.get(dtype, 1.0)
        if product.attention and self.element_bytes == 2:
            rate = device.attention_flops_per_s(k, n, backward=product.attention == "backward") or rate
        elif not (product.attention or product.convolution):
            padding_s = device.padding_s(dtype, m, n, k, batch=product.batch)
        rate *= self.reached.matrix
        # The scores of a fused kernel, its result here or its operand, stay on the chip.
        scores = 0.0 if product.attention else m * n
        moved = self.element_bytes * product.batch * (m * k + k * n + scores) + product.extra_bytes
        moved -= (self.element_bytes - 1) * product.batch * (m * k + k * n) if product.narrow else 0.0
        return max(product.flops / rate, moved / device.sustained_bytes_per_s) + padding_s + device.launch_s

    def fused_s(self, moved_bytes: float) -> float:
        """Seconds of a memory-bound kernel."""
        device = self.cluster.device
        return moved_bytes / (device.sustained_bytes_per_s * self.reached.memory) + device.launch_s

    def exchange_s(self, kind: str, full_bytes: float, group: Group) -> float:
        """Seconds of a collective over a group of this stage; `full_bytes` on its larger side."""
        return self._exchange_s(kind, full_bytes, _AXES[group])

    def _exchange_s(self, kind: str, full_bytes: float, along: Sequence[int]) -> float:
        axes = tuple(axis for axis in along if self.mesh[axis] > 1)
        if not axes or not full_bytes:
            return 0.0
        costs = self._costs
        price = {
            "all-reduce": costs.all_reduce_s,
            "reduce-scatter": costs.reduce_scatter_s,
            "all-gather": costs.all_gather_s,
            "all-to-all": costs.all_to_all_s,
            "permute": costs.permute_s,
        }[kind]
        return price(full_bytes, axes)

    def dense_gradient_s(self, kind: str, full_bytes: float) -> float:
        """Seconds to reduce or gather what all data-parallel and context-parallel ranks share."""
        return self.exchange_s(kind, full_bytes, "data")

    def expert_gradient_s(self, kind: str, full_bytes: float) -> float:
        """Seconds to reduce or gather experts, which only every expert_ranks-th data rank shares."""
        return self._exchange_s(kind, full_bytes, (_DATA, _CONTEXT))

    def hybrid_gradient_s(self, kind: str, full_bytes: float) -> float:
        """Seconds to reduce or gather what is divided among neighbouring data ranks and their context ranks.

        Of such groups there are several. Each scatters or gathers by itself; twins of all groups reduce their shards (Zhao et al.
        2023, section 3.2.2).
        """
        inside_s = self._exchange_s(kind, full_bytes, (_EXPERT, _CONTEXT))
        if kind != "reduce-scatter":
            return inside_s
        shard_bytes = full_bytes / (self.mesh[_EXPERT] * self.mesh[_CONTEXT])
        return inside_s + self._costs.all_reduce_s(shard_bytes, (_DATA,))

    def send_s(self, full_bytes: float, *, crosses_node: bool, split: bool) -> float:
        """Seconds to hand a stage's result to a neighbouring stage of as many devices.

        `split`: every tensor rank already holds its own part. If not, the cheaper of two ways: each rank sends all of it, or
        each sends its part and the receivers gather the whole.
        """
        part_s = self._permute_s(full_bytes / self.mesh[_TENSOR], crosses_node)
        if split or self.mesh[_TENSOR] == 1:
            return part_s
        whole_s = self._permute_s(full_bytes, crosses_node)
        return min(part_s + self.exchange_s("all-gather", full_bytes, "tensor"), whole_s)

    def _permute_s(self, sent_bytes: float, crosses_node: bool) -> float:
        """From each device of a stage to its twin in the next; devices of a node that do not send leave it their ports."""
        senders, node = math.prod(self.mesh[1:]), self.cluster.devices_per_node
        if node is None or not crosses_node or len(self.cluster.tiers) == 1 or senders % node == 0:
            return self.cluster.mesh_costs((2, senders)).permute_s(sent_bytes, (0,))
        ports = self.cluster.tiers[1].ports
        usual = ports / node
        mine = min(ports / min(senders, node), max(1.0, usual))
        return self.cluster.mesh_costs((2, node)).permute_s(sent_bytes * usual / mine, (0,))
