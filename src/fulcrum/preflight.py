"""What is checked about a composed configuration before anything is loaded, made or started."""

import copy
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from . import config, distributed
from .logbook.summary import SUMMARY, taken
from .refusal import Refusal, parse_overrides


def split(composed: DictConfig) -> tuple[DictConfig, DictConfig]:
    """(task, hydra): what Hydra composed, without and with nothing but its own node."""
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    return task, composed.hydra


def preflight(task: DictConfig, hydra: DictConfig) -> config.Experiment:
    """The experiment of a composed configuration. Refuses what cannot work."""
    experiment = config.load(task)
    here = distributed.world()
    if here.under_torchrun and not experiment.parallelism.distributed:
        raise Refusal(f"parallelism=single under torchrun would train {here.size} times; use parallelism=ddp, or python train.py")
    config.check(experiment, num_processes=num_processes(experiment), typed=parse_overrides(as_typed(hydra)))
    if here.under_torchrun and experiment.resolved_device().type == "cuda" and here.local_size > distributed.num_gpus():
        raise Refusal(
            f"--nproc_per_node={here.local_size} is more than the {distributed.num_gpus()} visible GPUs; "
            "use one process a GPU, or device=cpu"
        )
    for group in config.GROUPS:
        if not isinstance(hydra.runtime.choices.get(group), str):
            raise Refusal(f"{group}: one option is needed; several are a sweep: python train.py -m {group}=…,…")
    return experiment


def check_folder(experiment: config.Experiment, folder: Path) -> None:
    """Refuses a directory that holds another run."""
    here = distributed.world()
    if here.is_main and experiment.resume != "auto" and here.restarts == 0 and (folder / SUMMARY).exists():
        raise taken(folder)


def as_typed(hydra: DictConfig) -> list[str]:
    """The overrides of a run, with nothing in them resolved."""
    words = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def as_typed_for_hydra(hydra: DictConfig) -> list[str]:
    """The overrides of Hydra's own settings that a run needs to be composed again, such as hydra.searchpath.

    Where it goes and what starts it is not among them.
    """
    not_its_own = ("hydra.run.", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher", "hydra.mode")
    whose_caller_decides = ("hydra.output_subdir", "hydra/job_logging", "hydra/hydra_logging")
    return [word for word in hydra.overrides.hydra if not word.startswith(not_its_own + whose_caller_decides)]


def choices(hydra: DictConfig) -> dict[str, str]:
    """The option chosen in every group, `experiment` too where one was named."""
    named = hydra.runtime.choices.items()
    return {str(group): option for group, option in named if isinstance(option, str) and not group.startswith("hydra")}


def num_processes(experiment: config.Experiment) -> int:
    """Processes of the run: torchrun's own number, or what the configuration asks for."""
    here = distributed.world()
    return here.size if here.under_torchrun else experiment.parallelism.num_processes(experiment.resolved_device())
