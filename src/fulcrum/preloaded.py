"""Imported once by the server whose forks are the jobs of a sweep: it loads and builds what each would at its start.

The one module that works when it is imported. It runs no operation of torch and asks for no GPU, so that a fork of the
server is as good as a new interpreter.
"""

# ruff: noqa: F401
import gc

import tensorboard.plugins.custom_scalar.layout_pb2
import tensorboard.plugins.hparams.plugin_data_pb2
import tensorboard.summary.writer.event_file_writer
import torch._dynamo  # any optimizer needs it
import torch.utils.serialization
from hydra import compose, initialize_config_dir

from . import launch, run

launch.register()
with initialize_config_dir(str(launch.CONF), version_base="1.3"):  # finds Hydra's plugins, and warms up its parser
    compose("config", return_hydra_config=True)
gc.freeze()  # the collector of a fork does not walk through all this, nor copy it by touching it
