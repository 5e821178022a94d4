"""Watches steps while they run: one that stands still is named, and each has its metrics."""

from autopar.monitor.metrics import StepMetrics as StepMetrics
from autopar.monitor.monitor import Monitor as Monitor
