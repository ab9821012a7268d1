"""Metrics of generated text against references: BLEU, chrF, word error rate (WER), exact match.

BLEU (Papineni et al. 2002) and chrF (Popović 2015) come from sacrebleu, the word error rate from jiwer, so values are
comparable with published ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from worldtokens.errors import InputError

SCORES = {"bleu": True, "chrf": True, "wer": False, "exact": True}  # name -> higher is better
INSTALL_HINT = "pip install 'worldtokens[metrics]'"


def text_scores(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Corpus-level metrics of generated texts.

    Args:
        answers: B generated texts.
        references: one or more correct texts for each answer.

    Returns:
        ``bleu`` and ``chrf`` (0 to 100, over all references), ``wer`` (word errors per word of the closest reference,
        0 or more) and ``exact`` (share of answers equal to a reference, ignoring case and white space).

    Raises:
        InputError: sacrebleu or jiwer is not installed, or the numbers of answers and references differ.
    """
    if len(answers) != len(references) or not answers or not all(references):
        raise InputError(
            f"{len(answers)} answers and {len(references)} lists of references: expected equal numbers, and one or more "
            "references each"
        )
    try:
        import sacrebleu
    except ImportError as e:
        raise InputError(f"BLEU and chrF need sacrebleu, which is not installed: {INSTALL_HINT}") from e
    most = max(map(len, references))
    columns = [[r[i] if i < len(r) else None for r in references] for i in range(most)]
    return {
        "bleu": sacrebleu.corpus_bleu(list(answers), columns).score,
        "chrf": sacrebleu.corpus_chrf(list(answers), columns).score,
        "wer": word_error_rate(answers, references),
        "exact": exact_share(answers, references),
    }


def word_error_rate(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Substitutions, deletions and insertions of all answers, per word of their closest references.

    Raises:
        InputError: jiwer is not installed.
    """
    try:
        import jiwer
    except ImportError as e:
        raise InputError(f"the word error rate needs jiwer, which is not installed: {INSTALL_HINT}") from e
    errors = words = 0
    for answer, texts in zip(answers, references, strict=True):
        counted = []
        for text in texts:
            n = len(text.split())
            if n:
                counts = jiwer.process_words(text, answer)
                counted.append((counts.substitutions + counts.deletions + counts.insertions, n))
            else:  # jiwer rejects an empty reference: every word of the answer is an insertion
                counted.append((len(answer.split()), 0))
        best = min(counted, key=lambda c: (c[0] / max(1, c[1]), c[0]))
        errors, words = errors + best[0], words + best[1]
    return errors / max(1, words)


def exact_share(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Share of answers equal to one of their references, ignoring case and white space."""

    def plain(text: str) -> str:
        return " ".join(text.casefold().split())

    hits = [plain(a) in {plain(r) for r in texts} for a, texts in zip(answers, references, strict=True)]
    return sum(hits) / max(1, len(hits))
