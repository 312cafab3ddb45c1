"""An adapter's file and its base give the network of the run; merging and peft's own format change no output."""

import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import nn

from fulcrum import adapters, peft_files
from fulcrum.finished import reopen
from fulcrum.levers.lora import merge
from fulcrum.models import CifarResNet
from fulcrum.refusal import Refusal
from fulcrum.restoring import plain_weights
from helpers import TINY, checkpoint, composed, run_here, run_recorded, script, summary, weights

ADAPTER = [*TINY, "data.classes=4", "seed=1", "lora=r4"]  # four new classes, on a base that knows ten others


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """base/ and adapted/, a LoRA run on it; other/, a base of other weights."""
    folder = tmp_path_factory.mktemp("runs")
    run_recorded(TINY, folder / "base")
    run_recorded([*TINY, "seed=2"], folder / "other")
    assert run_recorded([*ADAPTER, f"lora.base={folder / 'base'}"], folder / "adapted").status == "completed"
    return folder


def adapter_file(runs):
    return runs / "adapted" / "checkpoints" / "adapter.safetensors"


def pixels(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8)


def test_the_file_says_what_it_takes_to_use_it(runs):
    assert adapter_file(runs).stat().st_mode == (runs / "adapted" / "checkpoints" / "last.pt").stat().st_mode
    with safe_open(adapter_file(runs), "pt") as file:
        about = json.loads(file.metadata()["fulcrum"])
        names = set(file.keys())
    assert (about["rank"], about["alpha"], about["dropout"], about["targets"]) == (4, 8.0, 0.0, [])
    assert about["model"] == {"family": "CifarResNet", "depth": 8, "norm": "batch", "dropout": 0.0, "classes": 4}
    assert about["data"] == checkpoint(runs / "adapted")["data"]
    assert {"fc.weight", "fc.bias", "bn1.running_mean", "conv1.lora_A.weight"} <= names
    assert not {"conv1.weight", "bn1.weight"} & names


@pytest.mark.parametrize("base", ["base", "base/checkpoints/last.pt", "base/export/weights.safetensors"])
def test_a_file_and_its_base_are_the_network_of_the_run_bit_for_bit(runs, base):
    if not (runs / base).exists():
        assert script("export", runs / "base", "--format", "safetensors") == 0
    state = adapters.load(adapter_file(runs), str(runs / base)).state_dict()
    expected = weights(runs / "adapted")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_another_base_is_refused_in_one_sentence(runs, tmp_path):
    with pytest.raises(Refusal, match=r"base=.*other with adapter=.*: the adapter was trained on another base"):
        adapters.load(adapter_file(runs), str(runs / "other"))
    run_here([*TINY, "model=resnet20"], tmp_path)
    with pytest.raises(Refusal, match=r"is of another network: \d+ tensors differ"):
        adapters.load(adapter_file(runs), str(tmp_path))
    with pytest.raises(Refusal, match="holds adapters, a base cannot"):
        plain_weights(str(runs / "adapted"), key="lora.base")


def test_files_that_are_no_adapter_are_refused(runs, tmp_path):
    (tmp_path / "torn.safetensors").write_bytes(adapter_file(runs).read_bytes()[:-100])
    with pytest.raises(Refusal, match="cannot be read as a safetensors file"):
        adapters.read(tmp_path / "torn.safetensors", key="--adapter")
    script("export", runs / "base", "--format", "safetensors", "--out", tmp_path / "plain.safetensors")
    with pytest.raises(Refusal, match="is no adapter of this version"):
        adapters.read(tmp_path / "plain.safetensors", key="--adapter")


def test_the_fingerprint_moves_with_one_bit_and_not_with_the_layout():
    weights = {"w": torch.randn(4, 3, 2, 2), "b": torch.zeros(())}
    digest = adapters.fingerprint(weights, weights)
    assert adapters.fingerprint({**weights, "w": weights["w"].to(memory_format=torch.channels_last)}, ["b", "w"]) == digest
    weights["w"][0, 0, 0, 0] = torch.nextafter(weights["w"][0, 0, 0, 0], torch.tensor(9.0))
    assert adapters.fingerprint(weights, weights) != digest


def test_evaluate_gives_the_accuracy_of_the_run_from_adapter_and_base_alone(runs, capsys):
    metrics = summary(runs / "adapted")["metrics"]
    expected = {key: metrics[key] for key in ("eval_accuracy", "eval_loss")}
    for words in ([], ["--base", runs / "base"], ["--adapter", adapter_file(runs)]):
        assert script("evaluate", runs / "adapted", *words) == 0
        assert json.loads(capsys.readouterr().out) == expected
    assert script("evaluate", runs / "adapted", "--base", runs / "other") == 2
    assert "trained on another base" in capsys.readouterr().err
    assert script("evaluate", runs / "base", "--adapter", adapter_file(runs)) == 2
    assert "tells 4 classes apart" in capsys.readouterr().err


def test_a_merged_checkpoint_is_a_plain_one_with_the_same_outputs(runs, capsys, tmp_path):
    assert script("merge", runs / "adapted") == 0
    merged = runs / "adapted" / "checkpoints" / "merged.pt"
    plain = CifarResNet(depth=8).build(4)
    plain.load_state_dict(torch.load(merged, weights_only=True)["model"])
    images, adapted = pixels(), reopen(runs / "adapted").network
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(images), adapted(images), rtol=1e-5, atol=1e-5)
    assert run_here([*ADAPTER, "max_steps=1", f"lora.base={merged}"], tmp_path).status == "completed"
    assert script("merge", runs / "base") == 2
    assert "has no adapters" in capsys.readouterr().err


def test_a_base_with_another_head_gives_all_but_its_head(runs):
    network = adapters.load(adapter_file(runs), str(runs / "base"))
    base = checkpoint(runs / "base")["model"]
    assert torch.equal(network.state_dict()["layer3.0.conv2.weight"], base["layer3.0.conv2.weight"])
    assert (len(network.fc.weight), len(base["fc.weight"])) == (4, 10)


def test_peft_reads_an_export_and_gives_the_same_outputs(runs):
    assert script("export", runs / "adapted", "--format", "peft") == 0
    run = reopen(runs / "adapted")
    plain = CifarResNet(depth=8).build(4)
    plain.load_state_dict(run.checkpoint["model"])
    plain.fc.reset_parameters()  # head and statistics have to come from the export
    plain.bn1.reset_running_stats()
    theirs = PeftModel.from_pretrained(plain, runs / "adapted" / "export" / "peft").eval()
    images = pixels()
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), run.network(images), rtol=1e-6, atol=1e-6)


def test_an_adapter_that_peft_wrote_gives_its_outputs(runs, tmp_path):
    base = checkpoint(runs / "base")["model"]
    network = CifarResNet(depth=8).build(10)
    network.load_state_dict(base)
    config = LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules=["layer1.0.conv1", "conv2"], modules_to_save=["fc"])
    theirs = get_peft_model(network, config)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that a network of ours names no model of the hub
        theirs.save_pretrained(tmp_path)
    run, images = reopen(runs / "base", adapter=str(tmp_path)), pixels()
    with torch.no_grad():
        expected = theirs.eval()(images)
        torch.testing.assert_close(run.network(images), expected, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(merge(run.network)(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "setting", [{"rank_pattern": {"conv1": 8}}, {"init_lora_weights": "pissa"}, {"peft_type": "LOHA"}], ids=str
)
def test_what_a_plain_branch_cannot_be_is_refused(setting, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, **setting}))
    with pytest.raises(Refusal, match=next(iter(setting))):
        peft_files.read(tmp_path, key="--adapter")


def test_targets_and_dropout_leave_the_file_whole(tmp_path):
    overrides = [*ADAPTER, "lora.targets=[layer1,layer3.0.conv2]", "lora.dropout=0.5", "model.channels_last=false"]
    run_here(overrides, tmp_path)
    adapter = adapters.read(tmp_path / "checkpoints" / "adapter.safetensors", key="--adapter")
    assert sorted(adapter.layers()) == ["layer1.0.conv1", "layer1.0.conv2", "layer3.0.conv2"]
    network = composed(overrides)[0].model.build(4)
    adapters.onto(network, checkpoint(tmp_path)["model"], adapter, source="test")
    assert network.layer1[0].conv1.dropout.p == 0.5
