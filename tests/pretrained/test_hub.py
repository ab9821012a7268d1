"""Models to the Hub and back: the mixin's real code up to the calls that would go over the network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard

import worldtokens as wt
from worldtokens import hub


@pytest.fixture(scope="module")
def model() -> wt.CLIP:
    text = wt.TextTokenizer.train(["a cat sat on the mat"] * 3, 300, dim=16, context=12)
    fronts = {"image": wt.ImageTokenizer(16, patch=8, size=16), "text": text}
    return wt.CLIP(fronts, wt.Transformer(16, 1, 2), dim=8).eval()


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Where the Hub would keep what is uploaded."""
    kept = SimpleNamespace(folder=tmp_path / "hub", calls=[])

    def create_repo(self, repo_id, **options):
        kept.calls.append(("create_repo", repo_id, options))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, commit_message, **options):
        kept.calls.append(("upload_folder", repo_id, commit_message))
        shutil.copytree(folder_path, kept.folder / repo_id, dirs_exist_ok=True)
        return f"https://hub/{repo_id}/commit/1"

    def download(repo_id, filename, **options):
        kept.calls.append(("download", repo_id, filename))
        if not (kept.folder / repo_id / filename).exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"{repo_id} isn't here")
        return str(kept.folder / repo_id / filename)

    def snapshot(repo_id, *, allow_patterns, revision, **options):
        kept.calls.append(("snapshot", repo_id, revision))
        wanted = [p for pattern in allow_patterns for p in (kept.folder / repo_id).glob(pattern)]
        out = tmp_path / "cache" / repo_id
        out.mkdir(parents=True, exist_ok=True)
        for path in wanted:
            shutil.copy(path, out)
        return str(out)

    monkeypatch.setattr(huggingface_hub.hub_mixin.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.hub_mixin.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub.hub_mixin, "hf_hub_download", download)
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return kept


def test_there_and_back(model, server):
    address = model.push_to_hub("someone/cats", private=True, commit_message="first")
    assert address == "https://hub/someone/cats/commit/1"
    assert server.calls == [
        ("create_repo", "someone/cats", {"private": True, "exist_ok": True}),
        ("upload_folder", "someone/cats", "first"),
    ]
    files = {p.name for p in (server.folder / "someone/cats").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    back = wt.CLIP.from_pretrained("someone/cats", revision="v1")
    assert ("snapshot", "someone/cats", "v1") in server.calls
    assert isinstance(back, wt.CLIP) and not back.training
    assert torch.equal(back.embed("text", ["a cat"]), model.embed("text", ["a cat"]))


def test_from_a_folder_without_the_hub(model, tmp_path):
    model.save(tmp_path / "saved")
    for given in (tmp_path / "saved", str(tmp_path / "saved")):
        back = wt.Part.from_pretrained(given)
        assert torch.equal(back.embed("text", ["a cat"]), model.embed("text", ["a cat"]))


def test_what_is_wrong_is_told(model, server, tmp_path):
    model.save(tmp_path / "saved")
    with pytest.raises(wt.InputError, match=r"is a CLIP, not a Classifier: use wt.Part.from_pretrained"):
        wt.Classifier.from_pretrained(tmp_path / "saved")
    with pytest.raises(wt.InputError, match="no such folder, and the Hub gave no model of that name"):
        wt.Part.from_pretrained("someone/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(wt.InputError, match="not a saved model"):
        wt.Part.from_pretrained(tmp_path / "empty")


def test_the_card_tells_what_the_model_knows(model):
    made = hub.card(model, "someone/cats", license="apache-2.0", text="Trained on cats.", language="en")
    again = ModelCard(str(made))  # its head is YAML that the Hub reads
    assert again.data.license == "apache-2.0" and again.data.library_name == "worldtokens"
    assert again.data.pipeline_tag == "zero-shot-image-classification" and again.data.language == "en"
    text = again.text
    count = sum(p.numel() for p in model.parameters())
    assert f"{count:,} parameters" in text and "Trained on cats." in text
    assert "wt.CLIP.from_pretrained('someone/cats')" in text
    assert "| mean | `[0.48145466, 0.4578275, 0.40821073]` |" in text and "| context | `12` |" in text
    classes = hub.card(
        wt.Classifier(wt.ImageTokenizer(16, patch=8, size=16), wt.Transformer(16, 1, 2), ["cat", "dog"])
    )
    assert "Classes (2): cat, dog" in classes.text and classes.data.pipeline_tag == "image-classification"


def test_a_model_loads_without_the_hubs_package(model, tmp_path):
    """Neither the face, nor the command's help, nor saving and loading import huggingface_hub themselves."""
    model.tokenizers["image"].save(tmp_path / "m")
    code = (
        "import sys\n"
        "sys.modules['huggingface_hub'] = None\n"  # an import of it would fail
        "import worldtokens as wt, worldtokens.cli\n"
        "from worldtokens.parts import load\n"
        f"print(type(load({str(tmp_path / 'm')!r})).__name__)\n"
        "try: worldtokens.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ImageTokenizer\n") and "usage" in done.stdout.lower()
    assert Path(wt.__file__).exists()
