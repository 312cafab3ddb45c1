"""What a run leaves behind for people: lines on the console, summary.json, TensorBoard events. Rank 0 only."""

from .logbook import Logbook
from .summary import SUMMARY, Summary

__all__ = ["SUMMARY", "Logbook", "Summary"]
