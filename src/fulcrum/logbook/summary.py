"""summary.json: what was asked for, what was in force, what came out; there whatever the end of the run is."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..refusal import Refusal

SUMMARY = "summary.json"
EARLIER = "earlier"  # where a job that is run again leaves its attempt before

# startup: from the start of the process to the start of the run; wall = setup + train + eval + save; to_target: seconds
# of training until an evaluation reached `target_accuracy`; job: what a sweep waited for the job, all of it.
TIMES = (
    "startup_s",
    "wall_s",
    "setup_s",
    "train_s",
    "eval_s",
    "save_s",
    "step_ms",
    "images_per_s",
    "to_target_s",
    "job_s",
)

# peak: the most that was allocated at once, of all ranks the one with the most; first_step and steady: within the first
# applied step and the second; reserved: with what the CUDA allocator kept for later; predicted: the blocks told before.
BLOCKS = ("parameters_mib", "gradients_mib", "optimizer_mib", "activations_mib", "buffers_mib", "data_mib")
PEAKS = ("peak_mib", "first_step_peak_mib", "steady_peak_mib", "reserved_mib", "rank_peaks_mib")
MEMORY = (*PEAKS, *BLOCKS, "predicted_peak_mib", "predicted", "method")


@dataclass(kw_only=True, slots=True)
class Summary:
    """The keys of the file. None: not known, or not measured."""

    status: str = "running"
    started: str | None = None
    choices: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    command: str = ""
    seed: int | None = None
    batch: dict[str, int] = field(default_factory=dict)
    optimizer_steps: int = 0
    skipped_steps: int = 0
    epochs: int = 0
    failed_saves: int = 0
    learning_rate: dict[str, float] = field(default_factory=dict)
    precision: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    metrics: dict[str, float | int | None] = field(
        default_factory=lambda: dict.fromkeys(("train_loss", "eval_loss", "eval_accuracy", "best_eval_accuracy", "best_epoch"))
    )
    target_accuracy: float | None = None
    evaluations: list[dict[str, float | int]] = field(default_factory=list)
    time: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(TIMES))
    memory: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(MEMORY))
    model: dict[str, int] = field(default_factory=dict)
    data: dict[str, int | str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    source: dict[str, str | bool] = field(default_factory=dict)
    error: str | None = None

    def claim(self, folder: Path, *, again: bool) -> None:
        """Writes the file for the first time. Two starts cannot share a folder: the second is refused, unless it means
        to go on with that run (`again`)."""
        folder.mkdir(parents=True, exist_ok=True)
        if again:
            self.write(folder)
            return
        try:
            with open(folder / SUMMARY, "x") as file:
                file.write(self.to_json())
        except FileExistsError:
            raise taken(folder) from None

    def write(self, folder: Path) -> None:
        """Rewrites the file whole."""
        folder.mkdir(parents=True, exist_ok=True)  # whoever removed it while the run went on: what came out stays
        temporary = folder / f"{SUMMARY}.partial"
        temporary.write_text(self.to_json())
        os.replace(temporary, folder / SUMMARY)

    @staticmethod
    def read(folder: Path) -> dict[str, Any]:
        return json.loads((folder / SUMMARY).read_text())

    @staticmethod
    def amend(folder: Path, record: dict[str, Any]) -> None:
        """Rewrites the file of a run that could not do it itself."""
        Summary(**record).write(folder)

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Numbers that are not finite become None: JSON has no word for them."""
        return _finite(asdict(self))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"


def taken(folder: Path) -> Refusal:
    return Refusal(f"hydra.run.dir={folder} already holds a run; use resume=auto to go on with it, or another directory")


def set_aside(folder: Path) -> None:
    """Moves an attempt that is there into `earlier/<number>/`: nothing written is lost, and TensorBoard sees one run.

    What Hydra has just written for the job that starts now (.hydra/, an empty log) stays.
    """
    if not (folder / SUMMARY).exists():
        return
    attempts = folder / EARLIER
    attempt = attempts / str(sum(1 for _ in attempts.glob("*")) + 1)
    attempt.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name not in (EARLIER, ".hydra"):
            path.rename(attempt / path.name.replace("tfevents", "earlier"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value
