"""A wide residual network of bottleneck blocks as operations of one device.

Letters: C base channels, W width factor, b images per device, t tensor-parallel ranks. Stage i = 0..3 has c = 2^i C
channels; a block is 1x1 to c, 3x3 to W c (the first one of a later stage with stride 2), 1x1 to 4 c, each followed by batch
normalisation, plus its input (projected 1x1 where the shape changes). This is the network of the published measurements:
only the result of the 3x3 convolution is widened. A convolution k x k of ci to co channels at p output pixels is priced as the
matrix product (b p, k^2 ci) x (k^2 ci, co). Batch norms and activations are memory-bound: forward the statistics read once,
then read and write; backward three reads and a write. Norms are over the whole batch: both directions reduce two sums a channel
over the data-parallel ranks.

Tensor parallelism: the first and third convolutions (and the projection) split by input channels, the second by output
channels: forward an all-reduce of what the first and the third give, backward one of the second's input gradient and a
gather of the block's. What can go wrong: convolutions of few
channels run below the efficiency of an equal matrix product.
"""

from __future__ import annotations

import dataclasses

from autopar.simulate.closed_forms.operations import Exchange, FusedGroup, MatrixProduct, Operation, Work

BLOCKS_PER_STAGE = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualNetworkShape:
    """Sizes of a wide residual network for square images of three channels."""

    depth: int
    channels: int
    width_factor: int
    image_size: int
    classes: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every bottleneck, in order."""
        found: list[Block] = []
        incoming, size = self.channels, self.image_size // 4
        for stage, count in enumerate(BLOCKS_PER_STAGE[self.depth]):
            channels = self.channels * 2**stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                found.append(
                    Block(
                        incoming=incoming,
                        channels=channels,
                        width=self.width_factor * channels,
                        size=size,
                        stride=stride,
                    )
                )
                incoming, size = _EXPANSION * channels, size // stride
        return tuple(found)

    @property
    def parameters(self) -> float:
        """Parameters in all, with the stem, norms and the linear head."""
        stem = 3 * 49 * self.channels
        return stem + sum(block.parameters for block in self.blocks) + self.blocks[-1].outgoing * self.classes

    def forward_flops(self, samples: float) -> float:
        """FLOPs of the convolutions and the head of one forward pass."""
        stem = _Convolution(3, self.channels, 7, (self.image_size // 2) ** 2)
        convolutions = [stem, *(conv for block in self.blocks for conv in block.convolutions)]
        head = 2 * self.blocks[-1].outgoing * self.classes
        return samples * (sum(conv.flops for conv in convolutions) + head)


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """k x k from `ci` to `co` channels at `pixels` output positions."""

    ci: int
    co: int
    k: int
    pixels: int

    @property
    def parameters(self) -> int:
        return self.k * self.k * self.ci * self.co

    @property
    def flops(self) -> float:
        return 2.0 * self.parameters * self.pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A bottleneck: `incoming` channels of `size` x `size` pixels to 4 `channels` at size / stride."""

    incoming: int
    channels: int
    width: int
    size: int
    stride: int

    @property
    def outgoing(self) -> int:
        """Channels of the result."""
        return _EXPANSION * self.channels

    @property
    def pixels(self) -> int:
        """Positions of the result."""
        return (self.size // self.stride) ** 2

    @property
    def convolutions(self) -> tuple[_Convolution, ...]:
        """In, middle, out, and the projection if there is one."""
        main = (
            _Convolution(self.incoming, self.channels, 1, self.size**2),
            _Convolution(self.channels, self.width, 3, self.pixels),
            _Convolution(self.width, self.outgoing, 1, self.pixels),
        )
        projected = self.incoming != self.outgoing or self.stride > 1
        return (*main, _Convolution(self.incoming, self.outgoing, 1, self.pixels)) if projected else main

    @property
    def parameters(self) -> float:
        """Convolutions and the scale and shift of each norm."""
        return sum(conv.parameters + 2 * conv.co for conv in self.convolutions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSplit:
    """How a stage runs its blocks: b images per device, t ranks; `sequence_parallel`: what lies between is split as well."""

    samples: float
    tensor_ranks: int = 1
    sequence_parallel: bool = False
    element_bytes: int = 4
    recompute: bool = False


def bottleneck_work(block: Block, split: BlockSplit) -> Work:
    """One bottleneck for one microbatch on one device."""
    t = split.tensor_ranks
    outer = 1 / t if split.sequence_parallel else 1.0
    unit = split.element_bytes * split.samples
    forward: list[Operation] = []
    backward: list[Operation] = []
    kept = 0.0
    for number, conv in enumerate(block.convolutions):
        by_column = number == 1
        ci, co = (conv.ci, conv.co / t) if by_column else (conv.ci / t, conv.co)
        rows, inner = split.samples * conv.pixels, conv.k**2 * ci
        # A norm works on the split result of the second convolution, and on whole ones, or a part of them, elsewhere.
        normed = unit * conv.pixels * (co if by_column else conv.co * outer)
        taken = unit * ci * (block.size**2 if number != 2 else conv.pixels)
        whole = unit * conv.pixels * conv.co
        forward += [_product(rows, co, inner), *_all_reduce(split, whole, here=not by_column)]
        sums = Exchange(kind="all-reduce", group="data", full_bytes=2 * split.element_bytes * co)
        forward += [FusedGroup(normed), sums, FusedGroup(2 * normed)]
        backward = [
            FusedGroup(2 * normed),
            sums,
            FusedGroup(3 * normed),
            _product(rows, inner, co),
            *_all_reduce(split, unit * block.size**2 * conv.ci, here=by_column),
            _product(inner, co, rows),
            *backward,
        ]
        kept += taken + normed
    result = unit * block.pixels * block.outgoing
    gathered = unit * block.size**2 * block.incoming
    if t > 1:
        backward.append(Exchange(kind="all-gather", group="tensor", full_bytes=gathered))
    forward.append(FusedGroup(3 * result * outer))
    entered = gathered * outer
    return Work(
        forward=tuple(forward),
        backward=(FusedGroup(3 * result * outer), *backward),
        recomputed=tuple(forward) if split.recompute else (),
        parameters=sum(conv.parameters for conv in block.convolutions) / t,
        kept_bytes=entered if split.recompute else kept,
        transient_bytes=kept if split.recompute else 0.0,
        boundary_bytes=result,
    )


def _product(m: float, n: float, k: float) -> MatrixProduct:
    return MatrixProduct(m=m, n=n, k=k, convolution=True)


def _all_reduce(split: BlockSplit, full_bytes: float, *, here: bool) -> tuple[Operation, ...]:
    return (
        (Exchange(kind="all-reduce", group="tensor", full_bytes=full_bytes),) if here and split.tensor_ranks > 1 else ()
    )


def stem_work(shape: ResidualNetworkShape, split: BlockSplit) -> Work:
    """7x7 with stride 2, norm, and a 3x3 maximum with stride 2."""
    conv = _Convolution(3, shape.channels, 7, (shape.image_size // 2) ** 2)
    rows = split.samples * conv.pixels
    result = split.element_bytes * rows * shape.channels
    forward = (_product(rows, conv.co, 147), FusedGroup(3 * result), FusedGroup(1.25 * result))
    backward = (FusedGroup(2.25 * result), FusedGroup(5 * result), _product(147, conv.co, rows))
    return Work(forward=forward, backward=backward, parameters=conv.parameters, kept_bytes=2 * result)


def linear_head_work(shape: ResidualNetworkShape, split: BlockSplit) -> Work:
    """Mean over the image and the classifier."""
    wide, samples = shape.blocks[-1].outgoing, split.samples
    forward = (MatrixProduct(m=samples, n=shape.classes, k=wide),)
    backward = (MatrixProduct(m=samples, n=wide, k=shape.classes), MatrixProduct(m=wide, n=shape.classes, k=samples))
    return Work(forward=forward, backward=backward, parameters=wide * shape.classes)
