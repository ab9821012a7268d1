"""LoRA (Hu et al. 2021) is peft's: it is put into a model of ours in place, saved with it, and merged.

    import peft
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=r"trunk\\..*\\.(qkv|fc1)"), model)
    worldtokens.train(model, rows, train=..., optim=...)     # a run saves and resumes with its adapters
    wt.merge_lora(model).save("out")                         # an ordinary model again

`inject_adapter_in_model` freezes what it does not adapt (`wt.unfreeze(model, "head")` lets a new head learn too) and leaves
the task a task, which the training loop needs; of `peft.get_peft_model(model, config)` the same is
``.get_base_model()``. A recipe's task gets its adapters between being built and being trained::

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
    """Add adapters into the weights that they change, and take them out: the same numbers from plain layers.

    Frozen weights stay frozen: `wt.unfreeze(model, "*")` lets all learn again.

    Args:
        model: with adapters of `peft`; changed in place.

    Returns:
        The model.

    Raises:
        InputError: it has none.
    """
    layers = peft_module("peft.tuners.tuners_utils").BaseTunerLayer
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, layers)]
    if not found:
        raise InputError(f"{type(model).__name__} has no adapters of peft to merge")
    for name, layer in found:
        layer.merge(safe_merge=True)
        holder, _, own = name.rpartition(".")
        setattr(model.get_submodule(holder), own, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model
