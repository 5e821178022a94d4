"""A training run from its first step to its last, over interruptions: `autopar.Run`."""

from autopar.training.guard import Guard as Guard
from autopar.training.progress import RunStep as RunStep
from autopar.training.run import Run as Run
from autopar.training.run import Trained as Trained
