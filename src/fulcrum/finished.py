"""A run put back together from its files, with the base or the adapter of another one where that is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from . import adapters, launch, levers, peft_files, saving
from .config import Experiment
from .export import Classifier
from .logbook import Summary
from .restoring import plain_weights, restore


@dataclass(frozen=True)
class Finished:
    """experiment: its settings, in one process; network: on the CPU, as it is called for evaluation."""

    experiment: Experiment
    record: dict[str, Any]
    checkpoint: dict[str, Any]
    network: nn.Module

    def about(self) -> dict[str, Any]:
        """What goes with weights that leave the run."""
        return adapters.about_network(self.experiment, self.checkpoint["model"], self.checkpoint["data"])

    def classifier(self, network: nn.Module) -> Classifier:
        """From raw pixels to logits: `network` behind the normalisation of the run."""
        return Classifier(network, **self.checkpoint["data"])


def reopen(folder: Path, *, base: str | None = None, adapter: str | None = None) -> Finished:
    """The run as it ended. base: weights to put its adapter onto; adapter: a file, or a directory of peft's, to use instead
    of its own. Refuses what does not belong together."""
    checkpoint = saving.read(saving.find(str(folder), key="RUN"), key="RUN")
    experiment = launch.experiment_of(folder)
    experiment.parallelism = levers.Parallelism()
    if base is None and adapter is None:
        network = experiment.model.build(adapters.num_classes(checkpoint["model"]))
        experiment.lora.apply(network)
        restore(network, checkpoint, f"RUN={folder}")
    else:
        weights = checkpoint["model"] if base is None else plain_weights(base, key="--base")
        path = folder / saving.FOLDER / adapters.FILE if adapter is None else Path(adapter)
        key = "RUN" if adapter is None else "--adapter"
        loaded = peft_files.read(path, key=key) if path.is_dir() else adapters.read(path, key=key)
        network = experiment.model.build(adapters.num_classes({**weights, **loaded.tensors}))
        experiment.lora = levers.Lora(rank=loaded.rank, alpha=loaded.alpha, dropout=loaded.dropout)
        onto = f"RUN={folder}" if base is None else f"--base={base}"
        adapters.onto(network, weights, loaded, source=f"{key}={path} on {onto}")
    return Finished(experiment, Summary.read(folder), checkpoint, network.eval())
