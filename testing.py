"""`check_tokenizer` checks that a front-end fulfils the contract of `Tokenizer`, which all other components rely on.

It is modelled on scikit-learn's `check_estimator`: third parties call it from their own tests.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from worldtokens import parts
from worldtokens.backbone.transformer import Transformer
from worldtokens.errors import InputError
from worldtokens.layout import modality_id
from worldtokens.tokenizers.base import Batch, Tokenizer
from worldtokens.tokens import Tokens

__all__ = ["check_tokenizer", "randomised"]


def randomised(model: nn.Module, seed: int = 0, std: float = 0.15) -> nn.Module:
    """Randomise all parameters of a model, for parity tests: in place, in eval mode.

    Initial weights hide swapped or missing ones, since gains are 1 and biases 0. Here all are normal with `std`, with mean
    0.5 for vectors (gains, biases).
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(std * torch.randn(p.shape, generator=generator) + (0.5 if p.ndim == 1 else 0.0))
    return model.eval()


def check_tokenizer(
    tokenizer: Tokenizer | type[Tokenizer] | Callable[[], Tokenizer],
    samples: Sequence[Any],
    *,
    bad: Sequence[Any] = (),
    ordered: bool = True,
    tolerance: float = 1e-5,
) -> list[str]:
    """Check that a front-end fulfils the contract of `Tokenizer`.

    Args:
        tokenizer: a front-end, or a class or function that returns one.
        samples: at least two sources (better four) for `read`, of different lengths where the front-end allows it, with
            different tokens.
        bad: sources for which `InputError` must be raised (an empty or damaged file, a wrong type).
        ordered: the input is a sequence or grid, so tokens have positions (False for sets of points).
        tolerance: maximum absolute difference between a batch and single samples.

    Returns:
        The names of the checks run.

    Raises:
        AssertionError: the first check that fails: its name and the finding.
    """
    front = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer()
    if not isinstance(front, Tokenizer):
        raise AssertionError(f"contract: {type(front).__name__} is not a worldtokens Tokenizer")
    if len(samples) < 2:
        raise ValueError(f"check_tokenizer needs at least 2 samples, got {len(samples)}")
    was_training = front.training
    front.eval()
    subject = _Subject(front, list(samples), tolerance)
    checks = [
        check_fields,
        check_batch_invariance,
        check_padding,
        check_validity,
        check_order,
        check_positions if ordered else None,
        check_gradients,
        check_pack,
        check_types,
        check_state_dict,
        check_saving,
        check_repeatable,
    ]
    run = []
    try:
        for check in checks:
            if check is not None:
                check(subject)
                run.append(check.__name__)
        for source in bad:
            check_refused(front, source)
        if bad:
            run.append("check_refused")
    finally:
        front.train(was_training)
    return run


class _Subject:
    """A front-end with its samples, read once, and the tokens of each alone as the reference."""

    def __init__(self, tokenizer: Tokenizer, samples: list[Any], tolerance: float) -> None:
        self.tokenizer, self.tolerance = tokenizer, tolerance
        self.raws = []
        for i, s in enumerate(samples):
            raw = tokenizer.read(s)
            need(isinstance(raw, Tensor), "read", f"sample {i} is a {type(raw).__name__}, expected a Tensor")
            need(raw.device.type == "cpu", "read", f"sample {i} is on {raw.device}, expected the CPU")
            self.raws.append(raw)
        self.alone = [self.tokens([raw]) for raw in self.raws]

    def batch(self, raws: Sequence[Tensor]) -> Batch:
        param = next(self.tokenizer.parameters(), None)
        batch = self.tokenizer.collate(list(raws))
        return batch if param is None else batch.to(param.device)

    def tokens(self, raws: Sequence[Tensor]) -> Tokens:
        with torch.no_grad():
            return self.tokenizer(self.batch(raws))


def need(condition: bool, check: str, found: str) -> None:
    if not condition:
        raise AssertionError(f"{check}: {found}")


def _differ(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max()) if a.numel() else 0.0


def _same_samples(s: _Subject, tokens: Tokens, order: Sequence[int], check: str, why: str) -> None:
    for row, i in enumerate(order):
        valid, ref = tokens.valid[row], s.alone[i].valid[0]
        need(
            int(valid.sum()) == int(ref.sum()),
            check,
            f"sample {i} has {int(valid.sum())} valid tokens {why} and {int(ref.sum())} alone",
        )
        for name in ("x", "pos", "block", "ids"):
            a, b = getattr(tokens, name), getattr(s.alone[i], name)
            if b is None:
                continue
            diff = _differ(a[row][valid].double(), b[0][ref].double())
            need(
                diff <= s.tolerance,
                check,
                f"`{name}` of sample {i} changes by {diff:.3g} {why} (allowed {s.tolerance:g})",
            )


def check_fields(s: _Subject) -> None:
    """Tokens have the declared width and modality, are finite, at least one per sample, one row per sample."""
    name = "fields"
    need(bool(s.tokenizer.modality), name, "the class has no `modality`")
    for i, t in enumerate(s.alone):
        need(isinstance(t, Tokens), name, f"forward returned a {type(t).__name__}, expected Tokens")
        need(len(t) == 1, name, f"one sample became {len(t)} rows")
        need(
            t.dim == s.tokenizer.dim,
            name,
            f"tokens have dim {t.dim}, the front-end has dim={s.tokenizer.dim}",
        )
        need(bool(t.valid.any()), name, f"sample {i} has no valid token")
        need(bool(t.x[t.valid].isfinite().all()), name, f"sample {i} has values that are not finite")
        need(bool(t.pos[t.valid].isfinite().all()), name, f"sample {i} has positions that are not finite")
        mods = t.modality[t.valid].unique().tolist()
        need(mods == [modality_id(s.tokenizer.modality)], name, f"modality numbers {mods}, expected that of "
             f"{s.tokenizer.modality!r}, {modality_id(s.tokenizer.modality)}")  # fmt: skip
    same = all(
        _differ(s.alone[0].x[0][s.alone[0].valid[0]], t.x[0][t.valid[0]]) <= s.tolerance for t in s.alone[1:]
    )
    need(not same, name, "all samples have the same tokens: they do not depend on the source")


def check_batch_invariance(s: _Subject) -> None:
    """A sample has the same tokens in a batch as alone."""
    n = len(s.raws)
    _same_samples(s, s.tokens(s.raws), range(n), "batch invariance", "in a batch")
    order = [0, *range(n - 1, 0, -1)]
    _same_samples(
        s, s.tokens([s.raws[i] for i in order]), order, "batch invariance", "in a batch of another order"
    )


def check_padding(s: _Subject) -> None:
    """Values at padding do not change a trunk's output, and `valid` is True at the real tokens."""
    name = "padding"
    tokens = s.tokens(s.raws)
    trunk = _small_trunk(s)
    with torch.no_grad():
        ref = trunk(tokens)
        noise = torch.where(tokens.valid[..., None], tokens.x, torch.full_like(tokens.x, float("nan")))
        got = trunk(tokens.replace(x=noise))
        dense = trunk(tokens.replace(layout=None))
    for i in range(len(tokens)):
        keep = tokens.valid[i]
        diff = _differ(got.x[i][keep], ref.x[i][keep])
        need(diff <= s.tolerance, name, f"NaN at padding changes sample {i} by {diff:.3g}")
        # a layout that disagrees with `valid` would make the fast paths wrong
        diff = _differ(dense.x[i][keep], ref.x[i][keep])
        need(
            diff <= 10 * s.tolerance,
            name,
            f"layout and tensors disagree: the fast path differs from the dense mask by {diff:.3g} in sample {i}",
        )


def check_validity(s: _Subject) -> None:
    """Every sample has as many valid tokens in a batch as alone, and the longest has no padding."""
    tokens = s.tokens(s.raws)
    counts = tokens.valid.sum(1).tolist()
    alone = [int(t.valid.sum()) for t in s.alone]
    need(counts == alone, "validity", f"valid tokens in a batch {counts}, alone {alone}")
    need(max(counts) == tokens.shape[1] or tokens.shape[1] == s.alone[0].shape[1], "validity",
         f"the longest sample has {max(counts)} valid tokens in rows of {tokens.shape[1]}")  # fmt: skip
    if len(set(counts)) > 1:  # lengths differ, so the shorter samples have padding
        short = counts.index(min(counts))
        need(
            not bool(tokens.valid[short].all()),
            "validity",
            "a short sample has no padding in a batch with a longer one",
        )


def check_order(s: _Subject) -> None:
    """Row i of a batch is sample i."""
    order = list(range(len(s.raws)))[::-1]
    _same_samples(s, s.tokens([s.raws[i] for i in order]), order, "order", "in a reversed batch")


def check_positions(s: _Subject) -> None:
    """Tokens of a sample have different positions."""
    for i, t in enumerate(s.alone):
        pos = t.pos[0][t.valid[0]]
        n = len(pos)
        if n < 3:
            continue
        # a class token may share the position of the first patch
        distinct = len(pos.unique(dim=0))
        need(distinct >= n - 1, "positions", f"sample {i} has {n} tokens at {distinct} different positions")


def check_gradients(s: _Subject) -> None:
    """Every trainable parameter has a gradient that is finite and not zero."""
    params = [(k, p) for k, p in s.tokenizer.named_parameters() if p.requires_grad]
    if not params:
        return
    tokens = s.tokenizer(s.batch(s.raws))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(tokens.x.shape, generator=generator).to(tokens.x)
    loss = (tokens.x * weight).masked_fill(~tokens.valid[..., None], 0).sum()
    grads = torch.autograd.grad(loss, [p for _, p in params], allow_unused=True)
    for (name, _), g in zip(params, grads, strict=True):
        need(g is not None, "gradients", f"no gradient reaches the parameter {name!r}")
        need(bool(g.isfinite().all()), "gradients", f"the gradient of {name!r} is not finite")
        need(bool((g != 0).any()), "gradients", f"the gradient of {name!r} is zero everywhere")


def check_pack(s: _Subject) -> None:
    """Packing samples into one row and unpacking them is the identity."""
    tokens = s.tokens(s.raws)
    total = int(tokens.valid.sum())
    back = tokens.pack(total).unpack()
    _same_samples(s, back, range(len(s.raws)), "pack", "after pack and unpack")


def check_types(s: _Subject) -> None:
    """Half precision weights give half precision tokens with float32 positions, on the device of the weights."""
    moved = copy.deepcopy(s.tokenizer).to(torch.bfloat16)
    with torch.no_grad():
        t = moved(moved.collate(s.raws).to(torch.bfloat16))
    need(t.x.dtype == torch.bfloat16, "types", f"bfloat16 weights gave {t.x.dtype} tokens")
    need(t.pos.dtype == torch.float32, "types", f"positions became {t.pos.dtype}, expected float32")
    ref = s.tokens(s.raws)
    diff = (t.x.float() - ref.x)[ref.valid].abs().max() / ref.x[ref.valid].abs().max().clamp(min=1e-6)
    need(float(diff) < 0.1, "types", f"bfloat16 tokens differ by {float(diff):.2g} of the largest value")
    if torch.cuda.is_available():
        moved = copy.deepcopy(s.tokenizer).cuda()
        with torch.no_grad():
            t = moved(moved.collate(s.raws).to("cuda"))
        need(
            t.device.type == "cuda" and t.valid.is_cuda,
            "types",
            "the weights are on the GPU and the tokens are not",
        )


def check_state_dict(s: _Subject) -> None:
    """A front-end built from the config with the same state dict gives the same tokens."""
    with tempfile.TemporaryDirectory() as folder:
        other = parts.build(s.tokenizer.config(Path(folder)), Path(folder)).eval()
    other.load_state_dict(s.tokenizer.state_dict())
    with torch.no_grad():
        got = other(other.collate(s.raws))
    _same_samples(
        s, got.to(s.alone[0].device), range(len(s.raws)), "state dict", "after a state-dict round trip"
    )


def check_saving(s: _Subject) -> None:
    """`save` and `wt.load` give the same front-end."""
    with tempfile.TemporaryDirectory() as folder:
        s.tokenizer.save(folder)
        other = parts.load(folder)
        for raw, (i, source) in zip(s.raws, enumerate(s.alone), strict=True):
            with torch.no_grad():
                got = other(other.collate([raw]))
            diff = _differ(got.x[got.valid].cpu(), source.x[source.valid].cpu())
            need(diff <= s.tolerance, "saving", f"sample {i} changes by {diff:.3g} after save and load")


def check_repeatable(s: _Subject) -> None:
    """In eval mode the same batch gives bit-identical tokens."""
    a, b = s.tokens(s.raws), s.tokens(s.raws)
    need(
        torch.equal(a.x, b.x) and torch.equal(a.valid, b.valid),
        "repeatable",
        "two passes differ in eval mode",
    )


def check_refused(tokenizer: Tokenizer, source: Any) -> None:
    """A bad source raises InputError with a message, and no other error."""
    name = repr(source)[:80]
    try:
        tokenizer.tokens([source])
    except InputError as e:
        need(len(str(e)) > 10, "refused", f"{name}: InputError without a helpful message")
        return
    except Exception as e:
        raise AssertionError(f"refused: {name} raised {type(e).__name__}: {e}; expected InputError") from e
    raise AssertionError(f"refused: {name} was accepted; expected InputError")


def _small_trunk(s: _Subject) -> Transformer:
    dim = s.tokenizer.dim
    heads = next(h for h in (2, 1) if dim % h == 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(dim, 2, heads).to(s.alone[0].device).eval()
