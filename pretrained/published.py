"""Published models by name in a recipe, where a class is expected:

language_model: {class: worldtokens.pretrained.published.language_model, args: {name: smollm2}}
"""

from __future__ import annotations

from worldtokens.data.weights import weights
from worldtokens.errors import InputError
from worldtokens.pretrained.hf.load import from_hf
from worldtokens.tasks.language.model import LanguageModel


def language_model(name: str) -> LanguageModel:
    """A language model of `wt.weights`, or of any source of `from_hf`.

    Args:
        name: ``"smollm2"``; or a folder, a .gguf file or a published name.

    Raises:
        InputError: it is not found, or is not a language model.
    """
    model = from_hf(weights(name) if name.isidentifier() else name)
    if not isinstance(model, LanguageModel):
        raise InputError(f"{name} is a {type(model).__name__}, expected a language model")
    return model
