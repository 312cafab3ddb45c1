"""TensorBoard: scalars on the axis of optimizer steps, and the three HParams records of a run, in one event file.

torch's SummaryWriter.add_hparams opens a run of its own, calls every run a success and drops what is null; the records
are written here with the same protocol buffers instead. TensorBoard uses the first experiment record it finds under
its log directory, so the columns are a fixed list, the same in every run.
"""

import time
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
    "seed",
)
METRIC_COLUMNS = (
    "time/step_ms",
    "memory/peak_mib",
    "eval/accuracy",
    "time/wall_s",
    "time/images_per_s",
    "eval/loss",
    "train/loss",
)


class Events:
    """The event file of one run, in its own directory."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder))

    def scalars(self, values: dict[str, float | None], step: int) -> None:
        """One point a tag; what was not measured has no point."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        self._add(Summary(value=points), step)

    def start_session(self, hparams: dict[str, Any]) -> None:
        """The columns, and this run's values; `hparams` has every column."""
        from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

        numeric, text = api_pb2.DATA_TYPE_FLOAT64, api_pb2.DATA_TYPE_STRING
        columns = [
            api_pb2.HParamInfo(name=name, type=text if isinstance(hparams[name], str) else numeric) for name in HPARAM_COLUMNS
        ]
        metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in METRIC_COLUMNS]
        experiment = api_pb2.Experiment(hparam_infos=columns, metric_infos=metrics)
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name in HPARAM_COLUMNS:
            if isinstance(hparams[name], str):
                start.hparams[name].string_value = hparams[name]
            else:
                start.hparams[name].number_value = hparams[name]
        self._record("_hparams_/experiment", plugin_data_pb2.HParamsPluginData(version=0, experiment=experiment))
        self._record("_hparams_/session_start_info", plugin_data_pb2.HParamsPluginData(session_start_info=start))

    def end_session(self, *, completed: bool) -> None:
        from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if completed else api_pb2.STATUS_FAILURE
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        self._record("_hparams_/session_end_info", plugin_data_pb2.HParamsPluginData(session_end_info=end))

    def close(self) -> None:
        self.writer.close()

    def flush(self) -> None:
        self.writer.flush()

    def _record(self, tag: str, content: Any) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
        self._add(Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))]), None)

    def _add(self, summary: Any, step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=step or 0, summary=summary))
