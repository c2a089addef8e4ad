"""Makes the Markdown page of results on real weights, docs/results/real.md.

A language model that others trained answers questions about documents and drafts for itself, over
a share of the document (*keep*). ``python -m lab real`` measures this, and makes the page from
rows: the stored results of one method on one document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.real.attention_sets import SHARES
from saccade.bench.measures import interval
from saccade.inputs import Loaded
from saccade.methods import resolve
from saccade.methods.pages import PAGE, ByPage

Row = Mapping[str, Any]
OURS = "fresh/", "pages/"  # How the names of Saccade's own methods begin.


@dataclass(frozen=True)
class ForwardSizes:
    """The bytes that a forward reads, and what follows from them for a self-draft's speed.

    A self-draft is the target that drafts over the share ``keep`` of its keys. Everywhere here,
    ``drafted`` is the number of its forwards in a round, ``context`` the cached tokens, and ``tau``
    the tokens that a round emits.
    """

    weights: int  # Bytes of all weights.
    token: int  # Bytes of the keys and values of one cached token.

    def round(self, drafted: float, keep: float, context: float) -> float:
        """Returns the bytes that a round reads: in its drafting and in one verification."""
        return drafted * (self.weights + keep * context * self.token) + self.plain(context)

    def plain(self, context: float) -> float:
        """Returns the bytes that one forward over the whole context reads."""
        return self.weights + context * self.token

    def speed(self, tau: float, drafted: float, keep: float, context: float) -> float:
        """Returns a self-draft's speed over plain decoding, if reading bytes takes all the time."""
        return tau * self.plain(context) / self.round(drafted, keep, context)

    def even(self, tau: float, drafted: float, keep: float) -> float | None:
        """Returns the context from which ``speed`` is above 1; None if it never is.

        A round reads the weights ``drafted + 1`` times, and keys of the whole context ``drafted *
        keep + 1`` times. Plain decoding reads both tau times for as many tokens.
        """
        more_weight_reads = drafted + 1 - tau
        fewer_context_reads = tau - (drafted * keep + 1)
        if fewer_context_reads <= 0:
            return None
        return max(0.0, self.weights * more_weight_reads / (self.token * fewer_context_reads))


def forward_sizes(model: Loaded) -> ForwardSizes:
    # By address, so that a weight that two layers share counts once.
    weights = {weight.data_ptr(): weight for weight in model.backbone.model.parameters()}
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
    return ForwardSizes(weight_bytes, model.backbone.token_bytes)


def make_page(facts: Mapping[str, Any]) -> str:
    """Returns the page in Markdown of the facts in :class:`Results`."""
    measured: Sequence[Row] = facts["measured"]
    documents = dict.fromkeys(row["document"] for row in measured)
    lengths = [row["prompt_tokens"] for row in measured]
    same = sum(row["same"] for row in measured)
    first = measured[0]["method"]
    loops = _mean([row["repeated"] for row in measured if row["method"] == first])
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    lines = [
        "# Real weights",
        "",
        f"{facts['model']}: {len(documents)} documents of {min(lengths):,} to {max(lengths):,} "
        f"prompt tokens; {settings}. {facts['machine']}",
        "",
        f"Made by `{facts['command']}`. Of {len(measured)} answers {same} are `generate()`'s, "
        f"token for token. Of an answer's runs of four tokens {loops} stood in it before.",
        "",
        *_drafting_lines(facts),
        *_comparison_lines(measured),
        *_break_even_lines(facts),
        *_attention_lines(facts["looked"]),
    ]
    return "\n".join(lines) + "\n"


def _drafting_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    measured: Sequence[Row] = facts["measured"]
    plain = {row["document"]: row for row in measured if row["method"] == "ar"}
    yield from ("## Drafting", "")
    intro = "tau is tokens emitted a forward of the target, its own included: median and bootstrap "
    intro += "over documents. "
    intro += (
        "Speed is of decoding, against `ar` in the same run."
        if facts["together"] == 1
        else f"{facts['together']} documents shared their forwards, so no speed is told."
    )
    yield from (intro, "", "| method | tau | 95 % | accepted | document kept | speed |")
    yield "|-|-|-|-|-|-|"
    for method in dict.fromkeys(row["method"] for row in measured):
        rows = [row for row in measured if row["method"] == method]
        middle, low, high = interval([row["tau"] for row in rows]) or (0.0, 0.0, 0.0)
        accepted = [row["accepted"] for row in rows if row["accepted"] is not None]
        speeds = [
            plain[row["document"]]["decode_seconds"] / row["decode_seconds"]
            for row in rows
            if row["document"] in plain and row["decode_seconds"] and facts["together"] == 1
        ]
        speed = interval(speeds)
        yield (
            f"| `{method}` | {middle:.2f} | {low:.2f} to {high:.2f} | {_mean(accepted)} | "
            f"{_kept_share(rows)} | {'' if speed is None else f'{speed[0]:.2f}'} |"
        )
    yield ""


def _comparison_lines(measured: Sequence[Row]) -> Iterator[str]:
    """Yields the table that compares our methods with the others at the same share.

    A ratio is of two taus on the same document. `pages` is compared with `fresh`, and the reverse
    comparison is left out.
    """
    fresh, pages = OURS
    tau = {(row["document"], row["method"]): row["tau"] for row in measured if row["tau"]}
    methods = dict.fromkeys(row["method"] for row in measured)
    pairs = [
        (own_method, other)
        for own_method in methods
        for other in methods
        if own_method.startswith(OURS) and own_method != other
        # The share is the last part of a name, as in "std/view=random/keep=0.1".
        if own_method.partition("/")[2] == other.rpartition("/")[2]
        if not (own_method.startswith(fresh) and other.startswith(pages))
    ]
    if not pairs:
        return
    yield from ("## `fresh` and `pages` beside the others", "")
    yield "Its tau over theirs on the same document: median, and bootstrap over documents."
    yield from ("", "| | over | ratio | 95 % |", "|-|-|-|-|")
    for own_method, other in pairs:
        ratios = [
            own_tau / tau[document, other]
            for (document, method), own_tau in tau.items()
            if method == own_method and (document, other) in tau
        ]
        middle, low, high = interval(ratios) or (0.0, 0.0, 0.0)
        yield f"| `{own_method}` | `{other}` | {middle:.2f} | {low:.2f} to {high:.2f} |"
    yield ""


def _break_even_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the section about the contexts from which a self-draft would pay.

    They are computed as if only reading bytes took time. ``keep`` is here the number of the
    document's tokens that a draft reads, as a share of the whole prompt.
    """
    measured: Sequence[Row] = facts["measured"]
    sizes = ForwardSizes(**facts["sizes"])
    longest = max(row["prompt_tokens"] for row in measured)
    plain = {row["document"]: row for row in measured if row["method"] == "ar"}
    yield from ("## From which context on it pays", "")
    yield (
        f"By the bytes that a forward reads: {sizes.weights / 1e6:,.0f} MB of weights and "
        f"{sizes.token / 1e3:.0f} KB a token of context. A round, and its speed against plain "
        f"decoding, are of {longest:,} tokens: by these bytes, and as measured there."
    )
    if costs := facts.get("costs"):
        one = costs["seconds"][0]
        timings = zip(costs["rows"], costs["seconds"], strict=True)
        times = ", ".join(f"{took / one:.2f} ({rows})" for rows, took in timings)
        yield f"T(n)/T(1) of the target over {costs['context']:,} keys, by n: {times}."
    head = "| method | pays from | GB a round | ms a round | speed by bytes | measured |"
    yield from ("", head, "|-|-|-|-|-|-|")
    for method in dict.fromkeys(row["method"] for row in measured):
        rows = [row for row in measured if row["method"] == method and row["kept"]]
        if not rows:
            continue
        keep = sum(row["kept"] / row["prompt_tokens"] for row in rows) / len(rows)
        if isinstance(resolve(method).view, ByPage):
            size = PAGE.value(resolve(method))
            # To choose pages, a step also reads the mean key of each. A token has a key and a
            # value of the same size, so the mean key of a page is half a token's bytes.
            keep += 1 / (2 * size)
        tau, drafted = (sum(row[name] for row in rows) / len(rows) for name in ("tau", "drafted"))
        pays_from = sizes.even(tau, drafted, keep)
        at_longest = [r for r in rows if r["prompt_tokens"] == longest and facts["together"] == 1]
        speeds = [
            plain[row["document"]]["decode_seconds"] / row["decode_seconds"]
            for row in at_longest
            if row["document"] in plain
        ]
        # Tokens after the first one, over tau, is the number of rounds.
        round_ms = [1e3 * r["decode_seconds"] * r["tau"] / (r["tokens"] - 1) for r in at_longest]
        yield (
            f"| `{method}` | {'never' if pays_from is None else f'{pays_from:,.0f} tokens'} | "
            f"{sizes.round(drafted, keep, longest) / 1e9:.1f} | {_mean(round_ms, 0)} | "
            f"{sizes.speed(tau, drafted, keep, longest):.2f} | {_mean(speeds)} |"
        )
    yield ""


def _attention_lines(attention_rows: Sequence[Row]) -> Iterator[str]:
    yield from ("## Where the target looks while it answers", "")
    yield (
        "Of the attention that the document gets at a moment of the answer, the share on a set of "
        "its tokens, by how the set is chosen and how much of the document it holds; mean over "
        "heads, layers, moments and documents. Then how often the target's next token is the same "
        "where it sees that set of the document alone."
    )
    agreement_shares = sorted({row["keep"] for row in attention_rows if row["agrees"] is not None})
    head = [
        *(f"{share:g}" for share in SHARES),
        *(f"same at {share:g}" for share in agreement_shares),
    ]
    yield from ("", "| set | " + " | ".join(head) + " |", "|-|" + "-|" * len(head))
    for chosen in dict.fromkeys(row["chosen"] for row in attention_rows):
        rows = [row for row in attention_rows if row["chosen"] == chosen]
        cells = [
            _mean([row[what] for row in rows if row["keep"] == share and row[what] is not None])
            for what, shares in (("mass", SHARES), ("agrees", agreement_shares))
            for share in shares
        ]
        yield f"| {chosen} | " + " | ".join(cells) + " |"


def _mean(values: Sequence[float], digits: int = 2) -> str:
    """Returns the mean as text, which is empty without values."""
    return f"{sum(values) / len(values):.{digits}f}" if values else ""


def _kept_share(rows: Sequence[Row]) -> str:
    """Returns as text the mean share of the prompt that the kept tokens of the document are."""
    shares = [row["kept"] / row["prompt_tokens"] for row in rows if row["kept"] is not None]
    return f"{sum(shares) / len(shares):.0%}" if shares else ""
