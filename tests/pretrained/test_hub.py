"""Pushing to and loading from the Hub: the mixin's own code, with the network calls replaced."""

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
    """A local folder in place of the Hub."""
    state = SimpleNamespace(folder=tmp_path / "hub", calls=[])

    def create_repo(self, repo_id, **options):
        state.calls.append(("create_repo", repo_id, options))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, commit_message, **options):
        state.calls.append(("upload_folder", repo_id, commit_message))
        shutil.copytree(folder_path, state.folder / repo_id, dirs_exist_ok=True)
        return f"https://hub/{repo_id}/commit/1"

    def download(repo_id, filename, **options):
        state.calls.append(("download", repo_id, filename))
        if not (state.folder / repo_id / filename).exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"{repo_id} isn't here")
        return str(state.folder / repo_id / filename)

    def snapshot(repo_id, *, allow_patterns, revision, **options):
        state.calls.append(("snapshot", repo_id, revision))
        wanted = [p for pattern in allow_patterns for p in (state.folder / repo_id).glob(pattern)]
        out = tmp_path / "cache" / repo_id
        out.mkdir(parents=True, exist_ok=True)
        for path in wanted:
            shutil.copy(path, out)
        return str(out)

    monkeypatch.setattr(huggingface_hub.hub_mixin.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.hub_mixin.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub.hub_mixin, "hf_hub_download", download)
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return state


def test_push_and_load_round_trip(model, server):
    url = model.push_to_hub("someone/cats", private=True, commit_message="first")
    assert url == "https://hub/someone/cats/commit/1"
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
    for source in (tmp_path / "saved", str(tmp_path / "saved")):
        back = wt.Part.from_pretrained(source)
        assert torch.equal(back.embed("text", ["a cat"]), model.embed("text", ["a cat"]))


def test_errors_name_the_cause(model, server, tmp_path):
    model.save(tmp_path / "saved")
    with pytest.raises(wt.InputError, match=r"is a CLIP, not a Classifier: use wt.Part.from_pretrained"):
        wt.Classifier.from_pretrained(tmp_path / "saved")
    with pytest.raises(wt.InputError, match="no such folder, and no such model on the Hub"):
        wt.Part.from_pretrained("someone/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(wt.InputError, match="not a saved model"):
        wt.Part.from_pretrained(tmp_path / "empty")


def test_the_card_lists_the_models_settings(model):
    card = hub.card(model, "someone/cats", license="apache-2.0", text="Trained on cats.", language="en")
    parsed = ModelCard(str(card))  # its metadata is YAML that the Hub parses
    assert parsed.data.license == "apache-2.0" and parsed.data.library_name == "worldtokens"
    assert parsed.data.pipeline_tag == "zero-shot-image-classification" and parsed.data.language == "en"
    text = parsed.text
    count = sum(p.numel() for p in model.parameters())
    assert f"{count:,} parameters" in text and "Trained on cats." in text
    assert "wt.CLIP.from_pretrained('someone/cats')" in text
    assert "| mean | `[0.48145466, 0.4578275, 0.40821073]` |" in text and "| context | `12` |" in text
    classes = hub.card(
        wt.Classifier(wt.ImageTokenizer(16, patch=8, size=16), wt.Transformer(16, 1, 2), ["cat", "dog"])
    )
    assert "Classes (2): cat, dog" in classes.text and classes.data.pipeline_tag == "image-classification"


def test_a_model_loads_without_huggingface_hub(model, tmp_path):
    """Neither `import worldtokens`, nor the command's help, nor saving and loading import huggingface_hub."""
    model.tokenizers["image"].save(tmp_path / "m")
    code = (
        "import sys\n"
        "sys.modules['huggingface_hub'] = None\n"  # importing it fails
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
