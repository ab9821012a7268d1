"""LoRA (Hu et al. 2021) by peft: adapters are injected into a model in place, saved with it, and merged.

    import peft
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=r"trunk\\..*\\.(qkv|fc1)"), model)
    worldtokens.train(model, rows, train=..., optim=...)     # a run saves and resumes with its adapters
    wt.merge_lora(model).save("out")                         # an ordinary model again

`inject_adapter_in_model` freezes all other parameters (`wt.unfreeze(model, "head")` trains a new head too) and returns the
task itself, which the training loop needs; after `peft.get_peft_model(model, config)` use ``.get_base_model()``. In a
recipe, inject adapters after `build` and before `train`::

    recipe = Recipe.read("classify_digits")
    rows, validation = recipe.rows()
    task, augment = recipe.build(rows)
    peft.inject_adapter_in_model(config, task)
    train(task, rows, validation, train=recipe.train, optim=recipe.optim, augment=augment)
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from worldtokens.adapters import peft_module
from worldtokens.errors import InputError

Model = TypeVar("Model", bound=nn.Module)


def merge_lora(model: Model) -> Model:
    """Merge LoRA adapters into the weights and remove them: the same outputs from plain layers.

    Frozen weights stay frozen: `wt.unfreeze(model, "*")` makes all trainable again.

    Args:
        model: a model with adapters of `peft`; changed in place.

    Returns:
        The model.

    Raises:
        InputError: it has no adapters.
    """
    layers = peft_module("peft.tuners.tuners_utils").BaseTunerLayer
    adapted = [(name, m) for name, m in model.named_modules() if isinstance(m, layers)]
    if not adapted:
        raise InputError(f"{type(model).__name__} has no adapters of peft to merge")
    for name, layer in adapted:
        layer.merge(safe_merge=True)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model
