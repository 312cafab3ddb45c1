"""The networks are those of their papers."""

import pytest
import torch

from fulcrum.models import CifarResNet, Norm, TorchvisionResNet, blocks, stages


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (CifarResNet(depth=20), 269_722),  # He et al.: 0.27 M
        (CifarResNet(depth=56), 853_018),  # 0.85 M
        (CifarResNet(depth=110), 1_727_962),  # 1.7 M
        (TorchvisionResNet(depth=18), 11_173_962),  # 11.17 M
        (TorchvisionResNet(depth=50), 23_520_842),
    ],
)
def test_the_number_of_parameters_is_that_of_the_paper(model, parameters):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model.build(10).parameters()) == parameters


@pytest.mark.parametrize("family", [CifarResNet(depth=8), TorchvisionResNet(depth=18), TorchvisionResNet(depth=50)])
@pytest.mark.parametrize("norm", list(Norm))
@pytest.mark.parametrize("size", [8, 33])
def test_every_network_gives_logits_for_any_image_size(family, norm, size):
    family.norm = norm
    network = family.build(7)
    logits_NK = network(torch.randn(2, 3, size, size))
    assert logits_NK.shape == (2, 7)
    assert logits_NK.abs().max() < 50  # no normalisation, and yet no explosion
    assert blocks(network)
    assert all(name.startswith("layer") for name, child in network.named_children() if child in stages(network))
