"""What HIPPO claims."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lab.claims.evidence import (
    Claim,
    Evidence,
    Finding,
    among,
    graded,
    less,
    ordered,
    said,
    whole_speed_of,
)
from lab.claims.specvlm import KEPT, TREE
from lab.claims.specvlm import RUN as LONGER
from lab.studies.lab import DRAFTS
from saccade.bench import measures
from saccade.bench.measures import Interval

RUN = "papers-256"
BASELINES = ("sd", "sd-tree", TREE)
WAITS, EARLY = "hippo/early=wait", ("hippo/early=superset", "hippo/early=all")
OWN, SERIAL = WAITS, f"{WAITS}/schedule=serial"  # waiting is the default
GUIDED = "pearl-specvlm"  # at the lambda of .5, where stage II never acts
LIKE = ((WAITS, "pearl"), (WAITS, GUIDED), *((own, "pearl-syn") for own in EARLY))
"""Drafts that begin at the same moment, ours first."""
EDGES, EVEN = ("top tenth", "bottom tenth"), 0.2
LONG = ("shapes-caption", "shapes-events", "shapes-ood")


def _faster(e: Evidence, pairs: Sequence[tuple[str, str]]) -> list[Interval]:
    """By how much whole answers are faster: the paper's totals (Table 2: 2.80x) have the prefill,
    and a draft that starts before the decoding does would otherwise start for nothing."""
    return [e.gain(RUN, suite, *pair, whole_speed_of) for suite in LONG for pair in pairs]


def fastest(e: Evidence) -> Finding:
    gains = _faster(e, [(OWN, other) for other in BASELINES])
    words = e.speeds(RUN, "shapes-caption", (OWN, *BASELINES), whole=True)
    return Finding(ordered(gains), f"whole captions: {words}")


def accepts(e: Evidence) -> Finding:
    own = measures.accepted_between_refusals(e.answers(RUN, "shapes-caption", OWN)) or 0.0
    found = {"hippo": own} | {
        name: measures.accepted_per_forward(e.answers(RUN, "shapes-caption", name)) or 0.0
        for name in BASELINES
    }
    most = max(found[name] for name in BASELINES)
    verdict = graded(found["hippo"] > most)
    words = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    return Finding(verdict, f"MAT, by the round for the baselines: {words}")


def parallel(e: Evidence) -> Finding:
    gains = _faster(e, [(OWN, SERIAL)])
    both = (e.speed(RUN, "shapes-caption", name, whole=True) for name in (OWN, SERIAL))
    words = " against ".join(f"{said(each)}x" for each in both)
    return Finding(ordered(gains), f"whole captions: {words} in turns")


def over_pearl(e: Evidence) -> Finding:
    gains = _faster(e, LIKE)
    names = dict.fromkeys(name for pair in LIKE for name in pair)
    words = e.speeds(RUN, "shapes-caption", tuple(names), whole=True)
    return Finding(ordered(gains), f"whole captions: {words}")


def synchronous(e: Evidence) -> Finding:
    """Seconds saved of a whole answer, clip by clip, by what begins with the target's prefill."""
    found, words = [], []
    for size, taken in e.figure("hippo-early")["answers"].items():
        total = {name: [own["total"] for own in each] for name, each in taken.items()}
        pairs = [("pearl", "pearl-syn"), *((WAITS, own) for own in EARLY)]
        gains = [less(total[late], total[early]) for late, early in pairs]
        found += gains
        words.append(
            f"{size} visual tokens "
            + ", ".join(
                f"{gain[0]:+.2f} of {mean(total[late]):.2f} ({early})"
                for gain, (late, early) in zip(gains, pairs, strict=True)
            )
        )
    return Finding(ordered(found), "seconds saved of a whole answer: " + "; ".join(words))


def overlapped(e: Evidence) -> Finding:
    answers = e.answers(RUN, "shapes-caption", OWN)
    work = mean(answer.beside_prefill + answer.beside_draft for answer in answers)
    held = mean(answer.draft for answer in answers)
    waited = mean(answer.draft / answer.decode for answer in answers)
    verdict = graded(waited < 0.05, waited < 0.5)
    told = f"of {work:.2f} s of the draft's work an answer " if work else ""
    return Finding(
        verdict, f"{told}the target waits for the draft {held:.2f} s, {waited:.0%} of the decoding"
    )


def drafting_counts(e: Evidence) -> Finding:
    answers = e.answers(LONGER, "shapes-caption-2k", "sd")
    share = mean(answer.draft / (answer.draft + answer.verify) for answer in answers)
    verdict = graded(share > 0.25, share > 0.1)
    return Finding(verdict, f"{share:.0%} of a round of vanilla SD, the whole video seen")


def biased(e: Evidence) -> Finding:
    rows = e.figure("hippo-edges")["rows"]
    low = sum(rows["attention"][edge][1] for edge in EDGES)
    verdict = graded(low > EVEN, _boundary(rows["attention"]) > EVEN)
    words = "; ".join(
        f"{view} {_boundary(rows[view]):.3f} ({said(rows[view][EDGES[0]])} top, "
        f"{said(rows[view][EDGES[1]])} bottom)"
        for view in ("attention", "uniform")
    )
    return Finding(verdict, f"share of the kept tokens ({EVEN} if spread evenly): {words}")


def balanced(e: Evidence) -> Finding:
    rows = e.figure("hippo-edges")["rows"]
    own, other = (_boundary(rows[view]) for view in ("holistic", "attention"))
    verdict = graded(own <= EVEN < other, own < other)
    return Finding(
        verdict,
        f"share of the kept tokens ({EVEN} if spread evenly): holistic {own:.3f} "
        f"({said(rows['holistic'][EDGES[0]])} top, {said(rows['holistic'][EDGES[1]])} bottom), "
        f"attention {other:.3f}",
    )


def _boundary(row: dict[str, list[float]]) -> float:
    """The share at both edges together, as the paper counts it: a fifth of a frame's cells."""
    return sum(row[edge][0] for edge in EDGES)


def accuracy(e: Evidence) -> Finding:
    panels = e.figure("hippo-accuracy")["panels"]
    found, words = [], []
    for size, rows in panels.items():
        for what in DRAFTS:
            of = {
                row: own[name]
                for row, own in rows.items()
                if (name := f"a draft that {what}") in own
            }
            whole = of["the whole video"][0]
            found += [of[row][0] < whole for row in ("attention", "random")]
            words.append(
                f"{size}, {what}: {whole:.2f} with everything, {of['attention'][0]:.2f} by "
                f"attention, {of['random'][0]:.2f} at random, {of['holistic'][0]:.2f} holistic"
            )
    return Finding(among(found), "; ".join(words))


def components(e: Evidence) -> Finding:
    taus = e.figure("hippo-ablation")["clips_tau"]
    found: list[Interval] = []
    words = []
    for what in DRAFTS:
        own = taus[what]
        gains = {
            part: less(own["holistic/keep=0.1"], own[f"holistic-no-{part}/keep=0.1"])
            for part in ("attn", "temp", "spa")
        }
        found += gains.values()
        words.append(f"{what}: " + ", ".join(f"{said(g)} ({p})" for p, g in gains.items()))
    return Finding(ordered(found), "tau lost without each score: " + "; ".join(words))


def criteria(e: Evidence) -> Finding:
    taus = e.figure("hippo-pruning")["clips_tau"]
    found, words = [], []
    for what in DRAFTS:
        for other in ("random", "frames", "fastvid", "dycoke"):
            gains = [
                less(taus[what][f"holistic/keep={k}"], taus[what][f"{other}/keep={k}"])
                for k in KEPT
            ]
            found += gains
            if what == next(iter(DRAFTS)):
                words.append(f"{other} " + " ".join(f"{gain[0]:+.2f}" for gain in gains))
    return Finding(
        ordered(found),
        f"tau of the holistic choice less others' at {', '.join(KEPT)} kept (a draft that never "
        f"saw pruning): {', '.join(words)}",
    )


CLAIMS = (
    Claim(
        "Fig. 2",
        "What attention keeps is biased towards the top and bottom edges of frames.",
        "share of the kept tokens, 20 % if even; in a plot",
        "figure hippo-edges",
        biased,
        "does not hold",
        "Less than the fifth that lies there, at the bottom above all: this target looks where the "
        "shapes are.",
    ),
    Claim(
        "Fig. 8",
        "The holistic score takes the bias away.",
        "share of the kept tokens, in a plot",
        "figure hippo-edges",
        balanced,
        "partly",
        "There is no bias here to take away. It keeps still less of the edges than attention does: "
        "motion and texture, too, are where the shapes are.",
    ),
    Claim(
        "Fig. 3",
        "The draft answers worse on a tenth chosen by attention, or at random, than on everything.",
        "share answered right, in a plot",
        "figure hippo-accuracy",
        accuracy,
        "holds",
        "As in the paper, and attention is no better than chance; most of the intervals over 50 "
        "questions overlap.",
    ),
    Claim(
        "Fig. 6",
        "Each of the three scores helps.",
        "speed of whole answers, in a plot; ours tau of a chain of 5",
        "figure hippo-ablation",
        components,
        "partly",
        "Only attention helps beyond its interval, and only the draft that trained on pruned "
        "video.",
    ),
    Claim(
        "Fig. 7",
        "Choices that do not ask the target are worse at every ratio.",
        "MAT, in a plot; ours tau of a chain of 5",
        "figure hippo-pruning",
        criteria,
        "does not hold",
        "Whatever keeps a little of every frame does better here than what gathers on some.",
    ),
    Claim(
        "Sec. 4.2, Fig. 4",
        "Drafting takes a substantial share of the time.",
        "share of a round's seconds, in a plot",
        LONGER,
        drafting_counts,
        "holds",
        "Five steps of a draft beside one verification of six rows: a third of the round by two "
        "threads, where a quarter counts as substantial.",
    ),
    Claim(
        "Table 1",
        "HIPPO is the fastest, before SpecVLM, SD-tree and vanilla SD (up to 3.51x).",
        "2.15x to 3.51x, whole answers; SpecVLM 1.85x to 2.68x, SD-tree 1.45x to 2.08x, vanilla SD "
        "1.21x to 1.89x",
        RUN,
        fastest,
        "partly",
        "Faster than the trees in captions, not in lists; never than a chain in turns. Two "
        "processes share two cores: what works beside the target takes its cores away.",
    ),
    Claim(
        "Table 1",
        "It accepts far more tokens (MAT up to 12.4, baselines 2.7 to 4.5).",
        "MAT 2.82 to 12.42 from refusal to refusal; by the round vanilla SD 2.69 to 4.01, SD-tree "
        "2.51 to 4.51, SpecVLM 2.33 to 4.32",
        RUN,
        accepts,
        "holds",
        "A draft that goes on while it is judged is refused less often than a round ends: its MAT "
        "runs on over full rounds. The baselines' is by the round, as the paper prints it "
        "(SpecVLM's own figures); run on in the same way they would have 27 to 43.",
    ),
    Claim(
        "Fig. 6",
        "Working in parallel helps (w/o vpsd is slower).",
        "speed of whole answers, in a plot",
        RUN,
        parallel,
        "does not hold",
        "Slower everywhere: with one core a process the target's own forwards take longer than "
        "with two, and by kernels of our own they gain more from the second.",
    ),
    Claim(
        "Table 3",
        "HIPPO beats PEARL, with its prefill beside the target's and with SpecVLM's view.",
        "2.31x to 2.89x plain decoding, whole answers; PEARL 1.87x to 2.45x, with its prefill "
        "beside 2.03x to 2.64x, with SpecVLM's view 2.06x to 2.69x",
        RUN,
        over_pearl,
        "partly",
        "Faster than PEARL with SpecVLM's view in lists, and there than PEARL's early start where "
        "it drafts by what is never pruned; elsewhere within the intervals or behind. Not than "
        "PEARL over the whole video: so small a draft gains no time from a tenth of it and loses "
        "acceptance.",
    ),
    Claim(
        "Sec. 5.2, Table 3",
        "A draft that reads while the target does makes whole answers faster (Syn-Prefill).",
        "PEARL 1.87x to 2.45x without, 2.03x to 2.64x with it",
        "figure hippo-early",
        synchronous,
        "does not hold",
        "Two cores are shared: beside a draft that reads, the target reads with one of them, and "
        "its prefill is most of the answer. With a device each there is nothing to share.",
    ),
    Claim(
        "Table 2",
        "The draft's work is hidden behind the target's.",
        '26.7 of the draft\'s seconds in an answer of 58.8, "overlapped"',
        RUN,
        overlapped,
        "partly",
        "Rounds after a refusal begin with nothing in flight and wait a little.",
    ),
)
