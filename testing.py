"""One contract, one public checker: `check_tokenizer` runs a front-end through what every room relies on.

In the spirit of scikit-learn's `check_estimator`: a third party calls it from a test of their own.
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
    """A model with every parameter away from its start, for comparing it with another one: in place, in eval mode.

    Fresh weights hide what is swapped or missing: gains are 1 and biases 0. Here all are normal with `std`, vectors (gains,
    biases) around 0.5.
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
    """Check that a front-end keeps the contract of `Tokenizer`.

    Args:
        tokenizer: a front-end, or something that makes one when called.
        samples: at least two sources (better four) that `read` takes, not all of one length where the front-end allows that,
            and giving different tokens.
        bad: sources that must be refused with `InputError` (an empty or broken file, a wrong type).
        ordered: the order of what is read matters, so that tokens carry positions (False for sets of points).
        tolerance: largest absolute difference allowed between a batch and one by one.

    Returns:
        The names of the checks that were run.

    Raises:
        AssertionError: the first check that fails, by name, with what was found.
    """
    made = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer()
    if not isinstance(made, Tokenizer):
        raise AssertionError(f"contract: {type(made).__name__} is not a worldtokens Tokenizer")
    if len(samples) < 2:
        raise ValueError(f"check_tokenizer needs at least 2 samples, got {len(samples)}")
    was_training = made.training
    made.eval()
    subject = _Subject(made, list(samples), tolerance)
    checks = [
        check_fields,
        check_batch_mates,
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
            check_refused(made, source)
        if bad:
            run.append("check_refused")
    finally:
        made.train(was_training)
    return run


class _Subject:
    """A front-end with its samples read once, each also by itself as the reference."""

    def __init__(self, tokenizer: Tokenizer, samples: list[Any], tolerance: float) -> None:
        self.tokenizer, self.tolerance = tokenizer, tolerance
        self.raws = []
        for i, s in enumerate(samples):
            raw = tokenizer.read(s)
            need(
                isinstance(raw, Tensor), "read", f"sample {i} gave a {type(raw).__name__}, expected a Tensor"
            )
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

    def valid_rows(self, tokens: Tokens) -> list[Tensor]:
        return [tokens.x[i][tokens.valid[i]] for i in range(len(tokens))]


def need(fact: bool, check: str, found: str) -> None:
    if not fact:
        raise AssertionError(f"{check}: {found}")


def _differ(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max()) if a.numel() else 0.0


def _same_samples(s: _Subject, tokens: Tokens, order: Sequence[int], check: str, why: str) -> None:
    for row, i in enumerate(order):
        mine, ref = tokens.valid[row], s.alone[i].valid[0]
        need(
            int(mine.sum()) == int(ref.sum()),
            check,
            f"sample {i} has {int(mine.sum())} valid tokens {why} and {int(ref.sum())} alone",
        )
        for name in ("x", "pos", "block", "ids"):
            a, b = getattr(tokens, name), getattr(s.alone[i], name)
            if b is None:
                continue
            diff = _differ(a[row][mine].double(), b[0][ref].double())
            need(
                diff <= s.tolerance,
                check,
                f"`{name}` of sample {i} moves by {diff:.3g} {why} (allowed {s.tolerance:g})",
            )


def check_fields(s: _Subject) -> None:
    """Tokens of the declared width and modality, finite, at least one a sample, no sample split in segments."""
    name = "fields"
    need(bool(s.tokenizer.modality), name, "the class has no `modality`")
    for i, t in enumerate(s.alone):
        need(isinstance(t, Tokens), name, f"forward gave a {type(t).__name__}, expected Tokens")
        need(len(t) == 1, name, f"one sample gave {len(t)} rows")
        need(
            t.dim == s.tokenizer.dim,
            name,
            f"tokens are {t.dim} wide, the front-end says dim={s.tokenizer.dim}",
        )
        need(bool(t.valid.any()), name, f"sample {i} gave no valid token")
        need(bool(t.x[t.valid].isfinite().all()), name, f"sample {i} gave values that are not finite")
        need(bool(t.pos[t.valid].isfinite().all()), name, f"sample {i} has positions that are not finite")
        mods = t.modality[t.valid].unique().tolist()
        need(mods == [modality_id(s.tokenizer.modality)], name, f"modality numbers {mods}, expected that of "
             f"{s.tokenizer.modality!r}, {modality_id(s.tokenizer.modality)}")  # fmt: skip
    same = all(
        _differ(s.alone[0].x[0][s.alone[0].valid[0]], t.x[0][t.valid[0]]) <= s.tolerance for t in s.alone[1:]
    )
    need(not same, name, "all samples gave the same tokens: nothing of the source reaches them")


def check_batch_mates(s: _Subject) -> None:
    """A sample in a batch gives what it gives alone."""
    n = len(s.raws)
    _same_samples(s, s.tokens(s.raws), range(n), "batch mates", "beside other samples")
    order = [0, *range(n - 1, 0, -1)]
    _same_samples(
        s, s.tokens([s.raws[i] for i in order]), order, "batch mates", "beside them in another order"
    )


def check_padding(s: _Subject) -> None:
    """What stands at padding does not reach a trunk's answer, and `valid` marks the real ones as True."""
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
        need(diff <= s.tolerance, name, f"NaN at padding moves sample {i} by {diff:.3g}")
        # a layout that does not tell of `valid` as it is would send the fast paths astray
        diff = _differ(dense.x[i][keep], ref.x[i][keep])
        need(
            diff <= 10 * s.tolerance,
            name,
            f"the layout and the tensors disagree: the fast path differs from the dense rule by {diff:.3g} in sample {i}",
        )


def check_validity(s: _Subject) -> None:
    """Every sample has as many valid tokens as alone, and the longest is not marked as padding."""
    tokens = s.tokens(s.raws)
    counts = tokens.valid.sum(1).tolist()
    alone = [int(t.valid.sum()) for t in s.alone]
    need(counts == alone, "validity", f"valid tokens in a batch {counts}, alone {alone}")
    need(max(counts) == tokens.shape[1] or tokens.shape[1] == s.alone[0].shape[1], "validity",
         f"the longest sample has {max(counts)} valid tokens in rows of {tokens.shape[1]}")  # fmt: skip
    if len(set(counts)) > 1:  # tokens that are valid differ from those that are not
        short = counts.index(min(counts))
        need(
            not bool(tokens.valid[short].all()),
            "validity",
            "a short sample has no padding marked in a longer batch",
        )


def check_order(s: _Subject) -> None:
    """Row i of a batch is sample i."""
    order = list(range(len(s.raws)))[::-1]
    _same_samples(s, s.tokens([s.raws[i] for i in order]), order, "order", "when the batch is turned round")


def check_positions(s: _Subject) -> None:
    """Tokens of a sample stand at places of their own, and places do not depend on the batch."""
    for i, t in enumerate(s.alone):
        pos = t.pos[0][t.valid[0]]
        n = len(pos)
        if n < 3:
            continue
        # a class token may share its place with the first patch
        distinct = len(pos.unique(dim=0))
        need(distinct >= n - 1, "positions", f"sample {i} has {n} tokens at {distinct} different positions")


def check_gradients(s: _Subject) -> None:
    """Every parameter that wants a gradient gets one that is not zero, from the whole batch."""
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
    """Packing samples in one row and taking them out again changes nothing."""
    tokens = s.tokens(s.raws)
    total = int(tokens.valid.sum())
    back = tokens.pack(total).unpack()
    _same_samples(s, back, range(len(s.raws)), "pack", "after pack and unpack")


def check_types(s: _Subject) -> None:
    """Half precision weights give half precision tokens with float32 positions; devices follow the weights."""
    moved = copy.deepcopy(s.tokenizer).to(torch.bfloat16)
    with torch.no_grad():
        t = moved(moved.collate(s.raws).to(torch.bfloat16))
    need(t.x.dtype == torch.bfloat16, "types", f"bfloat16 weights gave {t.x.dtype} tokens")
    need(t.pos.dtype == torch.float32, "types", f"positions became {t.pos.dtype}, expected float32")
    ref = s.tokens(s.raws)
    diff = (t.x.float() - ref.x)[ref.valid].abs().max() / ref.x[ref.valid].abs().max().clamp(min=1e-6)
    need(float(diff) < 0.1, "types", f"bfloat16 tokens are off by {float(diff):.2g} of the largest value")
    if torch.cuda.is_available():
        moved = copy.deepcopy(s.tokenizer).cuda()
        with torch.no_grad():
            t = moved(moved.collate(s.raws).to("cuda"))
        need(
            t.device.type == "cuda" and t.valid.is_cuda,
            "types",
            "tokens did not follow the weights to the GPU",
        )


def check_state_dict(s: _Subject) -> None:
    """A second front-end of the same config gives the same tokens once it has the same state dict."""
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
            need(diff <= s.tolerance, "saving", f"sample {i} moves by {diff:.3g} after save and load")


def check_repeatable(s: _Subject) -> None:
    """In eval mode the same batch gives the same tokens, to the bit."""
    a, b = s.tokens(s.raws), s.tokens(s.raws)
    need(
        torch.equal(a.x, b.x) and torch.equal(a.valid, b.valid),
        "repeatable",
        "two passes differ in eval mode",
    )


def check_refused(tokenizer: Tokenizer, source: Any) -> None:
    """A source that cannot be used raises InputError with a message, and nothing else."""
    shown = repr(source)[:80]
    try:
        tokenizer.tokens([source])
    except InputError as e:
        need(len(str(e)) > 10, "refused", f"{shown}: InputError without a message that helps")
        return
    except Exception as e:
        raise AssertionError(f"refused: {shown} raised {type(e).__name__}: {e}; expected InputError") from e
    raise AssertionError(f"refused: {shown} was accepted; expected InputError")


def _small_trunk(s: _Subject) -> Transformer:
    dim = s.tokenizer.dim
    heads = next(h for h in (2, 1) if dim % h == 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(dim, 2, heads).to(s.alone[0].device).eval()
