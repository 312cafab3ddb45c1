"""The measured peak of a run on a CPU: right to the byte, the same every time, and a limit that is met."""

import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fulcrum import config
from fulcrum.logbook.card import memory_lines
from fulcrum.logbook.summary import BLOCKS, Summary
from fulcrum.meters.memory import MIB, MemoryMeter, held_bytes
from fulcrum.refusal import Refusal
from helpers import TINY, composed, run_here, run_on_ranks, summary, train_py, weights

CPU = torch.device("cpu")


def measured_step(parameter_or_input, loss_of) -> MemoryMeter:
    """One step, forward and backward, on top of what the argument holds."""
    meter = MemoryMeter(CPU)
    meter.start_epoch(held_bytes(parameter_or_input))
    meter.start_step()
    loss_of(parameter_or_input).backward()
    meter.end_step(applied=True)
    meter.stop()
    return meter


def memory(overrides: list[str], folder) -> dict:
    run_here([*TINY, *overrides], folder)
    record = summary(folder)
    assert record["status"] == "completed", record["error"]
    return record["memory"]


def test_peak_and_activations_are_those_computed_by_hand():
    weight = nn.Parameter(torch.randn(1000))
    meter = measured_step(weight, lambda w: w.exp().sum())
    # Forward: the exponentials, which are kept, and the loss. Backward: the gradient of the loss, then of the weight.
    assert meter.activations_mib() == (4000 + 4 + 4) / MIB
    assert meter.peak_mib() == (4000 + 4000 + 4 + 4 + 4000) / MIB


def test_what_is_released_in_between_does_not_count():
    meter = MemoryMeter(CPU)
    meter.start_epoch(held_bytes=100)
    first, second = torch.empty(1000, dtype=torch.uint8), torch.empty(2000, dtype=torch.uint8)
    del first
    third = torch.empty(500, dtype=torch.uint8)
    assert meter.peak_mib() is None
    meter.stop()
    assert meter.peak_mib() == (100 + 1000 + 2000) / MIB
    assert len(second) + len(third) == 2500


def test_activations_are_what_autograd_saves():
    experiment, _ = composed(TINY)
    network = experiment.model.build(10)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def loss_of(network):
        images_NCHW = torch.randn(24, 3, 8, 8)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            return nn.functional.cross_entropy(network(images_NCHW), torch.zeros(24, dtype=torch.int64))

    meter = measured_step(network, loss_of)
    activation_bytes = sum(size for storage, size in saved.items() if storage not in own)
    assert meter.activations_mib() == pytest.approx(activation_bytes / MIB, abs=16 / MIB)  # the loss and its gradient


def test_the_second_step_holds_the_optimizer_state_that_the_first_one_makes(tmp_path):
    measured = memory(["optimizer=adamw", "max_steps=2"], tmp_path)
    assert measured["first_step_peak_mib"] < measured["steady_peak_mib"] <= measured["peak_mib"]
    assert measured["steady_peak_mib"] - measured["first_step_peak_mib"] == pytest.approx(measured["optimizer_mib"], rel=0.01)


def test_what_was_not_measured_is_absent(tmp_path):
    measured = memory(["max_steps=1"], tmp_path)
    assert measured["first_step_peak_mib"] is not None
    assert measured["steady_peak_mib"] is measured["reserved_mib"] is measured["rank_peaks_mib"] is None


def test_buffers_are_the_statistics_of_batchnorm(tmp_path):
    network = composed(TINY)[0].model.build(10)
    assert memory(["max_steps=1"], tmp_path)["buffers_mib"] == sum(b.nbytes for b in network.buffers()) / MIB
    assert memory(["max_steps=1", "model.norm=none"], tmp_path / "without")["buffers_mib"] == 0


def test_the_log_ends_with_the_blocks_and_with_the_error_of_a_prediction():
    known = {"peak_mib": 80.0, "parameters_mib": 1.5, "activations_mib": 50.0, "optimizer_mib": 0.0}
    measured = {**Summary().memory, **known}
    assert memory_lines(Summary().memory) == []
    assert memory_lines(measured) == [
        "peak memory 80.0 MiB; its blocks: parameters 1.5, optimizer 0.0, activations 50.0",
    ]
    predicted = {"parameters_mib": 1.5, "activations_mib": 49.0, "optimizer_mib": 0.0}
    lines = memory_lines({**measured, "predicted_peak_mib": 78.0, "predicted": predicted})
    assert [line.split() for line in lines[1:]] == [
        ["peak", "80.0", "78.0", "-2.5", "%"],
        ["parameters", "1.5", "1.5", "+0.0", "%"],
        ["optimizer", "0.0", "0.0", "-"],
        ["activations", "50.0", "49.0", "-2.0", "%"],
    ]


def test_tensorboard_has_a_scalar_for_each_block(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    measured = memory(["max_steps=1"], tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    for block in BLOCKS:
        (point,) = events.Scalars(f"memory/{block}")
        assert point.value == pytest.approx(measured[block])
    assert "memory/predicted_peak_mib" not in events.Tags()["scalars"]


def live_storages() -> dict[int, int]:
    """{address: bytes} behind all tensors that Python knows; fake ones, of other tests, have a type of their own."""
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device == CPU]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("overrides", [["optimizer=adamw", "lora=r4"], ["precision=fp16", "precision.init_scale=4"]])
def test_nothing_that_is_there_before_an_epoch_is_forgotten(tmp_path, monkeypatch, overrides):
    gc.collect()
    others = live_storages()
    start_epoch, found = MemoryMeter.start_epoch, []

    def compare(meter, held_bytes):
        gc.collect()
        found.append((held_bytes, sum(size for address, size in live_storages().items() if address not in others)))
        start_epoch(meter, held_bytes)

    monkeypatch.setattr(MemoryMeter, "start_epoch", compare)
    for resumed in ("epochs=1", "epochs=2"):  # the second has optimizer state from the start
        run_here([*TINY, *overrides, "saving=last", "resume=auto", "schedule=constant", resumed], tmp_path)
    building, first, building_again, second = found
    assert building[0] == building_again[0] == 0
    assert first[0] == first[1]
    assert second[0] == second[1] > first[0]


def test_five_equal_runs_have_one_peak_whatever_ran_before(tmp_path):
    peaks = [memory(["max_steps=2"], tmp_path / str(number))["peak_mib"] for number in range(4)]
    memory(["optimizer=adamw", "max_steps=2"], tmp_path / "other")
    peaks.append(memory(["max_steps=2"], tmp_path / "4")["peak_mib"])
    assert len(set(peaks)) == 1


@pytest.mark.parametrize("lever", ["checkpointing=block", "accumulation=x4", "precision=bf16", "lora=r4"])
def test_a_lever_that_saves_memory_is_seen_to(tmp_path, lever):
    plain, pulled = memory([], tmp_path / "plain"), memory([lever], tmp_path / "pulled")
    assert pulled["peak_mib"] < plain["peak_mib"]
    shrinks = ("gradients_mib", "optimizer_mib") if lever == "lora=r4" else ("activations_mib",)
    assert all(pulled[block] < 0.8 * plain[block] for block in shrinks)


def test_fp16_is_measured_until_two_steps_were_applied(tmp_path):
    steps = ["precision=fp16", "data.train_size=240", "max_steps=5"]
    at_once = memory([*steps, "precision.init_scale=4"], tmp_path / "at_once")
    skipping = memory([*steps, "precision.init_scale=1e7"], tmp_path / "skipping")
    assert summary(tmp_path / "skipping")["skipped_steps"] > 0
    assert skipping["peak_mib"] == at_once["peak_mib"]


def test_a_resumed_run_has_the_peak_of_a_whole_one(tmp_path):
    steps = ["data.train_size=120", "schedule=constant"]
    whole = memory([*steps, "max_steps=4"], tmp_path / "whole")
    memory([*steps, "max_steps=1"], tmp_path / "parts")
    resumed = memory([*steps, "max_steps=4", "resume=auto"], tmp_path / "parts")
    assert resumed["peak_mib"] == whole["peak_mib"]


def test_measuring_changes_no_bit_and_a_torch_that_cannot_say_says_nothing(tmp_path, monkeypatch):
    measured = memory([], tmp_path / "measured")
    monkeypatch.delattr(torch.autograd, "_enable_profiler_legacy")
    silent = memory([], tmp_path / "silent")
    assert measured["peak_mib"] is not None
    assert silent["peak_mib"] is None
    assert silent["activations_mib"] is None
    one, other = weights(tmp_path / "measured"), weights(tmp_path / "silent")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_ranks_agree_on_the_largest_peak_with_the_buckets_of_ddp(tmp_path):
    ddp = [*TINY, "parallelism=ddp", "data.train_size=48"]
    run_on_ranks([(ddp, tmp_path / "two"), (ddp, tmp_path / "again")], ranks=2)
    single = memory(["batch.effective=12", "data.train_size=48"], tmp_path / "one")
    two = summary(tmp_path / "two")["memory"]
    assert single["peak_mib"] < two["peak_mib"] < single["peak_mib"] + 1.2 * single["gradients_mib"]
    assert len(two["rank_peaks_mib"]) == 2 and max(two["rank_peaks_mib"]) == two["peak_mib"]
    again = summary(tmp_path / "again")["memory"]["peak_mib"]
    assert two["peak_mib"] == pytest.approx(again, rel=1e-4)  # what the threads of DDP hold at the peak: some bytes


LARGER = [*TINY, "data.image_size=32", "data.train_size=256", "batch.effective=128", "max_steps=3", "saving=none"]


@pytest.mark.parametrize("limit_mib", [1, 40])
def test_a_run_beyond_its_limit_ends_out_of_memory(tmp_path, limit_mib):
    ended = train_py(*LARGER, f"memory_limit_mib={limit_mib}", "hydra.run.dir=run", cwd=tmp_path)
    record = summary(tmp_path / "run")
    assert (ended.returncode, record["status"], ended.stderr) == (1, "oom", "")
    assert "\n" not in record["error"]
    assert record["memory"]["peak_mib"] < limit_mib + 4  # the room for small blocks


def test_a_run_within_its_limit_completes(tmp_path):
    ended = train_py(*LARGER, "memory_limit_mib=200", "hydra.run.dir=run", cwd=tmp_path)
    record = summary(tmp_path / "run")
    assert (ended.returncode, record["status"], ended.stderr) == (0, "completed", "")
    assert 40 < record["memory"]["peak_mib"] < 200


@pytest.mark.parametrize("limit", ["0", "-1", "nan"])
def test_a_limit_that_is_none_is_refused(limit):
    experiment, _ = composed([*TINY, f"memory_limit_mib={limit}"])
    with pytest.raises(Refusal, match="memory_limit_mib="):
        config.check(experiment, num_processes=1, typed={})
