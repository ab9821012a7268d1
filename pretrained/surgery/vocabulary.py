"""A larger or smaller vocabulary for a trained model: the token embedding, the output head and stored token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import tokenizers
import torch
from tokenizers import AddedToken
from torch import Tensor, nn

from worldtokens.errors import InputError
from worldtokens.parts import Part
from worldtokens.pretrained.surgery.replace import find_front, owners, rebuild
from worldtokens.tokenizers.text.tokenizer import TextTokenizer

CHUNK = 4096  # new rows sampled at a time
TOKEN_ID_ARGS = (
    "prefix",
    "suppress",
    "suppress_first",
)  # arguments of text-generating tasks: lists of token ids


def grow_vocabulary(
    model: nn.Module,
    tokens: Sequence[str],
    special: bool = False,
    column: str | None = None,
    spread: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Add tokens to a text model; ids and embeddings of the old tokens stay.

    New rows of the embedding are sampled with mean and covariance of the old rows (Hewitt 2021), and so are those of an
    untied head; a tied head is the embedding.

    Args:
        model: a task, an `Encoder` or a `TextTokenizer`; changed in place, before an optimizer is made.
        tokens: new tokens; each is one token wherever it occurs in a text.
        special: control tokens, which text is never encoded to, unless ``special=True`` is given to `read`.
        column: name of the text front-end, needed if there are several.
        spread: standard deviation of new rows relative to the old ones; 0: all new rows are the mean.
        seed: of the random numbers.

    Returns:
        The new tokens' ids.

    Raises:
        InputError: a token exists already, is empty, or is given twice.
    """
    front = find_front(model, TextTokenizer, column)
    tokens = [tokens] if isinstance(tokens, str) else list(tokens)
    known = front.backend.get_vocab()
    invalid = [t for i, t in enumerate(tokens) if not t or t in known or t in tokens[:i]]
    if invalid or not tokens:
        raise InputError(
            f"new tokens {invalid[:5] or tokens} are in the vocabulary already, empty, or named twice"
        )
    rust = tokenizers.Tokenizer.from_str(front.backend.to_str())
    rust.add_tokens([AddedToken(t, normalized=False, special=special) for t in tokens])
    ids = [cast(int, rust.token_to_id(t)) for t in tokens]  # not None: they were just added
    old = front.vocab_size
    g = torch.Generator().manual_seed(seed)
    # a published embedding may have rows beyond the vocabulary that were never trained
    used = max(known.values()) + 1
    size = max(max(ids) + 1, old)

    def fit(name: str, value: Tensor, initial: Tensor) -> Tensor:
        if len(value) != old or len(initial) != size or value.shape[1:] != initial.shape[1:]:
            raise InputError(f"{name} is {tuple(value.shape)}: expected a table of {old} tokens")
        return torch.cat([value, initial[: size - old]])

    def sample(value: Tensor) -> Tensor:
        """Sample the new rows from the statistics of the used rows."""
        value = value.clone()
        value[ids] = sample_rows(value[:used].double(), len(ids), spread, g).to(value)
        return value

    _apply_vocabulary(model, front, rust, size, fit, sample)
    return ids


def shrink_vocabulary(
    model: nn.Module, texts: Iterable[str], keep: Sequence[str] = (), column: str | None = None
) -> list[int]:
    """Remove the tokens that given texts do not use: these texts are tokenized as before, others into smaller tokens.

    Kept are the tokens of the texts, the tokens that these are merged from, single bytes or letters, added tokens, and those
    in a task's prefix or suppressed ids. Ids are renumbered.

    Args:
        model: as in `grow_vocabulary`; its vocabulary is BPE or WordPiece.
        texts: examples of the texts that the model is used for.
        keep: further tokens to keep.
        column: as in `grow_vocabulary`.

    Returns:
        The old id of each new id.

    Raises:
        InputError: another kind of vocabulary, or a token in `keep` that it does not have.
    """
    front = find_front(model, TextTokenizer, column)
    data = json.loads(front.backend.to_str())
    vocab = data["model"].get("vocab")
    if data["model"]["type"] not in ("BPE", "WordPiece"):
        raise InputError(f"a {data['model']['type']} vocabulary cannot be shrunk; BPE and WordPiece can")
    missing = [t for t in keep if t not in vocab]
    if missing:
        raise InputError(f"tokens to keep that are not in the vocabulary: {missing[:5]}")
    texts = [texts] if isinstance(texts, str) else list(texts)
    rows = front.encode_batch(texts, context=1 << 62) if texts else []

    def strings(ids: Iterable[int]) -> set[str]:
        # not None: the vocabulary holds every id
        return {cast(str, front.backend.id_to_token(i)) for i in ids}

    needed = strings({i for row in rows for i in row}) | set(keep)
    needed |= {t["content"] for t in data["added_tokens"]}
    stored = {i for owner in owners(model, front) for ids in _token_ids(owner, front).values() for i in ids}
    needed |= strings(i for i in stored | {front.pad_id} if type(i) is int)
    if (unknown := data["model"].get("unk_token")) is not None:
        needed.add(unknown)
    if data["model"]["type"] == "BPE":
        merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in data["model"]["merges"]]
        needed = _merged_from(needed, vocab, merges, data["model"])
        kept = [m for m in merges if {*m, _merge_result(m, data["model"])} <= needed]
        data["model"]["merges"] = [list(m) for m in kept]
    else:
        prefix = data["model"]["continuing_subword_prefix"]
        needed |= {t for t in vocab if len(t.removeprefix(prefix)) == 1}
    all_tokens = vocab | {t["content"]: t["id"] for t in data["added_tokens"]}
    old_ids = sorted(all_tokens[t] for t in needed)
    new_id = {old: new for new, old in enumerate(old_ids)}
    data["model"]["vocab"] = {t: new_id[i] for t, i in vocab.items() if i in new_id}
    for t in data["added_tokens"]:
        t["id"] = new_id[t["id"]]
    data["post_processor"] = _renumbered(data["post_processor"], new_id)
    rust = tokenizers.Tokenizer.from_str(json.dumps(data))
    old, size = front.vocab_size, len(old_ids)

    def fit(name: str, value: Tensor, initial: Tensor) -> Tensor:
        if len(value) != old or len(initial) != size:
            raise InputError(f"{name} is {tuple(value.shape)}: expected a table of {old} tokens")
        return value[old_ids]

    _apply_vocabulary(model, front, rust, size, fit, None, new_id)
    return old_ids


# ---- helpers -------------------------------------------------------------------------------------------------


def _apply_vocabulary(
    model: nn.Module,
    front: TextTokenizer,
    rust: tokenizers.Tokenizer,
    size: int,
    fit: Any,
    sample: Any,
    new_id: Mapping[int, int] | None = None,
) -> None:
    """Rebuild the front-end with a new vocabulary, and the tasks with as many rows and renumbered token ids."""
    before = front.vocab_size
    changes: dict[str, Any] = {"vocabulary": rust}
    if "num_embeddings" in front._args:
        changes["num_embeddings"] = size
    rebuild(front, changes, fit=fit)
    if sample is not None:
        with torch.no_grad():
            front.embedding.weight.copy_(sample(front.embedding.weight.detach()))
    for owner in owners(model, front):
        if getattr(owner, "front", None) is not front:  # a text input without output tokens
            continue
        stored = _token_ids(owner, front)
        if new_id is not None:
            stored = {k: [new_id.get(i, i) for i in ids] for k, ids in stored.items()}
        names = _vocabulary_weights(owner, before)
        rebuild(owner, stored, fit=fit)
        if sample is not None:
            with torch.no_grad():
                for name in names:
                    value = owner.get_parameter(name)
                    value.copy_(sample(value.detach()))


def _token_ids(owner: Part, front: TextTokenizer) -> dict[str, list[int]]:
    """Token ids of this front-end in a task's arguments."""
    if getattr(owner, "front", None) is not front:
        return {}
    args = owner.config_args()
    return {k: list(args[k]) for k in TOKEN_ID_ARGS if args.get(k)}


def _vocabulary_weights(owner: Part, size: int) -> list[str]:
    """Names of a task's weights with a row per token: an untied head, the bias of a tied head."""
    names = []
    if isinstance(head := getattr(owner, "head", None), nn.Linear) and hasattr(owner, "head_weight"):
        names = [f"head.{n}" for n, p in head.named_parameters() if len(p) == size]
    bias = owner._parameters.get("bias")
    return names + ["bias"] * (bias is not None and hasattr(owner, "head_weight") and len(bias) == size)


def sample_rows(rows: Tensor, count: int, spread: float, g: torch.Generator) -> Tensor:
    """Sample rows with mean and covariance of the given ones.

    A sum of all deviations from the mean, each times a normal number over sqrt(rows - 1), has the covariance of the
    rows: no matrix is factored.
    """
    mean = rows.mean(0)
    deviations, n = rows - mean, max(1, len(rows) - 1)
    out = [mean.expand(0, *mean.shape)]
    for start in range(0, count, CHUNK):
        mix = torch.randn(min(CHUNK, count - start), len(rows), generator=g, dtype=torch.float64).to(
            rows.device
        )
        out.append(mean + spread * n**-0.5 * (mix @ deviations))
    return torch.cat(out)


def _merge_result(merge: tuple[str, str], model: Mapping[str, Any]) -> str:
    prefix = model.get("continuing_subword_prefix") or ""
    return merge[0] + merge[1].removeprefix(prefix)


def _merged_from(
    needed: set[str], vocab: Mapping[str, int], merges: list[tuple[str, str]], model: Mapping[str, Any]
) -> set[str]:
    """The tokens, all intermediate tokens of their merges, and all single letters."""
    if model.get("continuing_subword_prefix"):
        raise InputError("BPE with a continuing_subword_prefix cannot be shrunk")
    rank = {m: i for i, m in enumerate(merges)}
    merged = {_merge_result(m, model) for m in merges}
    out = needed | {t for t in vocab if t not in merged}
    suffix = model.get("end_of_word_suffix") or ""
    for token in needed & merged:
        body = token.removesuffix(suffix) if suffix else token
        parts = list(body)
        if suffix and token.endswith(suffix) and parts:
            parts[-1] += suffix
        while len(parts) > 1:
            pairs = [(rank.get(p, len(rank)), i) for i, p in enumerate(pairwise(parts))]
            best, i = min(pairs)
            if best == len(rank):
                break
            parts[i : i + 2] = [_merge_result((parts[i], parts[i + 1]), model)]
            out.add(parts[i])
    return out


def _renumbered(value: Any, new_id: Mapping[int, int]) -> Any:
    """A post-processor with new ids, found in lists under ``ids`` and in pairs of token and id."""
    if isinstance(value, dict):
        return {k: [new_id[i] for i in v] if k == "ids" else _renumbered(v, new_id) for k, v in value.items()}
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
        return [value[0], new_id[value[1]]]
    if isinstance(value, list):
        return [_renumbered(v, new_id) for v in value]
    return value
