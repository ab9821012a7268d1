"""Identity of a model: a hash of its config, vocabularies and weights."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import torch

from worldtokens.parts import Part, clean_name


def model_identity(model: Part) -> str:
    """Hash that is equal only for models with equal outputs.

    It covers the config, its files (vocabularies) and every weight with name, dtype and shape. It does not depend on the
    device and is unchanged by `save` and `load`.

    Returns:
        24 hex digits.
    """
    digest = hashlib.blake2b(digest_size=12)
    with tempfile.TemporaryDirectory() as folder:
        digest.update(json.dumps(model.config(Path(folder)), sort_keys=True).encode())
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    weights = {clean_name(name): value for name, value in model.state_dict().items()}
    for name in sorted(weights):
        value = weights[name].detach().contiguous().cpu()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        # as bytes, since numpy has no bfloat16
        digest.update(value.flatten().view(torch.uint8).numpy() if value.numel() else b"")
    return digest.hexdigest()
