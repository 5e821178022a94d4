"""Input: batches on the devices that compute with them, drawn ahead of the step, from a source that can be resumed exactly."""

from autopar.data.sharded import ShardedBatches as ShardedBatches
from autopar.data.sharded import sharded as sharded
