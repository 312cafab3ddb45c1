"""The predicted memory of a run, as its summary and the plan of a sweep hold it."""

from dataclasses import replace
from typing import Any

from .config import Experiment


def predict(experiment: Experiment, *, num_processes: int) -> dict[str, Any]:
    """The predicted keys of summary.json's `memory`, without a trace on the real device; takes a second or two.

    Raises whatever stands against tracing this network on fake tensors.
    """
    from .estimate import estimate  # loads torch's shape functions, for a second

    told = estimate(experiment, num_processes=num_processes)
    return {"predicted_peak_mib": told.peak_mib, "predicted": told.blocks()}


class Predictions:
    """Predictions for many runs, each configuration traced once: seeds do not change memory."""

    def __init__(self, *, most: int) -> None:
        self.most = most
        self.known: dict[str, dict[str, Any] | None] = {}

    def __call__(self, experiment: Experiment, *, num_processes: int) -> dict[str, Any] | None:
        """None where it cannot be predicted, or where `most` configurations have been."""
        key = f"{replace(experiment, seed=None)} on {num_processes}"
        if key not in self.known:
            if len(self.known) >= self.most:
                return None
            try:
                self.known[key] = predict(experiment, num_processes=num_processes)
            except Exception:  # the job itself says what is wrong
                self.known[key] = None
        return self.known[key]
