"""What only a GPU can show. Skipped, with the reason, where there is none."""

import pytest
import torch

from fulcrum.data import Feed, Images
from helpers import TINY, largest_difference, run_here, summary, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and this machine shows none"),
]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_every_precision_trains_and_says_what_was_in_force(tmp_path, precision):
    run_here([*TINY, "device=cuda", f"precision={precision}"], tmp_path)
    record = summary(tmp_path)
    assert record["status"] == "completed"
    assert record["precision"]["requested"] == precision
    assert record["memory"]["peak_mib"] > record["memory"]["parameters_mib"]


def test_a_gpu_ends_where_a_cpu_does_to_rounding(tmp_path):
    run_here([*TINY, "model.norm=none"], tmp_path / "cpu")
    run_here([*TINY, "model.norm=none", "device=cuda"], tmp_path / "cuda")
    assert largest_difference(weights(tmp_path / "cpu"), weights(tmp_path / "cuda")) < 1e-4


def test_a_set_kept_in_host_memory_gives_the_batches_of_a_resident_one():
    device = torch.device("cuda")
    images = Images(torch.randint(0, 256, (53, 3, 8, 8), dtype=torch.uint8), torch.arange(53))
    place = {"mean_C": torch.zeros(3), "std_C": torch.ones(3), "device": device, "padding": 4, "batch_size": 24}
    resident, sent = (Feed(images, resident=choice, **place) for choice in (True, False))
    for one, other in zip(resident.epoch(1), sent.epoch(1), strict=True):
        assert one.labels_N.device.type == other.labels_N.device.type == "cuda"
        assert torch.equal(resident.inputs(one), sent.inputs(other))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_run_goes_on_on_another_device(tmp_path, first, then, optimizer):
    overrides = [*TINY, "model.norm=none", f"optimizer={optimizer}"]
    run_here([*overrides, "device=cpu"], tmp_path / "whole")
    run_here([*overrides, f"device={first}", "max_steps=4", "saving.every_steps=1"], tmp_path / "run")
    assert run_here([*overrides, f"device={then}", "resume=auto"], tmp_path / "run").status == "completed"
    assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / "run")) < 1e-4
