"""HIPPO's claims, and how each is judged on the embedded pair."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lab.claims.claim import (
    Claim,
    Finding,
    StoredResults,
    grade,
    grade_each,
    grade_ordering,
    interval_text,
    mean_difference,
    whole_answer_speed,
)
from lab.claims.specvlm import KEEPS, TREE
from lab.claims.specvlm import RUN as LONG_RUN
from lab.studies.experiment import DRAFTS
from saccade.bench import measures
from saccade.bench.measures import Interval

RUN = "papers-256"
BASELINES = ("sd", "sd-tree", TREE)
WAITING, EARLY = "hippo/early=wait", ("hippo/early=superset", "hippo/early=all")
DEFAULT, SERIAL = WAITING, f"{WAITING}/schedule=serial"
GUIDED_PEARL = "pearl-specvlm"  # At a lambda of .5, at which stage II chooses nothing.
SAME_START = ((WAITING, "pearl"), (WAITING, GUIDED_PEARL), *((own, "pearl-syn") for own in EARLY))
"""Pairs of methods whose drafts begin at the same moment, ours first."""
EDGES, EVEN_SHARE = ("top tenth", "bottom tenth"), 0.2
LONG_SUITES = ("shapes-caption", "shapes-events", "shapes-ood")


def _whole_speed_gains(results: StoredResults, pairs: Sequence[tuple[str, str]]) -> list[Interval]:
    """Returns by how much the first of each pair answers faster, in tokens per second.

    Whole answers are compared, because the paper's totals (Table 2: 2.80x) include the prefill. In
    decoding alone, a draft that starts before it would gain nothing.
    """
    return [
        results.gain(RUN, suite, *pair, whole_answer_speed)
        for suite in LONG_SUITES
        for pair in pairs
    ]


def judge_fastest(results: StoredResults) -> Finding:
    gains = _whole_speed_gains(results, [(DEFAULT, other) for other in BASELINES])
    words = results.speeds(RUN, "shapes-caption", (DEFAULT, *BASELINES), whole=True)
    return Finding(grade_ordering(gains), f"whole captions: {words}")


def judge_acceptance(results: StoredResults) -> Finding:
    own_mat = (
        measures.accepted_between_refusals(results.answers(RUN, "shapes-caption", DEFAULT)) or 0.0
    )
    mat_by_method = {"hippo": own_mat} | {
        name: measures.accepted_per_forward(results.answers(RUN, "shapes-caption", name)) or 0.0
        for name in BASELINES
    }
    best_baseline = max(mat_by_method[name] for name in BASELINES)
    verdict = grade(mat_by_method["hippo"] > best_baseline)
    words = ", ".join(f"{name} {value:.2f}" for name, value in mat_by_method.items())
    return Finding(verdict, f"MAT, by the round for the baselines: {words}")


def judge_parallel_schedule(results: StoredResults) -> Finding:
    gains = _whole_speed_gains(results, [(DEFAULT, SERIAL)])
    both = (results.speed(RUN, "shapes-caption", name, whole=True) for name in (DEFAULT, SERIAL))
    words = " against ".join(f"{interval_text(each)}x" for each in both)
    return Finding(grade_ordering(gains), f"whole captions: {words} in turns")


def judge_gain_over_pearl(results: StoredResults) -> Finding:
    gains = _whole_speed_gains(results, SAME_START)
    names = dict.fromkeys(name for pair in SAME_START for name in pair)
    words = results.speeds(RUN, "shapes-caption", tuple(names), whole=True)
    return Finding(grade_ordering(gains), f"whole captions: {words}")


def judge_early_prefill(results: StoredResults) -> Finding:
    """Judges how many seconds of a whole answer are saved by drafts that begin with the prefill."""
    all_gains = []
    words = []
    for size, answers_by_method in results.figure("hippo-early")["answers"].items():
        total = {name: [own["total"] for own in each] for name, each in answers_by_method.items()}
        pairs = [("pearl", "pearl-syn"), *((WAITING, own) for own in EARLY)]
        gains = [mean_difference(total[late], total[early]) for late, early in pairs]
        all_gains += gains
        words.append(
            f"{size} visual tokens "
            + ", ".join(
                f"{gain[0]:+.2f} of {mean(total[late]):.2f} ({early})"
                for gain, (late, early) in zip(gains, pairs, strict=True)
            )
        )
    return Finding(
        grade_ordering(all_gains), "seconds saved of a whole answer: " + "; ".join(words)
    )


def judge_overlap(results: StoredResults) -> Finding:
    answers = results.answers(RUN, "shapes-caption", DEFAULT)
    beside_seconds = mean(answer.beside_prefill + answer.beside_draft for answer in answers)
    waiting_seconds = mean(answer.draft for answer in answers)
    waiting_share = mean(answer.draft / answer.decode for answer in answers)
    verdict = grade(waiting_share < 0.05, waiting_share < 0.5)
    work_words = (
        f"of {beside_seconds:.2f} s of the draft's work an answer " if beside_seconds else ""
    )
    return Finding(
        verdict,
        f"{work_words}the target waits for the draft {waiting_seconds:.2f} s, {waiting_share:.0%} "
        "of the decoding",
    )


def judge_drafting_share(results: StoredResults) -> Finding:
    answers = results.answers(LONG_RUN, "shapes-caption-2k", "sd")
    share = mean(answer.draft / (answer.draft + answer.verify) for answer in answers)
    verdict = grade(share > 0.25, share > 0.1)
    return Finding(verdict, f"{share:.0%} of a round of vanilla SD, the whole video seen")


def judge_edge_bias(results: StoredResults) -> Finding:
    rows = results.figure("hippo-edges")["rows"]
    low = sum(rows["attention"][edge][1] for edge in EDGES)
    verdict = grade(low > EVEN_SHARE, _edge_share(rows["attention"]) > EVEN_SHARE)
    words = "; ".join(
        f"{view} {_edge_share(rows[view]):.3f} ({interval_text(rows[view][EDGES[0]])} top, "
        f"{interval_text(rows[view][EDGES[1]])} bottom)"
        for view in ("attention", "uniform")
    )
    return Finding(verdict, f"share of the kept tokens ({EVEN_SHARE} if spread evenly): {words}")


def judge_holistic_balance(results: StoredResults) -> Finding:
    rows = results.figure("hippo-edges")["rows"]
    own, other = (_edge_share(rows[view]) for view in ("holistic", "attention"))
    verdict = grade(own <= EVEN_SHARE < other, own < other)
    return Finding(
        verdict,
        f"share of the kept tokens ({EVEN_SHARE} if spread evenly): holistic {own:.3f} "
        f"({interval_text(rows['holistic'][EDGES[0]])} top, "
        f"{interval_text(rows['holistic'][EDGES[1]])} bottom), attention {other:.3f}",
    )


def _edge_share(row: dict[str, list[float]]) -> float:
    """Returns the share at both edges together, which are a fifth of a frame, as in the paper."""
    return sum(row[edge][0] for edge in EDGES)


def judge_draft_accuracy(results: StoredResults) -> Finding:
    panels = results.figure("hippo-accuracy")["panels"]
    is_worse = []
    words = []
    for size, rows in panels.items():
        for what in DRAFTS:
            share_by_row = {
                row: own[name]
                for row, own in rows.items()
                if (name := f"a draft that {what}") in own
            }
            whole = share_by_row["the whole video"][0]
            is_worse += [share_by_row[row][0] < whole for row in ("attention", "random")]
            words.append(
                f"{size}, {what}: {whole:.2f} with everything, {share_by_row['attention'][0]:.2f} "
                f"by attention, {share_by_row['random'][0]:.2f} at random, "
                f"{share_by_row['holistic'][0]:.2f} holistic"
            )
    return Finding(grade_each(is_worse), "; ".join(words))


def judge_components(results: StoredResults) -> Finding:
    taus = results.figure("hippo-ablation")["clips_tau"]
    all_gains: list[Interval] = []
    words = []
    for what in DRAFTS:
        own = taus[what]
        gains = {
            part: mean_difference(own["holistic/keep=0.1"], own[f"holistic-no-{part}/keep=0.1"])
            for part in ("attn", "temp", "spa")
        }
        all_gains += gains.values()
        words.append(f"{what}: " + ", ".join(f"{interval_text(g)} ({p})" for p, g in gains.items()))
    return Finding(grade_ordering(all_gains), "tau lost without each score: " + "; ".join(words))


def judge_criteria(results: StoredResults) -> Finding:
    taus = results.figure("hippo-pruning")["clips_tau"]
    all_gains = []
    words = []
    for what in DRAFTS:
        for other in ("random", "frames", "fastvid", "dycoke"):
            gains = [
                mean_difference(taus[what][f"holistic/keep={k}"], taus[what][f"{other}/keep={k}"])
                for k in KEEPS
            ]
            all_gains += gains
            if what == next(iter(DRAFTS)):
                words.append(f"{other} " + " ".join(f"{gain[0]:+.2f}" for gain in gains))
    return Finding(
        grade_ordering(all_gains),
        f"tau of the holistic choice less others' at {', '.join(KEEPS)} kept (a draft that never "
        f"saw pruning): {', '.join(words)}",
    )


CLAIMS = (
    Claim(
        "Fig. 2",
        "What attention keeps is biased towards the top and bottom edges of frames.",
        "share of the kept tokens, 20 % if even; in a plot",
        "figure hippo-edges",
        judge_edge_bias,
        "does not hold",
        "Less than a fifth of the kept tokens lies at the edges, and least at the bottom, because "
        "this target looks where the shapes are.",
    ),
    Claim(
        "Fig. 8",
        "The holistic score removes the bias.",
        "share of the kept tokens, in a plot",
        "figure hippo-edges",
        judge_holistic_balance,
        "partly",
        "There is no bias here to remove. The holistic score keeps even less of the edges than "
        "attention does, because motion and texture are also where the shapes are.",
    ),
    Claim(
        "Fig. 3",
        "The draft answers worse on a tenth chosen by attention, or at random, than on everything.",
        "share answered right, in a plot",
        "figure hippo-accuracy",
        judge_draft_accuracy,
        "holds",
        "This is as in the paper, and attention is no better than chance. Most of the intervals "
        "over 50 questions overlap.",
    ),
    Claim(
        "Fig. 6",
        "Each of the three scores helps.",
        "speed of whole answers, in a plot; ours tau of a chain of 5",
        "figure hippo-ablation",
        judge_components,
        "partly",
        "Only attention helps beyond its interval, and only the draft that was trained on pruned "
        "video.",
    ),
    Claim(
        "Fig. 7",
        "Choices without the target's attention are worse at every ratio.",
        "MAT, in a plot; ours tau of a chain of 5",
        "figure hippo-pruning",
        judge_criteria,
        "does not hold",
        "Here, choices that keep a little of every frame do better than choices that keep much of "
        "some frames.",
    ),
    Claim(
        "Sec. 4.2, Fig. 4",
        "Drafting takes a substantial share of the time.",
        "share of a round's seconds, in a plot",
        LONG_RUN,
        judge_drafting_share,
        "holds",
        "A round has five steps of the draft and one verification of six rows. With two threads "
        "the draft takes a third of it, and a quarter counts as substantial here.",
    ),
    Claim(
        "Table 1",
        "HIPPO is the fastest, before SpecVLM, SD-tree and vanilla SD (up to 3.51x).",
        "2.15x to 3.51x, whole answers; SpecVLM 1.85x to 2.68x, SD-tree 1.45x to 2.08x, vanilla SD "
        "1.21x to 1.89x",
        RUN,
        judge_fastest,
        "partly",
        "HIPPO is faster than the trees in captions but not in lists, and never faster than a "
        "chain that takes turns with the target. Two processes share two cores, so a draft that "
        "works beside the target takes cores from it.",
    ),
    Claim(
        "Table 1",
        "It accepts far more tokens (MAT up to 12.4, baselines 2.7 to 4.5).",
        "MAT 2.82 to 12.42 from refusal to refusal; by the round vanilla SD 2.69 to 4.01, SD-tree "
        "2.51 to 4.51, SpecVLM 2.33 to 4.32",
        RUN,
        judge_acceptance,
        "holds",
        "A draft that goes on during verification is rejected less often than a round ends, so "
        "its MAT runs on over rounds that were accepted whole. The baselines' MAT is by the "
        "round, as the paper prints it (SpecVLM's own figures). Counted in HIPPO's way they would "
        "have 27 to 43.",
    ),
    Claim(
        "Fig. 6",
        "Working in parallel helps (w/o vpsd is slower).",
        "speed of whole answers, in a plot",
        RUN,
        judge_parallel_schedule,
        "does not hold",
        "It is slower everywhere. With one core for each process the target's forwards take "
        "longer than with two, and with our own kernels they gain more from the second core.",
    ),
    Claim(
        "Table 3",
        "HIPPO beats PEARL, with its prefill beside the target's and with SpecVLM's view.",
        "2.31x to 2.89x plain decoding, whole answers; PEARL 1.87x to 2.45x, with its prefill "
        "beside 2.03x to 2.64x, with SpecVLM's view 2.06x to 2.69x",
        RUN,
        judge_gain_over_pearl,
        "partly",
        "In lists HIPPO is faster than PEARL with SpecVLM's view, and also than PEARL's early "
        "start where HIPPO drafts early over what is never pruned. Elsewhere it is within the "
        "intervals or behind. It is not faster than PEARL over the whole video, because so small "
        "a draft gains no time from a tenth of it and loses acceptance.",
    ),
    Claim(
        "Sec. 5.2, Table 3",
        "A draft that reads while the target does makes whole answers faster (Syn-Prefill).",
        "PEARL 1.87x to 2.45x without, 2.03x to 2.64x with it",
        "figure hippo-early",
        judge_early_prefill,
        "does not hold",
        "Two cores are shared. While the draft prefills, the target prefills with one of them, "
        "and its prefill takes most of the answer's time. With a device for each model nothing "
        "would be shared.",
    ),
    Claim(
        "Table 2",
        "The draft's work is hidden behind the target's.",
        '26.7 of the draft\'s seconds in an answer of 58.8, "overlapped"',
        RUN,
        judge_overlap,
        "partly",
        "Rounds after a rejection begin without drafted tokens and wait a little.",
    ),
)
