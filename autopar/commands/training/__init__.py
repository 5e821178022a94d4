"""What trains: `train` and `demo`."""
