"""TensorBoard: one event file a run, with its scalars on the axis of optimizer steps, its session in HParams, its texts.

One run is one HParams session in the run's own directory. torch's SummaryWriter.add_hparams opens a run of its own,
calls every run a success and drops what is null; the records are written here with the same protocol buffers instead.
TensorBoard takes the columns from the first run it finds and merges chart layouts by title, so both are the same in
every run. Of the records of a run it keeps the first of each kind.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HPARAM_COLUMNS = (
    "precision",
    "parallelism",
    "accumulation",
    "checkpointing",
    "lora",
    "model",
    "data",
    "optimizer",
    "schedule",
    "batch.effective",
    "batch.per_device",
    "world_size",
    "learning_rate",
    "overrides",
)
NUM_SHOWN = 5  # columns of either kind that TensorBoard shows before anything is clicked
METRIC_COLUMNS = (
    "run/step_ms",
    "run/peak_mib",
    "eval/accuracy",
    "run/wall_s",
    "run/images_per_s",
    "eval/loss",
    "train/loss",
)
# The tab Custom Scalars: a category holds charts, a chart every tag that one of its patterns matches.
CHARTS = {
    "Speed": {"Step, ms": ["time/step_ms"], "Images/s": ["time/images_per_s"]},
    "Memory": {"Memory, MiB": ["memory/.*"]},
    "Numerics": {"Loss scale": ["numerics/loss_scale"], "Learning rate": ["train/learning_rate"]},
    "Learning": {"Loss": ["train/loss", "eval/loss"], "Accuracy": ["eval/accuracy"]},
}
FLUSH_S = 10  # a kill loses the points of this long at most

SESSION_START, SESSION_END = "_hparams_/session_start_info", "_hparams_/session_end_info"


log = logging.getLogger("fulcrum")


class Events:
    """The event file of one run, in its own directory. A resumed run opens a second one there."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = folder
        self.writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        self.has_failed = False

    def start_session(self, hparams: dict[str, Any], *, group: str, start_time: float, from_step: int = 0) -> None:
        """The columns, the charts, and this run's values: one for every column, perhaps more.

        Runs of one `group` share a row with their mean; empty: a row of its own. start_time: seconds since the epoch.
        from_step: the points of an earlier attempt after this step were undone.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams import plugin_data_pb2

        _forget_end(self.folder)
        # TensorBoard drops what it has from this step on, unless it is the first such event of the run.
        self._add(step=from_step + 1, session_log=SessionLog(status=SessionLog.START))
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=start_time, group_name=group)
        for name, value in hparams.items():
            if isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = value
        self._record("_hparams_/experiment", experiment=_columns(hparams))
        self._record(SESSION_START, session_start_info=start)
        self._tensor("custom_scalars__config__", "custom_scalars", _layout().SerializeToString())
        self.flush()

    def scalars(self, values: dict[str, float | None], step: int) -> None:
        """One point a tag; what was not measured has no point."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        self._add(step=step, summary=Summary(value=points))

    def text(self, tag: str, markdown: str) -> None:
        """A page of the tab Text."""
        self._tensor(tag, "text", markdown.encode())

    def end_session(self, *, completed: bool, end_time: float | None = None) -> None:
        """end_time: seconds since the epoch; None is now."""
        from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if completed else api_pb2.STATUS_FAILURE
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time() if end_time is None else end_time)
        self._record(SESSION_END, session_end_info=end)

    def flush(self) -> None:
        self._unless_failed(self.writer.flush)

    def close(self) -> None:
        self._unless_failed(self.writer.close)

    def _record(self, tag: str, **content: Any) -> None:
        """One of the records of HParams; they have no value, only what describes it."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        metadata = _metadata("hparams", HParamsPluginData(version=0, **content).SerializeToString())
        self._add(step=0, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata)]))

    def _tensor(self, tag: str, plugin: str, value: bytes) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        tensor = TensorProto(dtype=DT_STRING, string_val=[value])
        self._add(step=0, summary=Summary(value=[Summary.Value(tag=tag, metadata=_metadata(plugin), tensor=tensor)]))

    def _add(self, *, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step, **content)
        self._unless_failed(lambda: self.writer.add_event(event))

    def _unless_failed(self, act: Callable[[], None]) -> None:
        """A disk that is full ends the curves, not the run."""
        if not self.has_failed:
            try:
                act()
            except OSError as error:
                self.has_failed = True
                log.warning("warning: the event file cannot be written (%s); the run goes on without it", error)


def group_name(folder: Path, overrides: list[str]) -> str:
    """What the jobs of one sweep that differ by seed alone have in common; empty for a run that is no job of a sweep."""
    is_job = (folder.parent / "multirun.yaml").exists()  # Hydra writes it before the first job
    return f"{folder.parent} {without_seed(overrides)}".rstrip() if is_job else ""


def without_seed(overrides: list[str]) -> str:
    """The overrides as typed, but for the seed."""
    return " ".join(word for word in overrides if word.partition("=")[0].lstrip("+") != "seed")


def end_session_of(folder: Path, *, completed: bool, end_time: float) -> None:
    """Writes the end of a run whose process is gone, in place of an end that is there; nothing where no session started."""
    if any(SESSION_START.encode() in path.read_bytes() for path in _event_files(folder)):
        _forget_end(folder)
        events = Events(folder)
        events.end_session(completed=completed, end_time=end_time)
        events.close()


def _forget_end(folder: Path) -> None:
    """Takes the ends of earlier attempts out of their event files: TensorBoard would keep the first one."""
    for path in _event_files(folder):
        if SESSION_END.encode() in path.read_bytes():
            from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
            from tensorboard.summary.writer.record_writer import RecordWriter

            temporary = folder / "events.partial"  # a name that TensorBoard does not read
            with open(temporary, "wb") as file:
                for record in RawEventFileLoader(str(path)).Load():
                    if SESSION_END.encode() not in record:
                        RecordWriter(file).write(record)
            os.replace(temporary, path)


def _event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))


def _columns(hparams: dict[str, Any]) -> Any:
    from tensorboard.plugins.hparams import api_pb2

    text, number = api_pb2.DATA_TYPE_STRING, api_pb2.DATA_TYPE_FLOAT64
    columns = [
        # TensorBoard puts the columns that differ first and sorts by name; whether they do is not known in one run.
        api_pb2.HParamInfo(name=name, type=text if isinstance(hparams[name], str) else number, differs=index < NUM_SHOWN)
        for index, name in enumerate(HPARAM_COLUMNS)
    ]
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in METRIC_COLUMNS]
    return api_pb2.Experiment(hparam_infos=columns, metric_infos=metrics)


def _layout() -> Any:
    from tensorboard.plugins.custom_scalar import layout_pb2 as pb

    return pb.Layout(
        category=[
            pb.Category(
                title=category,
                chart=[pb.Chart(title=title, multiline=pb.MultilineChartContent(tag=tags)) for title, tags in charts.items()],
            )
            for category, charts in CHARTS.items()
        ]
    )


def _metadata(plugin: str, content: bytes = b"") -> Any:
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata

    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin, content=content))
