"""Checkpoints: the state of a step on disk, written and read by orbax, each process its own part."""

from autopar.checkpoints.folder import Checkpoints as Checkpoints
from autopar.checkpoints.folder import Restored as Restored
from autopar.checkpoints.orbax_leaf import register_with_orbax as register_with_orbax
from autopar.checkpoints.save import Saving as Saving
from autopar.checkpoints.save import restore as restore
from autopar.checkpoints.save import save as save
