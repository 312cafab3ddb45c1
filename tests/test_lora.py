"""LoRA against peft, against the base, and against itself merged."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from fulcrum.levers import Lora
from fulcrum.levers.lora import LoraConv2d, LoraLinear, merge
from fulcrum.models import CifarResNet
from fulcrum.run import build_model
from helpers import TINY, checkpoint, composed, run_here

LAYERS = {
    "1x1": lambda: nn.Conv2d(4, 6, 1),
    "3x3": lambda: nn.Conv2d(4, 6, 3, padding=1, bias=False),
    "3x3 stride 2": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
    "dilated": lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2),
    "reflecting": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "grouped": lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "linear": lambda: nn.Linear(8, 6),
}


def adapted(layer: nn.Module, rank: int = 2, alpha: float = 6.0) -> LoraConv2d | LoraLinear:
    if isinstance(layer, nn.Conv2d):
        return LoraConv2d(layer, rank=rank, alpha=alpha)
    assert isinstance(layer, nn.Linear)
    return LoraLinear(layer, rank=rank, alpha=alpha)


def inputs(layer: nn.Module) -> torch.Tensor:
    return torch.randn(3, 8) if isinstance(layer, nn.Linear) else torch.randn(3, 4, 8, 8)


@pytest.mark.parametrize("name", LAYERS)
def test_an_adapter_changes_nothing_at_the_start(name):
    layer = LAYERS[name]()
    x = inputs(layer)
    assert torch.equal(adapted(layer)(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_merging_changes_no_output_and_merging_twice_changes_nothing(name):
    layer = adapted(LAYERS[name]())
    nn.init.normal_(layer.lora_B.weight)
    model, x = nn.Sequential(layer), inputs(layer)
    before = model(x)
    merged = merge(model)(x)
    assert type(model[0]) in (nn.Conv2d, nn.Linear)
    torch.testing.assert_close(merged, before, rtol=0, atol=1e-5)
    assert torch.equal(merge(model)(x), merged)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("reflecting", "grouped")])
def test_outputs_gradients_and_merged_weights_are_those_of_peft(name):
    layer = LAYERS[name]()
    theirs = get_peft_model(
        nn.Sequential(copy.deepcopy(layer)), LoraConfig(r=2, lora_alpha=6, target_modules=["0"], lora_dropout=0.0)
    )
    ours, peft_layer = adapted(layer), theirs.base_model.model[0]
    pairs = [(ours.lora_A, peft_layer.lora_A["default"]), (ours.lora_B, peft_layer.lora_B["default"])]
    with torch.no_grad():
        for mine, other in pairs:
            nn.init.normal_(mine.weight)
            other.weight.copy_(mine.weight)
    x = inputs(layer)
    if name == "dilated":  # peft 0.21 forgets the dilation in its branch
        with pytest.raises(RuntimeError, match="must match"):
            theirs(x)
        peft_layer.lora_A["default"].dilation = layer.dilation
    my_x, their_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    my_output, their_output = ours(my_x), theirs(their_x)
    close(my_output, their_output)
    my_output.square().mean().backward()
    their_output.square().mean().backward()
    close(my_x.grad, their_x.grad)
    for mine, other in pairs:
        close(mine.weight.grad, other.weight.grad)
    close(ours.delta(), peft_layer.get_delta_weight("default"))
    close(merge(nn.Sequential(ours))[0].weight, theirs.merge_and_unload()[0].weight)


def close(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_trainable_parameters_are_those_of_peft():
    network, theirs = CifarResNet(depth=8).build(10), CifarResNet(depth=8).build(10)
    Lora(rank=4).apply(network)
    names = [name for name, module in theirs.named_modules() if isinstance(module, nn.Conv2d)]
    theirs = get_peft_model(theirs, LoraConfig(r=4, target_modules=names, modules_to_save=["fc"]))
    ours = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    assert ours == theirs.get_nb_trainable_parameters()[0]


def test_targets_are_whole_parts_of_names():
    network = CifarResNet(depth=8).build(10)
    assert Lora(targets=["layer1"]).targeted(network) == ["layer1.0.conv1", "layer1.0.conv2"]
    assert Lora(targets=["layer3.0.conv1"]).targeted(network) == ["layer3.0.conv1"]
    assert len(Lora(targets=["conv1"]).targeted(network)) == 4
    assert len(Lora().targeted(network)) == 7


def test_weight_decay_and_momentum_never_move_the_base(tmp_path):
    overrides = [*TINY, "lora=r4", "epochs=7", "optimizer.weight_decay=0.1"]
    run_here(overrides, tmp_path)
    torch.manual_seed(0)
    start, _ = build_model(composed(overrides)[0], torch.device("cpu"))
    end = checkpoint(tmp_path)
    frozen = [name for name, parameter in start.named_parameters() if not parameter.requires_grad]
    assert len(frozen) == 7 + 2 * 7  # convolutions, and weight and bias of the normalisations
    assert all(torch.equal(start.state_dict()[name], end["model"][name]) for name in frozen)
    moved = [name for name in end["adapter"] if not torch.equal(end["adapter"][name], start.state_dict()[name])]
    assert moved == list(end["adapter"])
    assert not torch.equal(end["model"]["fc.weight"], start.state_dict()["fc.weight"])


def test_a_base_comes_from_another_run_and_a_wrong_one_is_refused(tmp_path):
    run_here(TINY, tmp_path / "base")
    run_here([*TINY, "lora=r4", f"lora.base={tmp_path / 'base'}"], tmp_path / "adapted")
    base, end = checkpoint(tmp_path / "base")["model"], checkpoint(tmp_path / "adapted")["model"]
    assert torch.equal(base["layer2.0.conv1.weight"], end["layer2.0.conv1.weight"])
    wrong = run_here([*TINY, "model=resnet20", "lora=r4", f"lora.base={tmp_path / 'base'}"], tmp_path / "wrong")
    assert wrong.status == "refused"
    assert "layer1.1" in wrong.error
