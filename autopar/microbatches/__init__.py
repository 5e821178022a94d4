"""The batch as a mesh axis laid out in time: which operations run once per microbatch, and how their results add up."""
