"""Watches steps while they run: it measures each step, and names one that stands still."""

from autopar.monitor.metrics import StepMetrics as StepMetrics
from autopar.monitor.monitor import Monitor as Monitor
