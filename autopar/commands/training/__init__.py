"""What makes steps: `train`, `run`, `bench` and `demo`."""
