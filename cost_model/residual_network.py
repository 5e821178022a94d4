"""A wide residual network of bottleneck blocks as operations of one device.

Letters: C base channels, W width factor, b images per device, t tensor-parallel ranks. Stage i = 0..3 has c = 2^i C
channels; a block is 1x1 to c, 3x3 to W c (the first one of a later stage with stride 2), 1x1 to 4 c, each followed by batch
normalisation, plus its input (projected 1x1 where the shape changes). This is the network of the published measurements:
only the result of the 3x3 convolution is widened. A convolution k x k of ci to co channels at p output pixels is priced as the
matrix product (b p, k^2 ci) x (k^2 ci, co). Batch norms and activations are memory-bound: forward the statistics read once,
then read and write; backward three reads and a write.

Tensor parallelism: the first convolution whole, the second split by output channels, the third by input channels: one
all-reduce of the block's result forward, one of its input's gradient backward. What can go wrong: convolutions of few
channels run below the efficiency of an equal matrix product.
"""

from __future__ import annotations

import dataclasses

from autopar.cost_model.operations import Exchange, FusedGroup, MatrixProduct, Operation, Work

BLOCKS_PER_STAGE = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4


@dataclasses.dataclass(frozen=True)
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
                found.append(Block(incoming, channels, self.width_factor * channels, size, stride))
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


@dataclasses.dataclass(frozen=True)
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


def bottleneck_work(block: Block, *, samples: float, tensor_ranks: int, element_bytes: int, recompute: bool) -> Work:
    """One bottleneck for one microbatch on one device."""
    b, t, e = samples, tensor_ranks, element_bytes
    shares = (1.0, 1 / t, 1 / t, 1.0)  # parts of each convolution's work done here
    forward: list[Operation] = []
    backward: list[Operation] = []
    kept, parameters = 0.0, 0.0
    for number, conv in enumerate(block.convolutions):
        ci = conv.ci / t if number == 2 else conv.ci
        co = conv.co / t if number == 1 else conv.co
        rows, inner, result = b * conv.pixels, conv.k**2 * ci, e * b * conv.pixels * co
        read = (
            e * b * ci * (block.size**2 if number in (0, 3) else conv.pixels * (block.stride**2 if number == 1 else 1))
        )
        forward += [MatrixProduct(rows, co, inner), *(FusedGroup(result), FusedGroup(2 * result))]
        backward += [
            FusedGroup(2 * result),
            FusedGroup(3 * result),
            MatrixProduct(rows, inner, co),
            MatrixProduct(inner, co, rows),
        ]
        kept += read + result  # the convolution's input and the norm's
        parameters += conv.parameters * shares[number]
    result = e * b * block.pixels * block.outgoing
    joined: tuple[Operation, ...] = (Exchange("all-reduce", "tensor", result),) if t > 1 else ()
    middle = e * b * block.size**2 * block.channels
    returned: tuple[Operation, ...] = (Exchange("all-reduce", "tensor", middle),) if t > 1 else ()
    forward += [*joined, FusedGroup(3 * result)]
    backward = [FusedGroup(3 * result), *backward, *returned]
    taken = e * b * block.size**2 * block.incoming
    return Work(
        forward=tuple(forward),
        backward=tuple(backward),
        recomputed=tuple(forward) if recompute else (),
        parameters=parameters,
        kept_bytes=taken if recompute else kept,
        transient_bytes=kept if recompute else 0.0,
        boundary_bytes=result,
    )


def stem_work(shape: ResidualNetworkShape, *, samples: float, element_bytes: int) -> Work:
    """7x7 with stride 2, norm, and a 3x3 maximum with stride 2."""
    conv = _Convolution(3, shape.channels, 7, (shape.image_size // 2) ** 2)
    rows, result = samples * conv.pixels, element_bytes * samples * conv.pixels * shape.channels
    forward = (MatrixProduct(rows, conv.co, 147), FusedGroup(3 * result), FusedGroup(1.25 * result))
    backward = (FusedGroup(2.25 * result), FusedGroup(5 * result), MatrixProduct(147, conv.co, rows))
    return Work(forward, backward, parameters=conv.parameters, kept_bytes=2 * result)


def linear_head_work(shape: ResidualNetworkShape, *, samples: float) -> Work:
    """Mean over the image and the classifier."""
    wide = shape.blocks[-1].outgoing
    forward = (MatrixProduct(samples, shape.classes, wide),)
    backward = (MatrixProduct(samples, wide, shape.classes), MatrixProduct(wide, shape.classes, samples))
    return Work(forward, backward, parameters=wide * shape.classes)
