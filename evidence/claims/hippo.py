"""What HIPPO claims."""

from __future__ import annotations

from statistics import mean

from evidence.claims.evidence import (
    Claim,
    Evidence,
    Finding,
    among,
    graded,
    less,
    ordered,
    said,
    speed_of,
)
from evidence.claims.specvlm import KEPT
from evidence.studies.lab import DRAFTS
from saccade.bench import measures
from saccade.bench.measures import Interval

RUN = "bench-256"
BASELINES = ("sd", "sd-tree", "specvlm")
EDGES, EVEN = ("top tenth", "bottom tenth"), 0.1
LONG = ("shapes-caption", "shapes-events", "shapes-ood")


def fastest(e: Evidence) -> Finding:
    gains = [e.gain(RUN, suite, "hippo", other, speed_of) for suite in LONG for other in BASELINES]
    words = e.speeds(RUN, "shapes-caption", ("hippo", *BASELINES))
    return Finding(ordered(gains), f"captions: {words}")


def accepts(e: Evidence) -> Finding:
    found = {
        name: measures.mean_accepted(e.answers(RUN, "shapes-caption", name)) or 0.0
        for name in ("hippo", *BASELINES)
    }
    most = max(found[name] for name in BASELINES)
    verdict = graded(found["hippo"] > most)
    return Finding(verdict, "MAT: " + ", ".join(f"{n} {v:.2f}" for n, v in found.items()))


def parallel(e: Evidence) -> Finding:
    gains = [e.gain(RUN, suite, "hippo", "hippo/schedule=serial", speed_of) for suite in LONG]
    both = (e.speed(RUN, "shapes-caption", n) for n in ("hippo", "hippo/schedule=serial"))
    words = " against ".join(f"{said(each)}x" for each in both)
    return Finding(ordered(gains), f"captions: {words} in turns")


def over_pearl(e: Evidence) -> Finding:
    names = ("pearl", "pearl-syn", "pearl-specvlm")
    gains = [e.gain(RUN, suite, "hippo", other, speed_of) for suite in LONG for other in names]
    words = e.speeds(RUN, "shapes-caption", ("hippo", *names))
    return Finding(ordered(gains), f"captions: {words}")


def overlapped(e: Evidence) -> Finding:
    answers = e.answers(RUN, "shapes-caption", "hippo")
    waited = mean(answer.draft / answer.decode for answer in answers)
    verdict = graded(waited < 0.05, waited < 0.5)
    return Finding(verdict, f"the target waits for the draft {waited:.0%} of the decoding")


def drafting_counts(e: Evidence) -> Finding:
    answers = e.answers("bench-2k", "shapes-caption-2k", "sd")
    share = mean(answer.draft / (answer.draft + answer.verify) for answer in answers)
    verdict = graded(share > 0.25, share > 0.1)
    return Finding(verdict, f"{share:.0%} of a round of vanilla SD, the whole video seen")


def biased(e: Evidence) -> Finding:
    rows = e.figure("hippo-edges")["rows"]
    both = {view: rows[view] for view in ("attention", "uniform")}
    above = [rows["attention"][edge][1] > EVEN for edge in EDGES]
    verdict = among(above)
    words = "; ".join(
        f"{view}: {said(own[EDGES[0]])} top, {said(own[EDGES[1]])} bottom"
        for view, own in both.items()
    )
    return Finding(verdict, f"share of the kept tokens ({EVEN} if spread evenly), {words}")


def balanced(e: Evidence) -> Finding:
    rows = e.figure("hippo-edges")["rows"]

    def off(view: str) -> float:
        return sum(abs(rows[view][edge][0] - EVEN) for edge in EDGES)

    verdict = graded(off("holistic") < off("attention"))
    own = rows["holistic"]
    return Finding(
        verdict,
        f"holistic: {said(own[EDGES[0]])} top, {said(own[EDGES[1]])} bottom; off an even spread by "
        f"{off('holistic'):.3f}, attention by {off('attention'):.3f}",
    )


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
        "figure hippo-edges",
        biased,
        "partly",
        "A third more than its share at the top, and no more than its share at the bottom.",
    ),
    Claim(
        "Fig. 8",
        "The holistic score takes the bias away.",
        "figure hippo-edges",
        balanced,
        "does not hold",
        "The excess at the top stays, and the bottom gets less than its share: motion and "
        "texture are where the shapes are.",
    ),
    Claim(
        "Fig. 3",
        "The draft answers worse on a tenth chosen by attention, or at random, than on everything.",
        "figure hippo-accuracy",
        accuracy,
        "holds",
        "As in the paper, and attention is no better than chance; the intervals over 50 "
        "questions overlap.",
    ),
    Claim(
        "Fig. 6",
        "Each of the three scores helps.",
        "figure hippo-ablation",
        components,
        "partly",
        "Only the temporal score helps beyond its interval, and only the draft that never saw "
        "pruning.",
    ),
    Claim(
        "Fig. 7",
        "Choices that do not ask the target are worse at every ratio.",
        "figure hippo-pruning",
        criteria,
        "does not hold",
        "Whatever keeps a little of every frame does better here than what gathers on some.",
    ),
    Claim(
        "Sec. 4.2, Fig. 4",
        "Drafting takes a substantial share of the time.",
        "bench-2k",
        drafting_counts,
        "holds",
        "Five steps of a draft beside one verification of six rows.",
    ),
    Claim(
        "Table 1",
        "HIPPO is the fastest, before SpecVLM, SD-tree and vanilla SD (up to 3.51x).",
        "bench-256",
        fastest,
        "partly",
        "Faster than the trees; not than a chain in turns. Two processes share two cores: "
        "what works beside the target takes its cores away.",
    ),
    Claim(
        "Table 1",
        "It accepts far more tokens (MAT up to 12.4, baselines 2.7 to 4.5).",
        "bench-256",
        accepts,
        "does not hold",
        "MAT runs on over full acceptances, and here drafts that see the whole video are "
        "hardly refused; a tenth costs acceptance.",
    ),
    Claim(
        "Fig. 6",
        "Working in parallel helps (w/o vpsd is slower).",
        "bench-256",
        parallel,
        "does not hold",
        "With one core a process the target's own forwards are slower than with two.",
    ),
    Claim(
        "Table 3",
        "HIPPO beats PEARL, with its prefill beside the target's and with SpecVLM's view.",
        "bench-256",
        over_pearl,
        "does not hold",
        "So small a draft gains no time from a tenth of the video and loses acceptance by it.",
    ),
    Claim(
        "Table 2",
        "The draft's work is hidden behind the target's.",
        "bench-256",
        overlapped,
        "partly",
        "Rounds after a refusal begin with nothing in flight and wait a little.",
    ),
)
