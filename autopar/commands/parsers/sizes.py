"""MODEL, and the flags of its sizes, which are the fields of its config."""

from __future__ import annotations

import argparse
import dataclasses

from autopar.commands.arguments import values
from autopar.models.published_sizes import published_sizes

_MODELS_HELP = (
    "a model, named right after the command: mlp, gpt, gpt_scan, moe, wide_resnet, bert, t5, llama, unet or densenet; "
    "its sizes are flags, see `%(prog)s gpt --help`"
)
STEPS_HELP = (
    _MODELS_HELP + "; or your own step as module:function, where function() returns (train_step, state_shapes, "
    "batch_shapes), the shapes as trees of arrays or jax.ShapeDtypeStruct"
)
TRAINED_HELP = (
    _MODELS_HELP
    + "; or your own step as module:function, where function() returns (train_step, state, batches): arrays or a "
    "function that makes them, and arrays, an iterable, or a function that returns one"
)


def add_sizes(parser: argparse.ArgumentParser, model: str) -> None:
    """A flag for each field of the model's config."""
    group = parser.add_argument_group(f"sizes of {model}")
    if known := published_sizes(model):
        group.add_argument(
            "--size",
            type=values.published_size(model),
            default={},
            metavar="NAME",
            dest="published",
            help=f"a published one, which the flags below override: {', '.join(known)}",
        )
    for field in dataclasses.fields(values.model_entry(model).config):
        flag, dest, default = f"--{field.name.replace('_', '-')}", f"size_{field.name}", f"default {field.default}"
        if field.type is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, dest=dest, default=argparse.SUPPRESS, help=default)
        else:
            kind = field.type if isinstance(field.type, type) else str
            read_size, choices = values.size_reader(kind), field.metadata.get("choices")
            metavar = None if choices else kind.__name__.upper()
            group.add_argument(
                flag,
                type=read_size,
                choices=choices,
                metavar=metavar,
                dest=dest,
                default=argparse.SUPPRESS,
                help=default,
            )
