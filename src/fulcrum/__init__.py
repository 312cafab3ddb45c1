"""Fulcrum: training levers on one run, and the true cost of each in time, memory and accuracy."""

__version__ = "0.1.0"
