"""The logbook of a run: every number goes through here, to the console, to TensorBoard and into the summary.

On ranks above 0 it takes everything and writes nothing.
"""

import logging
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ..meters.time import Stopwatch, images_per_s, step_ms
from .card import memory_lines
from .events import Events, group_name
from .summary import BLOCKS, Summary

log = logging.getLogger("fulcrum")


class Logbook:
    """`summary` fills up as the run goes on; `close` writes it for the last time."""

    def __init__(self, folder: Path, summary: Summary, *, is_main: bool) -> None:
        self.folder, self.summary, self.is_main = folder, summary, is_main
        self.events: Events | None = None
        self.train_s_before = 0.0  # seconds of training of the run that this one goes on with
        self.progress: Any = None

    def say(self, line: str) -> None:
        if self.is_main:
            log.info(line)

    def warn(self, line: str) -> None:
        if self.is_main:
            log.warning("warning: %s", line)

    def traceback(self, text: str) -> None:
        """Of this process: into the log on rank 0, straight to the console on the others, which have no log."""
        if self.is_main:
            log.error(text.rstrip())
        else:
            print(text, file=sys.stderr)

    def start(self, hparams: dict[str, Any], card: Sequence[str], *, num_steps: int, from_step: int) -> None:
        """Everything about the run is known: says the card, writes the summary, opens the event file and, on a terminal,
        the bar. from_step: where a resumed run goes on."""
        if not self.is_main:
            return
        for line in card:
            self.say(line)
        self.summary.write(self.folder)
        self.events = Events(self.folder)
        assert self.summary.started is not None
        self.events.start_session(
            hparams,
            group=group_name(self.folder, self.summary.overrides),
            start_time=datetime.fromisoformat(self.summary.started).timestamp(),
            from_step=from_step,
        )
        for tag, lines in (("run/card", card), ("run/command", [self.summary.command])):
            self.events.text(tag, "\n".join(f"    {line}" for line in lines))  # Markdown for text as it stands
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
            self.progress = Progress(*columns, transient=True)
            terminal = sys.stdout
            self.progress.start()
            self.progress.add_task("", total=num_steps)
            _move_lines(terminal, sys.stdout)  # the bar's own stdout puts lines above the bar

    def steps(
        self,
        *,
        step: int,
        epoch: int,
        loss: float | None,
        learning_rate: float,
        loss_scale: float | None,
        timed: list[tuple[float, int]],
        peak_mib: float | None,
    ) -> None:
        """A log point: what happened since the last one. loss: mean over the samples of those steps."""
        if not self.is_main:
            return
        rate = images_per_s(timed)
        values = {
            "train/loss": loss,
            "train/learning_rate": learning_rate,
            "time/step_ms": step_ms(timed),
            "time/images_per_s": rate,
            "memory/peak_mib": peak_mib,
            "numerics/loss_scale": loss_scale,
        }
        if self.events:
            self.events.scalars(values, step)
        line = f"epoch {epoch}  step {step}  loss {_number(loss, '.4f')}  lr {learning_rate:.4g}"
        line += f"  {_number(rate, '.0f')} images/s"
        if self.progress:
            self.progress.update(self.progress.task_ids[0], completed=step, description=line)
        else:
            log.info(line)

    def evaluated(
        self, *, step: int, epoch: int, loss: float, accuracy: float, correct: int, images: int, samples: int, train_s: float
    ) -> bool:
        """The result of an evaluation; says whether it is the best so far.

        samples: images trained on so far; train_s: seconds of training so far, without evaluating and saving.
        """
        metrics = self.summary.metrics
        best = metrics["best_eval_accuracy"]
        is_best = best is None or accuracy > best
        metrics.update(eval_loss=loss, eval_accuracy=accuracy)
        train_s += self.train_s_before
        self.summary.evaluations.append(
            {"epoch": epoch, "step": step, "samples": samples, "train_s": train_s, "loss": loss, "accuracy": accuracy}
        )
        if is_best:
            metrics.update(best_eval_accuracy=accuracy, best_epoch=epoch)
        if self.events:
            self.events.scalars({"eval/loss": loss, "eval/accuracy": accuracy}, step)
            self.events.flush()
        self.say(
            f"epoch {epoch}  step {step}  eval loss {loss:.4f}  eval accuracy {100 * accuracy:.2f} % "
            f"({correct} of {images})" + ("  best so far" if is_best else "")
        )
        return is_best

    def close(self, stopwatch: Stopwatch, timed: list[tuple[float, int]]) -> None:
        """The end, whatever it is: times, status, the last rewrite of the summary."""
        if not self.is_main:
            return
        if self.progress:
            above_the_bar = sys.stdout
            self.progress.stop()
            _move_lines(above_the_bar, sys.stdout)
        seconds = stopwatch.read()
        time = self.summary.time
        time.update({f"{name}_s": seconds.get(name, 0.0) for name in ("setup", "train", "eval", "save", "wall")})
        time.update(step_ms=step_ms(timed), images_per_s=images_per_s(timed))
        target = self.summary.target_accuracy
        reached = [e["train_s"] for e in self.summary.evaluations if target is not None and e["accuracy"] >= target]
        time["to_target_s"] = reached[0] if reached else None
        if self.events:
            whole_run: dict[str, Any] = {f"run/{name}": time[name] for name in ("step_ms", "images_per_s", "wall_s")}
            memory = self.summary.memory
            whole_run |= {f"memory/{name}": memory[name] for name in ("peak_mib", *BLOCKS, "predicted_peak_mib")}
            whole_run["run/peak_mib"] = memory["peak_mib"]
            self.events.scalars(whole_run, self.summary.optimizer_steps)
            self.events.end_session(completed=self.summary.status == "completed")
            self.events.close()
        try:
            self.summary.write(self.folder)
        except OSError as error:
            self.warn(f"summary.json cannot be written ({error}); it says running")
        for line in memory_lines(self.summary.memory):
            self.say(line)
        accuracy = self.summary.metrics["eval_accuracy"]
        self.say(
            f"{self.summary.status} after {self.summary.optimizer_steps} steps in {seconds['wall']:.1f} s"
            + ("" if accuracy is None else f", eval accuracy {100 * accuracy:.2f} %")
            + ("" if self.summary.error is None else f": {self.summary.error}")
        )
        self.say(f"everything about this run is in {self.folder}")


def _move_lines(source: TextIO, to: TextIO) -> None:
    """Lets the log's lines to one stream go to another."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is source:
            handler.setStream(to)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
