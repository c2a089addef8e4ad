"""Judges claims again on a language model with weights that others trained.

The rule is that of all claims (``lab.claims.rule``). The model drafts for itself, and its answers
about long documents are in ``real.json`` and ``real-8k.json``, which ``python -m lab real`` makes.
A verdict here stands in a column of the claims page beside the embedded pair's and does not change
it. Claims that need a draft model are judged by ``draft_model``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from lab.claims import draft_model, sparse_to_dense, specvlm
from lab.claims.claim import Claim, StoredResults, json_suites
from lab.claims.rule import (
    HIGHER_RATIO,
    MORE,
    SAME,
    Claimed,
    Finding,
    Premise,
    Unit,
    alone,
    paired,
    printed,
)
from lab.claims.rule import judge as judge_by_rule

LONG_FILE = "real-8k.json"
KEEPS = 0.1, 0.25  # Shares of a document's tokens that a draft attends to.
DOCUMENTS = "documents"
# Names of sets of a document's tokens (``lab.real.attention_sets``): who chooses them, and by the
# attention at which time. "Now" is the step that is measured, so no draft can know it.
SHARED_SET = "shared by all heads, at prefill"
STATIC_SET = "std: each head's top at prefill"
CURRENT_SET = "oracle: each head's top now"
WINDOW_SET = "streaming: sinks and the last"
AGREEMENT_GAIN = Unit("share of next tokens that stay", "difference")
RATE = Unit("accepted share of drafted tokens", "difference")
SPEED = Unit("speed of decoding, ratio", "ratio", is_time=True)
SECONDS_BY_KEYS = Unit("seconds over keys read, ratio", "ratio", is_time=True)
Row = Mapping[str, Any]
Judge = Callable[[StoredResults], Finding]


def _rows(results: StoredResults, kind: str, file: str | None = None) -> Sequence[Row]:
    rows: Sequence[Row] = results.rows(file or results.self_draft_file, kind, "real --out")
    return rows


def _values(
    results: StoredResults, method: str, value: Callable[[Row], float], file: str | None = None
) -> dict[Hashable, float]:
    """Returns ``value`` of a method's answer about each document, by the document's name."""
    rows = _rows(results, "measured", file)
    return {row["document"]: value(row) for row in rows if row["method"] == method}


def _of_sets(results: StoredResults, chosen: str, what: str, keep: float) -> dict[Hashable, float]:
    """Returns one number of the set that ``chosen`` names, by document.

    ``what`` is "mass", the share of the attention that the set gets, or "agrees", the share of next
    tokens that stay the same when only the set is seen. The set has the share ``keep`` of the
    document's tokens.
    """
    rows = _rows(results, "looked")
    return {
        row["document"]: row[what] for row in rows if (row["chosen"], row["keep"]) == (chosen, keep)
    }


def judge_long_tail(results: StoredResults) -> Finding:
    masses = [*_of_sets(results, "oracle, shared by all heads", "mass", keep=0.1).values()]
    suites = json_suites(results, results.self_draft_file, specvlm.MASS, len(masses), (), DOCUMENTS)
    comparison = alone("the top tenth", DOCUMENTS, specvlm.MASS, masses)
    return judge_by_rule(suites, specvlm.MASS, printed(0.5, compared_by="value"), [comparison])


def judge_windows(results: StoredResults) -> Finding:
    comparisons = [
        paired(
            f"at {keep:g}",
            DOCUMENTS,
            AGREEMENT_GAIN,
            *(_of_sets(results, chosen, "agrees", keep) for chosen in (SHARED_SET, WINDOW_SET)),
        )
        for keep in KEEPS
    ]
    suites = json_suites(
        results, results.self_draft_file, AGREEMENT_GAIN, comparisons[0].items, (), DOCUMENTS
    )
    return judge_by_rule(suites, AGREEMENT_GAIN, MORE, comparisons)


def judge_agreement(results: StoredResults) -> Finding:
    unit = sparse_to_dense.AGREEMENT
    comparisons = [
        alone(
            f"{when}, {keep:g} kept",
            DOCUMENTS,
            unit,
            [*_of_sets(results, chosen, "agrees", keep).values()],
        )
        for when, chosen in (("chosen now", CURRENT_SET), ("at prefill", STATIC_SET))
        for keep in KEEPS
    ]
    suites = json_suites(
        results, results.self_draft_file, unit, comparisons[0].items, (), DOCUMENTS
    )
    # The paper's 95 % are for one K that it does not name, so no run here can test them.
    premise = Premise("a K, which the paper does not name", is_met=False)
    return judge_by_rule(suites, unit, printed(0.95, 1.01, "value"), comparisons, premise)


def judge_acceptance(results: StoredResults) -> Finding:
    return _judge_std_against_streaming(results, RATE, MORE, lambda row: row["accepted"])


def judge_fastest(results: StoredResults) -> Finding:
    return _judge_std_against_streaming(results, SPEED, HIGHER_RATIO, decoding_speed)


def _judge_std_against_streaming(
    results: StoredResults, unit: Unit, claimed: Claimed, value: Callable[[Row], float]
) -> Finding:
    comparisons = [
        paired(
            f"{keep:g} kept",
            DOCUMENTS,
            unit,
            *(_values(results, f"{name}/keep={keep}", value) for name in ("std", "streaming")),
        )
        for keep in KEEPS
    ]
    suites = json_suites(
        results, results.self_draft_file, unit, comparisons[0].items, (), DOCUMENTS
    )
    return judge_by_rule(suites, unit, claimed, comparisons, not_run="LayerSkip")


def decoding_speed(row: Row) -> float:
    """Returns tokens per second of decoding."""
    return (row["tokens"] - 1) / row["decode_seconds"]


def judge_fewer_keys(results: StoredResults) -> Finding:
    """Judges Sec. 3.3's condition on documents: alpha > (K + m_t) / (m_v + m_t) + 1 / gamma.

    K, "kept", is the number of the document's tokens that the draft attends to. The document has
    m_v tokens, and the text beside it has m_t. Gamma is an answer's mean number of drafted tokens
    in a round, which is below the setting where drafts end early.
    """
    unit = sparse_to_dense.KEYS

    def margin(row: Row, keep: float) -> float:
        share_of_keys = _draft_step_keys(row, keep) / row["prompt_tokens"]
        return float(row["accepted"] - share_of_keys - 1 / row["drafted"])

    comparisons = [
        alone(
            f"{keep:g} kept",
            DOCUMENTS,
            unit,
            [*_values(results, f"std/keep={keep}", partial(margin, keep=keep)).values()],
        )
        for keep in KEEPS
    ]
    suites = json_suites(
        results, results.self_draft_file, unit, comparisons[0].items, (), DOCUMENTS
    )
    return judge_by_rule(suites, unit, MORE, comparisons)


def judge_speedup(results: StoredResults) -> Finding:
    comparisons = [
        paired(
            f"{keep:g} kept",
            DOCUMENTS,
            SPEED,
            *(
                _values(results, name, decoding_speed, LONG_FILE)
                for name in (f"std/keep={keep}", "ar")
            ),
        )
        for keep in KEEPS
    ]
    suites = json_suites(results, LONG_FILE, SPEED, comparisons[0].items, (), DOCUMENTS)
    return judge_by_rule(suites, SPEED, printed(1.59), comparisons)


def judge_time_by_keys(results: StoredResults) -> Finding:
    plain = _values(results, "ar", decoding_speed)
    comparisons = []
    for keep in KEEPS:
        method = f"std/keep={keep}"
        speeds = _values(results, method, decoding_speed)
        key_ratios = _values(results, method, lambda row, keep=keep: _keys_read(row, keep))
        time_ratios = {document: plain[document] / speeds[document] for document in speeds}
        comparisons.append(
            paired(f"{keep:g} kept", DOCUMENTS, SECONDS_BY_KEYS, time_ratios, key_ratios)
        )
    suites = json_suites(
        results, results.self_draft_file, SECONDS_BY_KEYS, comparisons[0].items, (), DOCUMENTS
    )
    return judge_by_rule(suites, SECONDS_BY_KEYS, SAME, comparisons)


def _keys_read(row: Row, keep: float) -> float:
    """Returns the keys that an answer's steps read, as a share of plain decoding's.

    In a round, each drafted token reads the keys that the draft sees, and the verification reads
    those of the whole prompt. Plain decoding reads the whole prompt for each of the tau tokens that
    a round emits.
    """
    prompt_tokens = row["prompt_tokens"]
    round_keys = row["drafted"] * _draft_step_keys(row, keep) + prompt_tokens
    return float(round_keys / (row["tau"] * prompt_tokens))


def _draft_step_keys(row: Row, keep: float) -> float:
    """Returns the keys of the prompt that a draft's step reads: K of the document, and all text.

    The rows have the tokens of the document and of the text together. Those of the document follow
    from the share of them that is kept, up to the rounding of K: they are K / ``keep``.
    """
    return float(row["prompt_tokens"] - row["kept"] * (1 / keep - 1))


# The function that judges a claim on the embedded pair -> the one that judges it over documents.
JUDGES: Mapping[Judge, Judge] = {
    specvlm.judge_long_tail: judge_long_tail,
    specvlm.judge_windows: judge_windows,
    sparse_to_dense.judge_agreement: judge_agreement,
    sparse_to_dense.judge_acceptance: judge_acceptance,
    sparse_to_dense.judge_fewer_keys: judge_fewer_keys,
    sparse_to_dense.judge_speedup: judge_speedup,
    sparse_to_dense.judge_fastest: judge_fastest,
    sparse_to_dense.judge_time_by_keys: judge_time_by_keys,
    **draft_model.JUDGES,
}


def cell(claim: Claim, results: StoredResults) -> str:
    """Returns a claim's verdict on this model for the page, or "" if ``JUDGES`` lacks the claim."""
    judge = JUDGES.get(claim.judge)
    return "" if judge is None else cell_text(judge(results))


def cell_text(finding: Finding) -> str:
    """Returns a verdict on real weights, with its numbers unless the run cannot decide."""
    if finding.verdict == "to be run again":
        return f"**{finding.verdict}**"
    return f"**{finding.verdict}** {finding.number} ({finding.items} items)"
