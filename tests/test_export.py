"""What leaves a run gives the outputs of the run; what a run records is enough to repeat it."""

import json
import subprocess

import pytest
import torch

from fulcrum import adapters, export, record, saving, tensorfile
from fulcrum.data import Images, Splits
from fulcrum.finished import reopen
from fulcrum.logbook.source import source
from helpers import TINY, checkpoint, composed, run_recorded, script, summary


@pytest.fixture(scope="module", params=[["lora=r4"], ["model=resnet18", "max_steps=1"]], ids=str)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    assert run_recorded([*TINY, *request.param], folder).status == "completed"
    return folder


def test_exported_weights_load_strictly_into_a_plain_network_with_the_same_outputs(folder):
    assert script("export", folder, "--format", "safetensors") == 0
    tensors, about = tensorfile.read(folder / "export" / "weights.safetensors", key="test")
    plain = adapters.build(about["model"])
    plain.load_state_dict(tensors)
    assert about["data"] == checkpoint(folder)["data"]
    images, network = torch.randn(5, 3, 8, 8), reopen(folder).network
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(images), network(images), rtol=1e-5, atol=1e-5)


def test_the_exported_graph_takes_raw_pixels_in_any_number(folder):
    assert script("export", folder, "--format", "torch") == 0
    graph = torch.export.load(folder / "export" / "network.pt2").module()
    run = reopen(folder)
    mean_C, std_C = (torch.tensor(run.checkpoint["data"][name]) for name in ("mean", "std"))
    for count in (1, 2, 7):
        images_NCHW = export.examples(count, 8)
        with torch.no_grad():
            expected = run.network((images_NCHW - mean_C[:, None, None]) / std_C[:, None, None])
            torch.testing.assert_close(graph(images_NCHW), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora=r4", "lora.targets=[layer1,conv2]", "lora.dropout=0.25", "optimizer=adamw", "schedule=multistep"],
        ["precision=bf16", "accumulation=x2", "batch.per_device=6", "saving=all", "data.drop_last=true"],
        ["checkpointing=block", "optimizer.clip_norm=1e-3", "max_steps=3", "model.channels_last=false"],
    ],
    ids=str,
)
def test_the_words_of_a_record_compose_to_the_experiment_of_the_run(overrides, tmp_path):
    overrides = [*TINY, *overrides]
    run_recorded(overrides, tmp_path)
    again, expected = composed(record.overrides(tmp_path))[0], composed(overrides)[0]
    if expected.batch.per_device is not None:
        expected.batch.effective = None
    assert again == expected


def test_a_value_is_quoted_so_that_hydra_reads_it_as_it_was():
    for value in ("it's, [here]", "null", "1", "", "a=b c\\d"):
        assert composed([f"data.root={record.quoted(value)}"])[0].data.root == value


def test_a_run_that_is_run_again_has_the_same_weights_and_what_differs_is_named(tmp_path, capsys):
    folder = tmp_path / "run"
    run_recorded([*TINY, "seed=null", "model.dropout=0.3"], folder)
    changed = summary(folder)
    changed["environment"]["torch"], changed["data"]["sha256"] = "1.0", "0"
    (folder / "summary.json").write_text(json.dumps(changed))
    assert script("rerun", folder) == 0
    told = capsys.readouterr().out
    assert "the same weights, bit for bit" in told
    assert "environment.torch: 1.0 then" in told
    assert "data.sha256: 0 then" in told
    assert summary(tmp_path / "run-again")["command"] == f"python scripts/rerun.py {folder}"
    saved = checkpoint(folder)
    saved["model"]["fc.bias"][0] += 1
    saving.write_atomically(saved, folder / "checkpoints" / "last.pt")
    assert script("rerun", folder, "--out", tmp_path / "other") == 1
    assert "other weights: 1 of" in capsys.readouterr().out


def test_a_run_records_its_data_and_its_source(tmp_path):
    run_recorded(TINY, tmp_path)
    recorded = summary(tmp_path)
    assert {key: recorded["data"][key] for key in ("train", "test", "classes")} == {"train": 53, "test": 101, "classes": 10}
    assert recorded["source"] == source()


def test_the_source_is_absent_outside_a_checkout_and_dirty_after_a_change(tmp_path):
    assert source(tmp_path) == {}
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    clean = source(tmp_path)
    assert (len(str(clean["commit"])), clean["dirty"]) == (40, False)
    (tmp_path / "file").write_text("two")
    assert source(tmp_path) == {**clean, "dirty": True}
    inside = tmp_path / "inside"
    inside.mkdir()
    assert source(inside) == {}


def test_the_fingerprint_of_the_data_moves_with_a_label_or_a_pixel():
    images = Images(torch.zeros(300, 3, 8, 8, dtype=torch.uint8), torch.zeros(300, dtype=torch.int64))
    other_label = Images(images.images_NCHW, images.labels_N.clone())
    other_label.labels_N[7] = 1
    other_pixel = Images(images.images_NCHW.clone(), images.labels_N)
    other_pixel.images_NCHW[3, 0, 0, 0] = 1
    mean_C = torch.zeros(3)
    prints = [Splits(train, images, mean_C, mean_C).fingerprint() for train in (images, other_label, other_pixel, images)]
    assert len(set(prints)) == 3
    assert prints[0] == prints[3]
