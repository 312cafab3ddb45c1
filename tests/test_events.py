"""TensorBoard reads what Events writes: sessions, groups, charts and texts, by the code of its own plugins."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.get_experiment import Handler as GetExperiment
from tensorboard.plugins.hparams.list_session_groups import Handler as ListSessionGroups

from fulcrum.logbook import Summary
from fulcrum.logbook.card import hparams
from fulcrum.logbook.events import HPARAM_COLUMNS, METRIC_COLUMNS, Events, end_session_of, group_name

# Of code inside tensorboard, on the import of any plugin that shows Markdown; those are imported in the tests for that.
pytestmark = pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")

LEVERS = ("precision", "parallelism", "accumulation", "checkpointing", "lora")
OFF = {
    "precision": "fp32", "parallelism": "single", "accumulation": "none", "checkpointing": "none", "lora": "none",
    "model": "resnet8", "data": "synthetic", "optimizer": "sgd", "schedule": "cosine", "saving": "last",
}  # fmt: skip
STATUSES = [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING, api_pb2.STATUS_UNKNOWN]


def opened(folder: Path, *overrides: str, from_step: int = 0) -> Events:
    """A run that has just started."""
    folder.mkdir(parents=True, exist_ok=True)
    choices = OFF | {key: value for key, value in (word.split("=") for word in overrides) if key in OFF}
    batch = {"effective": 24, "per_device": 24, "world_size": 1, "accumulation": 1}
    summary = Summary(
        choices=choices, overrides=list(overrides), seed=0, batch=batch, learning_rate={"base": 1, "effective": 0.1}
    )
    events = Events(folder)
    group = group_name(folder, list(overrides))
    events.start_session(hparams(summary), group=group, start_time=1000.0, from_step=from_step)
    return events


def write_run(folder: Path, *overrides: str, value: float = 1.0, completed: bool = True) -> None:
    """A run that ended: with every metric, or with none."""
    events = opened(folder, *overrides)
    if completed:
        events.scalars(dict.fromkeys(METRIC_COLUMNS, value), 3)
    events.end_session(completed=completed, end_time=1060.0)
    events.close()


def sweep(folder: Path, *jobs: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").touch()
    for number, overrides in enumerate(jobs):
        write_run(folder / str(number), *overrides, value=float(number))


def tensorboard(folder: Path) -> TBContext:
    """What its plugins read a log directory through."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(folder)), logdir=str(folder))


def rows(folder: Path) -> list[Any]:
    """The rows of HParams, as the dashboard asks for them."""
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=1000, allowed_statuses=STATUSES)
    for name in HPARAM_COLUMNS:
        request.col_params.add(hparam=name)
    for tag in METRIC_COLUMNS:
        request.col_params.add(metric=api_pb2.MetricName(tag=tag))
    return list(ListSessionGroups(RequestContext(), Context(tensorboard(folder)), "", request).run().session_groups)


def sessions(folder: Path) -> dict[str, Any]:
    return {session.name: session for row in rows(folder) for session in row.sessions}


def test_every_job_is_one_session_with_every_column_filled_over_sweeps_with_different_keys(tmp_path):
    sweep(tmp_path / "a", ("precision=bf16",), ("precision=fp16", "optimizer=adamw"))
    sweep(tmp_path / "b", ("accumulation=x4", "optimizer.lr=0.3"), ("lora=r8", "lora.dropout=0.1"))
    write_run(tmp_path / "alone")
    found = rows(tmp_path)
    assert sorted(sessions(tmp_path)) == ["a/0", "a/1", "alone", "b/0", "b/1"]
    assert len(found) == 5
    for row in found:
        assert set(HPARAM_COLUMNS) <= set(row.hparams)
        assert all(row.hparams[name].WhichOneof("kind") for name in HPARAM_COLUMNS)
        assert [metric.name.tag for metric in row.metric_values] == list(METRIC_COLUMNS)


def test_the_default_view_shows_the_five_levers_and_what_they_cost(tmp_path):
    sweep(tmp_path / "a", ("precision=bf16",), ("accumulation=x4",))
    request = api_pb2.GetExperimentRequest(hparams_limit=1000)
    experiment = GetExperiment(RequestContext(), Context(tensorboard(tmp_path)), "", request).run()
    assert {column.name for column in experiment.hparam_infos[:5]} == set(LEVERS)
    assert {column.name for column in experiment.hparam_infos} == set(HPARAM_COLUMNS)
    shown = [metric.name.tag for metric in experiment.metric_infos[:5]]
    assert shown == ["run/step_ms", "run/peak_mib", "eval/accuracy", "run/wall_s", "run/images_per_s"]


def test_runs_of_a_sweep_that_differ_by_seed_are_one_row_with_their_mean(tmp_path):
    jobs = [(f"precision={precision}", f"seed={seed}") for precision in ("fp32", "bf16") for seed in (1, 2)]
    sweep(tmp_path / "a", *jobs)
    sweep(tmp_path / "b", *jobs)
    write_run(tmp_path / "alone" / "1", "seed=1")
    write_run(tmp_path / "alone" / "2", "seed=2")
    found = rows(tmp_path)
    assert sorted([session.name for session in row.sessions] for row in found) == [
        ["a/0", "a/1"], ["a/2", "a/3"], ["alone/1"], ["alone/2"], ["b/0", "b/1"], ["b/2", "b/3"]
    ]  # fmt: skip
    fp32 = next(row for row in found if row.sessions[0].name == "a/0")
    assert {metric.value for metric in fp32.metric_values} == {0.5}


def test_a_failed_run_keeps_its_row_with_its_true_times(tmp_path):
    write_run(tmp_path / "good")
    write_run(tmp_path / "bad", completed=False)
    found = sessions(tmp_path)
    assert (found["good"].status, found["bad"].status) == (api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE)
    for session in found.values():
        assert (session.start_time_secs, session.end_time_secs) == (1000.0, 1060.0)
    assert not found["bad"].metric_values


def test_a_run_that_could_not_write_its_end_gets_it_from_outside(tmp_path):
    killed = opened(tmp_path / "killed")
    killed.scalars({"train/loss": 2.0}, 1)
    killed.flush()
    assert sessions(tmp_path)["killed"].status == api_pb2.STATUS_UNKNOWN
    end_session_of(tmp_path / "killed", completed=False, end_time=1030.0)
    session = sessions(tmp_path)["killed"]
    assert (session.status, session.end_time_secs) == (api_pb2.STATUS_FAILURE, 1030.0)
    assert [metric.value for metric in session.metric_values] == [2.0]
    killed.close()


def test_the_end_from_outside_replaces_the_runs_own(tmp_path):
    write_run(tmp_path / "run")
    end_session_of(tmp_path / "run", completed=False, end_time=1070.0)
    session = sessions(tmp_path)["run"]
    assert (session.status, session.end_time_secs) == (api_pb2.STATUS_FAILURE, 1070.0)


def test_no_end_is_written_where_no_session_started(tmp_path):
    end_session_of(tmp_path, completed=False, end_time=1.0)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_is_one_session_that_goes_on_from_its_checkpoint(tmp_path):
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin

    first = opened(tmp_path / "run")
    for step in (1, 2, 3):
        first.scalars({"train/loss": 10.0 + step}, step)
    first.end_session(completed=False, end_time=1010.0)
    first.close()
    second = opened(tmp_path / "run", from_step=2)
    assert sessions(tmp_path)["run"].status == api_pb2.STATUS_UNKNOWN
    for step in (3, 4):
        second.scalars({"train/loss": 20.0 + step}, step)
    second.end_session(completed=True, end_time=1090.0)
    second.close()
    session = sessions(tmp_path)["run"]
    assert (session.status, session.end_time_secs) == (api_pb2.STATUS_SUCCESS, 1090.0)
    points, _ = ScalarsPlugin(tensorboard(tmp_path)).scalars_impl(RequestContext(), "train/loss", "run", "", "json")
    assert [(step, value) for _, step, value in points] == [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0)]


def test_all_runs_share_one_layout_of_four_categories(tmp_path):
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

    write_run(tmp_path / "a", "precision=bf16")
    write_run(tmp_path / "b")
    context = tensorboard(tmp_path)
    layout = json.loads(CustomScalarsPlugin(context).layout_impl(RequestContext(), ""))
    assert {category["title"]: len(category["chart"]) for category in layout["category"]} == {
        "Speed": 2, "Memory": 1, "Numerics": 2, "Learning": 2
    }  # fmt: skip


def test_a_text_is_read_as_markdown(tmp_path):
    from tensorboard.plugins.text.text_plugin import TextPlugin

    events = opened(tmp_path / "run")
    events.text("run/command", "    python train.py precision=bf16")
    events.close()
    (page,) = TextPlugin(tensorboard(tmp_path)).text_impl(RequestContext(), "run", "run/command", "", True)
    assert "<code>python train.py precision=bf16\n</code>" in page["text"]
