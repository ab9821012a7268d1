"""More or fewer words for a trained model, and longer texts: the tables of a text front-end, and the heads that follow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.pretrained.surgery.replace import find_front, owners, remake
from worldtokens.tokenizers.text.tokenizer import TextTokenizer

CHUNK = 4096  # new rows drawn at a time
HELD_IDS = ("prefix", "suppress", "suppress_first")  # arguments of tasks that write: lists of ids


def grow_vocabulary(
    model: nn.Module,
    tokens: Sequence[str],
    special: bool = False,
    column: str | None = None,
    spread: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Give a text model new tokens; ids and vectors of the old ones stay.

    A new row of the embedding is drawn with mean and covariance of the old rows (Hewitt 2021: a new word starts where
    words are), and so is one of a head with weights of its own; a tied head is the embedding and follows.

    Args:
        model: a task, an `Encoder` or a `TextTokenizer`; changed in place, before an optimizer is made.
        tokens: new tokens, each read as one wherever a text spells it.
        special: control tokens: a text never becomes one by spelling it, unless it is asked for.
        column: the front-end's, where the model has several of text.
        spread: share of the old rows' deviation from their mean that new rows have; 0: all at the mean.
        seed: of the draw.

    Returns:
        The new tokens' ids.

    Raises:
        InputError: a token is there already, is empty, or comes twice.
    """
    front = find_front(model, TextTokenizer, column)
    tokens = [tokens] if isinstance(tokens, str) else list(tokens)
    known = front._rust.get_vocab()
    wrong = [t for i, t in enumerate(tokens) if not t or t in known or t in tokens[:i]]
    if wrong or not tokens:
        raise InputError(
            f"new tokens {wrong[:5] or tokens} are in the vocabulary already, empty, or named twice"
        )
    rust = tokenizers.Tokenizer.from_str(front._rust.to_str())
    rust.add_tokens([AddedToken(t, normalized=False, special=special) for t in tokens])
    ids = [rust.token_to_id(t) for t in tokens]
    old = front.vocab_size
    g = torch.Generator().manual_seed(seed)
    used = (
        max(known.values()) + 1
    )  # a published table may have rows behind the vocabulary that were never trained
    size = max(max(ids) + 1, old)

    def fit(name: str, value: Tensor, start: Tensor) -> Tensor:
        if len(value) != old or len(start) != size or value.shape[1:] != start.shape[1:]:
            raise InputError(f"{name} is {tuple(value.shape)}: expected a table of {old} tokens")
        return torch.cat([value, start[: size - old]])

    def draw(value: Tensor) -> Tensor:
        """New rows in their places, from rows that were used."""
        value = value.clone()
        value[ids] = _like(value[:used].double(), len(ids), spread, g).to(value)
        return value

    _speak(model, front, rust, size, fit, draw)
    return ids


def shrink_vocabulary(
    model: nn.Module, texts: Iterable[str], keep: Sequence[str] = (), column: str | None = None
) -> list[int]:
    """Leave out the tokens that some texts do not need: these texts are read as before, others in smaller pieces.

    Kept are the tokens of the texts, all that these are merged from, single bytes or letters, added tokens, and those that a
    task begins with or suppresses. Ids are counted anew.

    Args:
        model: as in `grow_vocabulary`; its vocabulary is of byte pairs or WordPiece.
        texts: what the model is to read, as many as tell its words.
        keep: further tokens to keep.
        column: as in `grow_vocabulary`.

    Returns:
        The old id of every new one.

    Raises:
        InputError: another kind of vocabulary, or a token to keep that is not there.
    """
    front = find_front(model, TextTokenizer, column)
    data = json.loads(front._rust.to_str())
    vocab = data["model"].get("vocab")
    if data["model"]["type"] not in ("BPE", "WordPiece"):
        raise InputError(
            f"a {data['model']['type']} vocabulary cannot be shrunk; byte pairs and WordPiece can"
        )
    absent = [t for t in keep if t not in vocab]
    if absent:
        raise InputError(f"tokens to keep that are not in the vocabulary: {absent[:5]}")
    texts = [texts] if isinstance(texts, str) else list(texts)
    rows = front.encode_batch(texts, context=1 << 62) if texts else []
    needed = {front._rust.id_to_token(i) for i in {i for row in rows for i in row}} | set(keep)
    needed |= {t["content"] for t in data["added_tokens"]}
    held = {i for owner in owners(model, front) for ids in _held(owner, front).values() for i in ids}
    needed |= {front._rust.id_to_token(i) for i in held | {front.pad_id} if type(i) is int}
    if (unknown := data["model"].get("unk_token")) is not None:
        needed.add(unknown)
    if data["model"]["type"] == "BPE":
        merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in data["model"]["merges"]]
        needed = _merged_from(needed, vocab, merges, data["model"])
        kept = [m for m in merges if {*m, _joined(m, data["model"])} <= needed]
        data["model"]["merges"] = [list(m) for m in kept]
    else:
        prefix = data["model"]["continuing_subword_prefix"]
        needed |= {t for t in vocab if len(t.removeprefix(prefix)) == 1}
    everything = vocab | {t["content"]: t["id"] for t in data["added_tokens"]}
    old_ids = sorted(everything[t] for t in needed)
    new_id = {old: new for new, old in enumerate(old_ids)}
    data["model"]["vocab"] = {t: new_id[i] for t, i in vocab.items() if i in new_id}
    for t in data["added_tokens"]:
        t["id"] = new_id[t["id"]]
    data["post_processor"] = _renumbered(data["post_processor"], new_id)
    rust = tokenizers.Tokenizer.from_str(json.dumps(data))
    old, size = front.vocab_size, len(old_ids)

    def fit(name: str, value: Tensor, start: Tensor) -> Tensor:
        if len(value) != old or len(start) != size:
            raise InputError(f"{name} is {tuple(value.shape)}: expected a table of {old} tokens")
        return value[old_ids]

    _speak(model, front, rust, size, fit, None, new_id)
    return old_ids


def resize_context(
    model: nn.Module, context: int, how: str = "stretch", keep: int = 0, column: str | None = None
) -> nn.Module:
    """Let a model read longer (or shorter) texts.

    Learned positions become a table of `context` rows. A trunk that turns by positions (RoPE) has no table; only the
    limit changes.

    Args:
        model: a task, an `Encoder` or a `TextTokenizer`; changed in place, before an optimizer is made.
        context: the most ids that a text may have.
        how: ``"stretch"``: rows between the old ones, linear, the first and the last staying what they are; ``"new"``: the
            old rows stay, those behind them are drawn with the old rows' mean and covariance.
        keep: with ``"stretch"``, the first so many rows stay and those behind are stretched; Long-CLIP (Zhang et al. 2024)
            keeps 20 of CLIP's 77, since few texts of its training were longer.
        column: the front-end's, where the model has several of text.

    Returns:
        The model.

    Raises:
        InputError: a setting is out of its range.
    """
    front = find_front(model, TextTokenizer, column)
    if how not in ("stretch", "new"):
        raise InputError(f"how is {how!r}, expected 'stretch' or 'new'")
    if type(context) is not int or context < 1 or not 0 <= keep < min(context, front.context or context):
        raise InputError(
            f"context={context!r} and keep={keep}, expected whole numbers, keep below both contexts"
        )
    before, tensors = front.context, {}
    changes: dict[str, Any] = {"vocabulary": front._rust, "context": context}
    if front.position is not None:
        table = front.position.detach()  # (places, D); a BERT's may have more places than its context
        if how == "new":
            size = max(len(table), context) if "places" in front._args else context
            g = torch.Generator().manual_seed(0)
            more = _like(table.double(), max(0, size - len(table)), 1.0, g).to(table)
            tensors["position"] = torch.cat([table[:size], more])
        else:
            rest = table[keep:before].float().T[None]
            rest = nn.functional.interpolate(rest, size=context - keep, mode="linear", align_corners=True)
            tensors["position"] = torch.cat([table[:keep], rest[0].T.to(table)])
        if "places" in front._args:
            changes["places"] = len(tensors["position"])
    remake(front, changes, tensors)
    for owner in owners(model, front):
        if "context" in owner._args:
            same = owner._args["context"] == before
            remake(owner, {"context": context} if same else {})
    return model


# ---- inside --------------------------------------------------------------------------------------------------


def _speak(
    model: nn.Module,
    front: TextTokenizer,
    rust: tokenizers.Tokenizer,
    size: int,
    fit: Any,
    draw: Any,
    new_id: Mapping[int, int] | None = None,
) -> None:
    """Give the front-end its new vocabulary, and what is built on it as many rows."""
    before = front.vocab_size
    changes: dict[str, Any] = {"vocabulary": rust}
    if "rows" in front._args:
        changes["rows"] = size
    remake(front, changes, fit=fit)
    if draw is not None:
        with torch.no_grad():
            front.embedding.weight.copy_(draw(front.embedding.weight.detach()))
    for owner in owners(model, front):
        if getattr(owner, "front", None) is not front:  # it reads the words and writes none
            continue
        held = _held(owner, front)
        if new_id is not None:
            held = {k: [new_id.get(i, i) for i in ids] for k, ids in held.items()}
        spoken = _spoken(owner, before)
        remake(owner, held, fit=fit)
        if draw is not None:
            with torch.no_grad():
                for name in spoken:
                    value = owner.get_parameter(name)
                    value.copy_(draw(value.detach()))


def _held(owner: Part, front: TextTokenizer) -> dict[str, list[int]]:
    """The ids of this front-end that a task's arguments hold."""
    if getattr(owner, "front", None) is not front:
        return {}
    args = owner.config_args()
    return {k: list(args[k]) for k in HELD_IDS if args.get(k)}


def _spoken(owner: Part, size: int) -> list[str]:
    """Names of a task's own weights with a row for each token: an untied head, a tied head's bias."""
    found = []
    if isinstance(head := getattr(owner, "head", None), nn.Linear) and hasattr(owner, "head_weight"):
        found = [f"head.{n}" for n, p in head.named_parameters() if len(p) == size]
    bias = owner._parameters.get("bias")
    return found + ["bias"] * (bias is not None and hasattr(owner, "head_weight") and len(bias) == size)


def _like(rows: Tensor, count: int, spread: float, g: torch.Generator) -> Tensor:
    """So many new rows with mean and covariance of the given ones.

    A sum of all deviations from the mean, each times an independent normal number over sqrt(rows - 1), has the rows' own
    covariance: no matrix need be factored.
    """
    mean = rows.mean(0)
    away, n = rows - mean, max(1, len(rows) - 1)
    made = [mean.expand(0, *mean.shape)]
    for at in range(0, count, CHUNK):
        mix = torch.randn(min(CHUNK, count - at), len(rows), generator=g, dtype=torch.float64).to(rows.device)
        made.append(mean + spread * n**-0.5 * (mix @ away))
    return torch.cat(made)


def _joined(merge: tuple[str, str], model: Mapping[str, Any]) -> str:
    prefix = model.get("continuing_subword_prefix") or ""
    return merge[0] + merge[1].removeprefix(prefix)


def _merged_from(
    needed: set[str], vocab: Mapping[str, int], merges: list[tuple[str, str]], model: Mapping[str, Any]
) -> set[str]:
    """Tokens and all that byte-pair encoding goes through on its way to them, with every single letter."""
    if model.get("continuing_subword_prefix"):
        raise InputError("byte pairs with a prefix for what continues a word cannot be shrunk")
    rank = {m: i for i, m in enumerate(merges)}
    made = {_joined(m, model) for m in merges}
    out = needed | {t for t in vocab if t not in made}
    suffix = model.get("end_of_word_suffix") or ""
    for token in needed & made:
        body = token.removesuffix(suffix) if suffix else token
        parts = list(body)
        if suffix and token.endswith(suffix) and parts:
            parts[-1] += suffix
        while len(parts) > 1:
            pairs = [(rank.get(p, len(rank)), i) for i, p in enumerate(pairwise(parts))]
            best, i = min(pairs)
            if best == len(rank):
                break
            parts[i : i + 2] = [_joined((parts[i], parts[i + 1]), model)]
            out.add(parts[i])
    return out


def _renumbered(value: Any, new_id: Mapping[int, int]) -> Any:
    """A post-processor with new ids: lists under ``ids``, and pairs of token and id."""
    if isinstance(value, dict):
        return {k: [new_id[i] for i in v] if k == "ids" else _renumbered(v, new_id) for k, v in value.items()}
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
        return [value[0], new_id[value[1]]]
    if isinstance(value, list):
        return [_renumbered(v, new_id) for v in value]
    return value
