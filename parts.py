"""Saving and loading: `Part`, the base class of all public modules, records its constructor's arguments.

A saved model is a folder: `config.json` with nested ``{"class": ..., "args": ...}``, `model.safetensors` with the weights,
and `tokenizer.json` with the vocabulary of a text front-end. Nothing is pickled; `load` needs only the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from worldtokens import adapters
from worldtokens.errors import InputError

CONFIG, WEIGHTS = "config.json", "model.safetensors"

Settings = TypeVar("Settings")


def _recording(init):
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(self, *args, **kwargs):
        if "_args" not in self.__dict__:  # of the outermost constructor only, the one called by the user
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            given = dict(list(bound.arguments.items())[1:])
            for name, cls in type(self).settings_types.items():
                if name in given:
                    given[name] = settings(cls, given[name], name)
            object.__setattr__(self, "_args", given)
        init(self, *args, **kwargs)

    return wrapper


class Part(nn.Module):
    """An nn.Module that records its constructor's arguments and can be saved and rebuilt.

    Arguments must be plain values (numbers, strings, lists, dicts), settings dataclasses (saved as a dict of all fields,
    so that a later change of a default changes no saved model), other Parts, or values that a subclass writes to files in `config_args`.
    """

    settings_types: ClassVar[
        dict[str, type]
    ] = {}  # argument -> its dataclass, where a dict or None is taken too

    if TYPE_CHECKING:
        # torch types every submodule and buffer as `Tensor | Module`, which no caller can use without a cast
        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            # mypy takes no method assignment, even of the same signature
            cls.__init__ = _recording(cls.__init__)  # type: ignore[method-assign]

    def config_args(self, folder: Path | None = None) -> dict[str, Any]:
        """The constructor's arguments; a subclass writes other values to files in `folder`.

        A file is given as ``{"file": "name"}``; `load` passes its path to the constructor.
        """
        # a submodule replaced after construction (model.trunk = other) is saved as it is now
        args = {}
        for name, value in self._args.items():
            live = self.__dict__.get("_modules", {}).get(name)
            args[name] = live if isinstance(live, Part | nn.ModuleDict) else value
        return args

    def config(self, folder: Path | None = None) -> dict[str, Any]:
        """The config that rebuilds this module: nested ``{"class": ..., "args": ...}``."""
        cls = type(self)
        name = f"{cls.__module__}.{cls.__qualname__}"
        import worldtokens

        if cls.__module__.startswith("worldtokens.") and getattr(worldtokens, cls.__name__, None) is cls:
            name = f"worldtokens.{cls.__name__}"
        args = {k: _plain(v, folder, f"{cls.__name__}({k}=)") for k, v in self.config_args(folder).items()}
        return {"class": name, "args": args}

    def train(self, mode: bool = True) -> Part:
        """Training or eval mode; a module with only frozen parameters stays in eval mode (see `wt.freeze`).

        So its stochastic depth is off and its running statistics do not change: a frozen module's output stays the same.
        """
        super().train(mode)
        if mode and not all(p.requires_grad for p in self.parameters()):
            for module in self.modules():
                params = list(module.parameters())
                if params and not any(p.requires_grad for p in params):
                    nn.Module.train(module, False)
        return self

    def save(self, folder: str | os.PathLike) -> Path:
        """Write `config.json`, `model.safetensors` and vocabularies into `folder`, each file atomically.

        `peft` adapters in the model are saved as separate weights; `wt.merge_lora` merges them first, so that loading
        needs no peft.

        Returns:
            The folder.
        """
        from safetensors.torch import save

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config(folder)
        if getattr(self, "peft_config", None):
            config["adapters"] = adapters.settings(self)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        weights, alias = _own_weights(self)
        meta = {"format": "pt", "config": _digest(text), "alias": json.dumps(alias)}
        write_whole(folder / WEIGHTS, save(weights, metadata=meta))
        write_whole(folder / CONFIG, text.encode())
        return folder

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Save the model with a model card to the Hugging Face Hub; see `hub.push`.

        Args:
            repo_id: ``"someone/name"``.
            options: arguments of `huggingface_hub.ModelHubMixin.push_to_hub`, e.g. ``private=True``.

        Returns:
            The URL of the commit.
        """
        from worldtokens import hub

        return hub.push(self, repo_id, **options)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike, **options: Any) -> Any:
        """Load a model of this class from a folder or the Hugging Face Hub; ``wt.Part`` accepts any class.

        Args:
            source: a folder that `save` wrote, or ``"someone/name"``.
            options: arguments of `huggingface_hub.ModelHubMixin.from_pretrained`, e.g. ``revision="main"``.

        Raises:
            InputError: it does not exist, is not a model of this package, or is of another class.
        """
        from worldtokens import hub

        return hub.pull(cls, load, source, **options)


class OnClass:
    """A class method whose name has another meaning on an instance: the base class's method of that name."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self.inherited = getattr(owner.__base__, name)

    def __get__(self, instance: Any, owner: type) -> Callable:
        return self.function.__get__(owner) if instance is None else self.inherited.__get__(instance)


def _digest(config: str) -> str:
    return hashlib.sha256(config.encode()).hexdigest()[:16]


def _plain(value: Any, folder: Path | None, where: str) -> Any:
    if isinstance(value, Part):
        return value.config(folder)
    if isinstance(value, dict | nn.ModuleDict):
        return {str(k): _plain(v, folder, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list | tuple | nn.ModuleList):
        return [_plain(v, folder, where) for v in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return _plain(fields, folder, where)
    raise TypeError(
        f"{where} is a {type(value).__name__}, which config.json cannot hold: use plain values and Parts, or "
        "override config_args to write a file"
    )


def settings(cls: type[Settings], value: Settings | dict[str, Any] | None, name: str) -> Settings:
    """Coerce an argument to the settings dataclass `cls`.

    Args:
        cls: a dataclass.
        value: an instance, which is returned as it is; a dict of its fields (lists become tuples); None: the defaults.
        name: the argument's name, for error messages.

    Raises:
        InputError: unknown fields, or neither an instance, a dict nor None.
    """
    if isinstance(value, cls):
        return value
    if value is not None and not isinstance(value, dict):
        raise InputError(f"{name} is a {type(value).__name__}, expected {cls.__name__}, a dict or None")
    # typing has no public bound for "any dataclass"
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    unknown = [key for key in value or {} if key not in known]
    if unknown:
        raise InputError(f"{name} has unknown keys {unknown}, expected some of {known}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in (value or {}).items()})


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and the parallel wrappers."""
    return ".".join(p for p in name.split(".") if p not in ("_orig_mod", "module", "_fsdp_wrapped_module"))


def _own_weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict with plain names, without duplicates of shared tensors, and alias -> name of those."""
    weights: dict[str, Tensor] = {}
    alias: dict[str, str] = {}
    seen: dict[tuple, str] = {}
    for name, value in model.state_dict().items():
        name = clean_name(name)
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if value.numel() and key in seen:
            alias[name] = seen[key]
            continue
        seen[key] = name
        weights[name] = value.detach().contiguous().cpu()
    return weights, alias


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a crash leaves the old file or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    with contextlib.suppress(OSError):  # flush the directory entry too, where the system allows it
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def build(config: Any, folder: Path | None = None) -> Any:
    """Build a module from its `Part.config`; files are looked up in `folder`.

    Raises:
        InputError: the class cannot be found, is not a Part, or does not take the arguments.
    """
    if isinstance(config, list):
        return [build(c, folder) for c in config]
    if not isinstance(config, dict):
        return config
    if set(config) == {"file"}:
        # only a plain name inside the folder: an untrusted config must not open other files
        name = os.path.basename(str(config["file"]))
        return str(folder / name) if folder is not None else name
    if set(config) != {"class", "args"}:
        return {k: build(v, folder) for k, v in config.items()}
    cls = _find_class(config["class"])
    args = {k: build(v, folder) for k, v in config["args"].items()}
    try:
        return cls(**args)
    except TypeError as e:
        raise InputError(f"{config['class']} cannot be built from its config: {e}") from e


def _find_class(name: str) -> type[Part]:
    module, _, cls = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, ValueError) as e:
        raise InputError(
            f"config names the class {name!r}, which cannot be imported ({e}): install its package"
        ) from e
    if not (isinstance(found, type) and issubclass(found, Part)):
        raise InputError(f"config names {name!r}, which is not a worldtokens Part")
    return found


def load(folder: str | os.PathLike, device: str | torch.device = "cpu") -> Any:
    """Load a model from a folder that `save` wrote: class, settings, vocabulary and weights.

    Returns:
        The model in eval mode.

    Raises:
        InputError: the folder is not a saved model, or config and weights do not match.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise InputError(
            f"{folder} is not a saved model: expected {CONFIG} and {WEIGHTS} in it, as model.save(folder) writes"
        )
    text = (folder / CONFIG).read_text(encoding="utf-8")
    try:
        config = json.loads(text)
        with safe_open(folder / WEIGHTS, "pt", device=str(device)) as f:
            meta = f.metadata() or {}
            weights = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    except (json.JSONDecodeError, SafetensorError) as e:
        raise InputError(f"{folder} is damaged: {e}") from e
    if meta.get("config") not in (None, _digest(text)):
        raise InputError(
            f"{folder}: {CONFIG} and {WEIGHTS} were not written by the same save; save the model again, or "
            "restore the pair from a backup"
        )
    peft = config.pop("adapters", None) if isinstance(config, dict) else None
    model = build(config, folder)
    if not isinstance(model, Part):
        raise InputError(f"{folder / CONFIG} has no class at its top level")
    if peft:
        adapters.inject(model, peft)
    model.to(device)
    for alias, name in json.loads(meta.get("alias", "{}")).items():
        weights[alias] = weights[name]
    load_strictly(model, weights, str(folder / WEIGHTS))
    return model.eval()


def load_strictly(model: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load a state dict; raise an error that names missing and unknown keys and wrong shapes.

    Raises:
        InputError: keys are missing, unknown, or have another shape.
    """
    own = {clean_name(k): v for k, v in model.state_dict().items()}
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{k} is {tuple(weights[k].shape)}, expected {tuple(own[k].shape)}"
        for k in own.keys() & weights.keys()
        if own[k].shape != weights[k].shape
    ]
    if missing or extra or shapes:
        found = [f"missing {missing[:5]}"] * bool(missing) + [f"unknown {extra[:5]}"] * bool(extra)
        raise InputError(f"{source} does not fit {type(model).__name__}: " + "; ".join(found + shapes[:5]))
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])
