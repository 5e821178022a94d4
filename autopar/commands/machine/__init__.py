"""What measures and describes machines: `calibrate`, `collectives`, `doctor`."""
