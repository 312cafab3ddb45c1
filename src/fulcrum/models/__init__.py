"""Residual networks for small images. Both families name their parts alike: a stem `conv1`, stages `layer1` … of
residual blocks, a head `fc`; the levers find their places by these names."""

from .resnet import HEAD, CifarResNet, Model, Norm, TorchvisionResNet, blocks, stages

__all__ = ["HEAD", "CifarResNet", "Model", "Norm", "TorchvisionResNet", "blocks", "stages"]
