"""Precision, clipping, accumulation, checkpointing: each lever alone, against something simpler."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fulcrum.data.feed import Batch
from fulcrum.levers import Accumulation, Bf16, BlockCheckpointing, Fp16, Precision, StageCheckpointing, Tf32
from fulcrum.levers.parallelism import fingerprint
from fulcrum.models import CifarResNet
from fulcrum.optimizer import clip_gradients
from fulcrum.run import build_model
from helpers import TINY, WITHOUT_STATISTICS, checkpoint, composed, run_here, summary, weights

CPU = torch.device("cpu")


def batch(samples: int, *, step_size: int, full_size: int, num_processes: int = 1) -> Batch:
    draws = torch.full((samples, 2), 4), torch.zeros(samples, dtype=torch.bool)
    images, labels = torch.zeros(samples, 3, 8, 8, dtype=torch.uint8), torch.arange(samples)
    return Batch(images, labels, *draws, step_size, full_size, num_processes)


@pytest.mark.parametrize(("precision", "dtype"), [(Precision(), torch.float32), (Bf16(), torch.bfloat16)])
def test_what_is_in_force_is_what_runs(precision, dtype):
    with precision.autocast(CPU):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype is dtype
    assert precision.in_force(CPU) == precision.name


def test_fp16_runs_in_fp16_on_a_cpu_and_tf32_says_that_it_does_not():
    with Fp16().autocast(CPU):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype is torch.float16
    assert Tf32().in_force(CPU) == "fp32"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", ["none", "x4"])
def test_one_clipped_step_moves_the_weights_by_clip_norm_times_lr(tmp_path, precision, accumulation):
    overrides = [
        *WITHOUT_STATISTICS,
        f"precision={precision}",
        "precision.init_scale=1024",
        f"accumulation={accumulation}",
    ]
    overrides += ["max_steps=1", "optimizer.clip_norm=0.01", "optimizer.momentum=0", "optimizer.weight_decay=0"]
    overrides += ["optimizer.lr=1.0", "optimizer.lr_scaling=none", "schedule=constant"]
    torch.manual_seed(0)
    before = build_model(composed(overrides)[0], CPU)[0].state_dict()
    run_here(overrides, tmp_path)
    after = weights(tmp_path)
    assert all(tensor.dtype is torch.float32 for tensor in after.values())
    moved = torch.cat([(after[name].double() - before[name].double()).flatten() for name in after]).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-5)


def test_clipping_leaves_small_gradients_alone():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.3, 0.4])
    clip_gradients([parameter], 1.0)
    assert torch.equal(parameter.grad, torch.tensor([0.3, 0.4]))


def test_an_overflowed_step_is_skipped_counted_and_leaves_everything_finite_and_the_schedule_where_it_was(tmp_path):
    overrides = [*TINY, "precision=fp16", "precision.init_scale=1.2e24", "epochs=30", "max_steps=1", "saving=all"]
    run_here([*overrides, "model.norm=batch"], tmp_path)
    record, loaded = summary(tmp_path), checkpoint(tmp_path)
    assert record["status"] == "completed"
    assert record["skipped_steps"] > 0
    assert record["optimizer_steps"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in loaded["model"].values())
    assert loaded["model"]["bn1.num_batches_tracked"] == 1  # of the applied step alone
    assert loaded["optimizer"]["param_groups"][0]["lr"] == pytest.approx(record["learning_rate"]["effective"])
    assert loaded["scaler"]["scale"] == pytest.approx(1.2e24 * 0.5 ** record["skipped_steps"])


def test_a_run_that_applies_no_step_does_not_count_as_completed(tmp_path):
    result = run_here([*TINY, "precision=fp16", "precision.init_scale=1e30", "epochs=1"], tmp_path)
    assert result.status == "diverged"


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_best_checkpoint(tmp_path):
    result = run_here([*TINY, "optimizer.lr=1e30"], tmp_path)
    assert result.status == "diverged"
    assert "at step" in result.error
    assert not (tmp_path / "checkpoints").exists()


def test_a_single_changed_bit_changes_the_fingerprint():
    network = CifarResNet(depth=8).build(10)
    before = fingerprint(network)
    assert torch.equal(before, fingerprint(network))
    with torch.no_grad():
        network.fc.bias[3] = torch.nextafter(network.fc.bias[3], torch.tensor(1.0))
    assert not torch.equal(before, fingerprint(network))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("samples", [24, 23, 5, 1])
def test_micro_batches_weighted_by_share_give_the_gradient_of_the_whole(steps, samples):
    torch.manual_seed(0)
    x, labels = torch.randn(samples, 7, dtype=torch.float64), torch.arange(samples) % 3
    weight = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    whole = torch.autograd.grad(F.cross_entropy(x @ weight.T, labels), weight)[0]
    parts = list(Accumulation(steps=steps).split(batch(samples, step_size=samples, full_size=24)))
    assert [last for *_, last in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) == -(-samples * steps // 24)
    total = sum(
        torch.autograd.grad(F.cross_entropy(x[part.labels_N] @ weight.T, labels[part.labels_N]) * share, weight)[0]
        for part, share, _ in parts
    )
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lever", [BlockCheckpointing(), StageCheckpointing()])
def test_checkpointing_keeps_fewer_bytes_for_backward(lever):
    def kept_bytes(network: nn.Module) -> int:
        sizes: dict[int, int] = {}
        images = torch.randn(8, 3, 16, 16)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = network(images)
        assert output.requires_grad
        return sum(sizes.values())

    torch.manual_seed(0)
    plain, checkpointed = CifarResNet(depth=20).build(10), CifarResNet(depth=20).build(10)
    lever.apply(checkpointed)
    assert kept_bytes(checkpointed) < 0.5 * kept_bytes(plain)
