"""The page of what was measured on real weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.bench.measures import interval
from saccade.bench.real.looks import SHARES
from saccade.inputs import Loaded
from saccade.methods import resolve

Row = Mapping[str, Any]
OURS = "fresh/", "pages/"


@dataclass(frozen=True)
class Sizes:
    """What a forward has to read, in bytes: the weights, and a token's keys and values."""

    weights: int
    token: int

    def round(self, drafted: float, keep: float, context: float) -> float:
        """What a round reads that drafts so many tokens over a share of the context."""
        return drafted * (self.weights + keep * context * self.token) + self.plain(context)

    def plain(self, context: float) -> float:
        return self.weights + context * self.token

    def speed(self, tau: float, drafted: float, keep: float, context: float) -> float:
        """Tokens a second of a self-draft against plain decoding, where bytes are all that counts:
        ``drafted`` forwards over a share of the context and one over all of it make tau tokens."""
        return tau * self.plain(context) / self.round(drafted, keep, context)

    def even(self, tau: float, drafted: float, keep: float) -> float | None:
        """The context from which on that is faster than plain decoding; None where none is."""
        lost, won = drafted + 1 - tau, tau - 1 - drafted * keep
        if won <= 0:
            return None
        return max(0.0, self.weights * lost / (self.token * won))


def sizes(model: Loaded) -> Sizes:
    own = {weight.data_ptr(): weight for weight in model.backbone.model.parameters()}
    held = sum(weight.numel() * weight.element_size() for weight in own.values())
    return Sizes(held, model.backbone.token_bytes)


def page(found: Mapping[str, Any]) -> str:
    """Markdown from what :class:`Results` keeps."""
    measured: Sequence[Row] = found["measured"]
    documents = dict.fromkeys(row["document"] for row in measured)
    lengths = [row["prompt_tokens"] for row in measured]
    same = sum(row["same"] for row in measured)
    first = measured[0]["method"]
    loops = _mean([row["repeated"] for row in measured if row["method"] == first])
    told = ", ".join(f"{name}={value}" for name, value in found["settings"].items())
    lines = [
        "# Real weights",
        "",
        f"{found['model']}: {len(documents)} documents of {min(lengths):,} to {max(lengths):,} "
        f"prompt tokens; {told}. {found['machine']}",
        "",
        f"Made by `{found['command']}`. Of {len(measured)} answers {same} are `generate()`'s, "
        f"token for token. Of an answer's runs of four tokens {loops} stood in it before.",
        "",
        *_drafting(found),
        *_beside(measured),
        *_even(found),
        *_sets(found["looked"]),
    ]
    return "\n".join(lines) + "\n"


def _drafting(found: Mapping[str, Any]) -> Iterator[str]:
    measured: Sequence[Row] = found["measured"]
    plain = {row["document"]: row for row in measured if row["method"] == "ar"}
    yield from ("## Drafting", "")
    told = "tau is tokens emitted a forward of the target, its own included: median and bootstrap "
    told += "over documents. "
    told += (
        "Speed is of decoding, against `ar` in the same run."
        if found["together"] == 1
        else f"{found['together']} documents shared their forwards, so no speed is told."
    )
    yield from (told, "", "| method | tau | 95 % | accepted | document kept | speed |")
    yield "|-|-|-|-|-|-|"
    for method in dict.fromkeys(row["method"] for row in measured):
        own = [row for row in measured if row["method"] == method]
        middle, low, high = interval([row["tau"] for row in own]) or (0.0, 0.0, 0.0)
        accepted = [row["accepted"] for row in own if row["accepted"] is not None]
        speeds = [
            plain[row["document"]]["decode_seconds"] / row["decode_seconds"]
            for row in own
            if row["document"] in plain and row["decode_seconds"] and found["together"] == 1
        ]
        speed = interval(speeds)
        yield (
            f"| `{method}` | {middle:.2f} | {low:.2f} to {high:.2f} | {_mean(accepted)} | "
            f"{_kept(own)} | {'' if speed is None else f'{speed[0]:.2f}'} |"
        )
    yield ""


def _beside(measured: Sequence[Row]) -> Iterator[str]:
    """How much farther our own get than the others at the same share, document by document."""
    tau = {(row["document"], row["method"]): row["tau"] for row in measured if row["tau"]}
    methods = dict.fromkeys(row["method"] for row in measured)
    pairs = [
        (ours, other)
        for ours in methods
        for other in methods
        if ours.startswith(OURS) and ours.partition("/")[2] == other.rpartition("/")[2]
        if ours != other and not (ours.startswith(OURS[0]) and other.startswith(OURS[1]))
    ]
    if not pairs:
        return
    yield from ("## `fresh` and `pages` beside the others", "")
    yield "Its tau over theirs on the same document: median, and bootstrap over documents."
    yield from ("", "| | over | ratio | 95 % |", "|-|-|-|-|")
    for ours, other in pairs:
        ratios = [
            mine / tau[document, other]
            for (document, method), mine in tau.items()
            if method == ours and (document, other) in tau
        ]
        middle, low, high = interval(ratios) or (0.0, 0.0, 0.0)
        yield f"| `{ours}` | `{other}` | {middle:.2f} | {low:.2f} to {high:.2f} |"
    yield ""


def _even(found: Mapping[str, Any]) -> Iterator[str]:
    """From which context on a self-draft would pay, were reading bytes all that costs."""
    measured: Sequence[Row] = found["measured"]
    sizes = Sizes(**found["sizes"])
    longest = max(row["prompt_tokens"] for row in measured)
    plain = {row["document"]: row for row in measured if row["method"] == "ar"}
    yield from ("## From which context on it pays", "")
    yield (
        f"By the bytes that a forward reads: {sizes.weights / 1e6:,.0f} MB of weights and "
        f"{sizes.token / 1e3:.0f} KB a token of context. A round, and its speed against plain "
        f"decoding, are of {longest:,} tokens: by these bytes, and as measured there."
    )
    if costs := found.get("costs"):
        one = costs["seconds"][0]
        each = zip(costs["rows"], costs["seconds"], strict=True)
        times = ", ".join(f"{took / one:.2f} ({rows})" for rows, took in each)
        yield f"T(n)/T(1) of the target over {costs['context']:,} keys, by n: {times}."
    head = "| method | pays from | GB a round | ms a round | speed by bytes | measured |"
    yield from ("", head, "|-|-|-|-|-|-|")
    for method in dict.fromkeys(row["method"] for row in measured):
        own = [row for row in measured if row["method"] == method and row["kept"]]
        if not own:
            continue
        keep = sum(row["kept"] / row["prompt_tokens"] for row in own) / len(own)
        if size := resolve(method).view.page:
            keep += 1 / (2 * size)  # of every page the mean key
        tau, drafted = (sum(row[name] for row in own) / len(own) for name in ("tau", "drafted"))
        from_here = sizes.even(tau, drafted, keep)
        there = [r for r in own if r["prompt_tokens"] == longest and found["together"] == 1]
        speeds = [
            plain[row["document"]]["decode_seconds"] / row["decode_seconds"]
            for row in there
            if row["document"] in plain
        ]
        rounds = [1e3 * r["decode_seconds"] * r["tau"] / (r["tokens"] - 1) for r in there]
        yield (
            f"| `{method}` | {'never' if from_here is None else f'{from_here:,.0f} tokens'} | "
            f"{sizes.round(drafted, keep, longest) / 1e9:.1f} | {_mean(rounds, 0)} | "
            f"{sizes.speed(tau, drafted, keep, longest):.2f} | {_mean(speeds)} |"
        )
    yield ""


def _sets(looked: Sequence[Row]) -> Iterator[str]:
    yield from ("## Where the target looks while it answers", "")
    yield (
        "Of the attention that the document gets at a moment of the answer, the share on a set of "
        "its tokens, by how the set is chosen and how much of the document it holds; mean over "
        "heads, layers, moments and documents. Then how often the target's next token is the same "
        "where it sees that set of the document alone."
    )
    asked = sorted({row["keep"] for row in looked if row["agrees"] is not None})
    head = [*(f"{share:g}" for share in SHARES), *(f"same at {share:g}" for share in asked)]
    yield from ("", "| set | " + " | ".join(head) + " |", "|-|" + "-|" * len(head))
    for chosen in dict.fromkeys(row["chosen"] for row in looked):
        own = [row for row in looked if row["chosen"] == chosen]
        cells = [
            _mean([row[what] for row in own if row["keep"] == share and row[what] is not None])
            for what, shares in (("mass", SHARES), ("agrees", asked))
            for share in shares
        ]
        yield f"| {chosen} | " + " | ".join(cells) + " |"


def _mean(values: Sequence[float], digits: int = 2) -> str:
    return f"{sum(values) / len(values):.{digits}f}" if values else ""


def _kept(rows: Sequence[Row]) -> str:
    kept = [row["kept"] / row["prompt_tokens"] for row in rows if row["kept"] is not None]
    return f"{sum(kept) / len(kept):.0%}" if kept else ""
