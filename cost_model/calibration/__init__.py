"""Calibration: measure the devices at hand, and find the figures of the cost model that explain the measurements."""
