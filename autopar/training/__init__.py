"""A training run from its first step to its last, over interruptions: `autopar.Run`."""

from autopar.explain.training_progress import RunStep as RunStep
from autopar.training.guard import Guard as Guard
from autopar.training.run import Run as Run
from autopar.training.run import Trained as Trained
