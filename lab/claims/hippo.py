"""Lists HIPPO's claims, and judges each on the embedded pair.

HIPPO (``saccade/methods/hippo.py``) lets the draft work in parallel with the target, over the tenth
of a video with the highest sum of three scores, its "holistic" choice. Its paper counts HIPPO's
accepted tokens from refusal to refusal, and those of its rivals by the round. It also compares
HIPPO's speedups of whole answers with speedups that SpecVLM printed for decoding alone. Here both
sides of a comparison have the same unit. A verdict follows the rule of all claims
(``lab.claims.rule``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lab.claims.claim import (
    ACCEPTED,
    ACCEPTED_UNTIL_REFUSAL,
    CLIPS,
    TAU_DIFFERENCE,
    WHOLE_SPEED,
    Claim,
    Pair,
    StoredResults,
)
from lab.claims.rule import (
    ARITHMETIC,
    HIGHER_RATIO,
    LARGE_SHARE,
    MORE,
    SMALL_SHARE,
    Finding,
    Premise,
    Unit,
    computed,
    not_testable,
    of_intervals,
    paired,
)
from lab.claims.rule import judge as judge_by_rule
from lab.claims.specvlm import KEEPS, TREE
from lab.studies.specvlm import LAMBDA
from saccade.bench.records import Answer

RUN = "hippo-2k"
# By default HIPPO's draft waits for the target's attention, and then reads only the tenth. An early
# draft reads twice the tenth or everything while the target reads, and then drops what was not
# chosen. The paper's draft reads everything early.
WAITING = "hippo/early=wait"
EARLY = ("hippo/early=superset", "hippo/early=all")
TO_THE_LETTER = "hippo-paper"
SERIAL = f"{WAITING}/schedule=serial"  # The draft and the target work in turns.
BASELINES = {"vanilla SD": "sd", "SD-tree": "sd-tree", "SpecVLM": TREE}
# PEARL works in parallel too, but its draft sees the whole video. The draft of ``pearl-syn`` reads
# early, so it is compared with HIPPO's early drafts.
PEARLS: list[Pair] = [
    ("HIPPO over PEARL", WAITING, "pearl"),
    *((f"{own} over PEARL Syn-Prefill", own, "pearl-syn") for own in EARLY),
]
PEARL_SPECVLM = f"pearl-specvlm/lambda={LAMBDA}"  # At the lambda that SpecVLM has here.
EDGES = ("top tenth", "bottom tenth")  # Parts of a frame.
EVEN_SHARE = 0.1  # The share of kept tokens that a tenth of a frame has where no place is favoured.
EDGE_SHARE = Unit("share of kept tokens at an edge, less an even tenth", "difference")
RIGHT = Unit("share of questions answered right", "difference")
DRAFTING = Unit("drafting's share of a round's seconds", "value", is_time=True)
WAITING_SHARE = Unit("share of decoding spent waiting for the draft", "value", is_time=True)
SAVED = Unit("seconds of a whole answer, ratio", "ratio", is_time=True)
CHOOSING = Unit("choosing's share of an answer's seconds", "value", is_time=True, digits=4)
COPIED = Unit("SpecVLM's own speedup less the one HIPPO prints for it", "difference")
# SpecVLM's speedups of LLaVA-OneVision 72B/7B as (HIPPO's Table 1, SpecVLM's own Table 1). HIPPO's
# text says that its table is of whole answers. SpecVLM's is of decoding alone.
PRINTED_TWICE = {
    "VideoDetailCaption": (2.68, 2.68),
    "MVBench": (2.35, 2.35),
    "MLVU": (2.00, 2.00),
    "LongVideoBench": (2.37, 2.56),
}


def judge_edge_bias(results: StoredResults) -> Finding:
    rows = results.figure("hippo-edges")["rows"]["attention"]
    suites = results.figure_suites("hippo-edges", EDGE_SHARE, [CLIPS])
    comparisons = [
        of_intervals(edge, CLIPS, EDGE_SHARE, rows[edge], EVEN_SHARE, suites.items)
        for edge in EDGES
    ]
    return judge_by_rule(suites, EDGE_SHARE, MORE, comparisons)


def judge_holistic_balance(results: StoredResults) -> Finding:
    """Judges whether attention keeps more at the edges than the holistic score does.

    Whether the holistic share is even is not judged.
    """
    rows = results.figure("hippo-edges")["rows"]
    suites = results.figure_suites("hippo-edges", EDGE_SHARE, [CLIPS])
    comparisons = [
        of_intervals(
            f"attention less holistic, {edge}",
            CLIPS,
            EDGE_SHARE,
            rows["attention"][edge],
            rows["holistic"][edge],
            suites.items,
        )
        for edge in EDGES
    ]
    is_biased = judge_edge_bias(results).verdict == "holds"
    premise = Premise("the bias of Fig. 2", is_biased)
    return judge_by_rule(suites, EDGE_SHARE, MORE, comparisons, premise)


def judge_draft_accuracy(results: StoredResults) -> Finding:
    """Judges whether each draft answers more questions right by the whole video than by a tenth.

    Only means with intervals are stored, so the comparison is not paired.
    """
    (rows,) = results.figure("hippo-accuracy")["panels"].values()
    drafts = tuple(rows["the whole video"])
    suites = results.figure_suites("hippo-accuracy", RIGHT, drafts)
    comparisons = [
        of_intervals(
            f"everything less {row}",
            draft,
            RIGHT,
            rows["the whole video"][draft],
            rows[row][draft],
            suites.items,
        )
        for row in ("attention", "random")
        for draft in drafts
    ]
    return judge_by_rule(suites, RIGHT, MORE, comparisons)


def judge_components(results: StoredResults) -> Finding:
    pairs = [
        (f"without {part}", "holistic/keep=0.1", f"holistic-no-{part}/keep=0.1")
        for part in ("attn", "temp", "spa")
    ]
    return results.compare_clips("hippo-ablation", TAU_DIFFERENCE, pairs, MORE)


def judge_criteria(results: StoredResults) -> Finding:
    pairs = [
        (f"less {other}, {keep} kept", f"holistic/keep={keep}", f"{other}/keep={keep}")
        for other in ("random", "frames", "fastvid", "dycoke")
        for keep in KEEPS
    ]
    return results.compare_clips("hippo-pruning", TAU_DIFFERENCE, pairs, MORE)


def judge_drafting_share(results: StoredResults) -> Finding:
    def share(answer: Answer) -> float:
        # What a round does besides drafting and verifying does not count.
        return answer.draft / (answer.draft + answer.verify)

    return results.measure(RUN, DRAFTING, {"vanilla SD": ("sd", share)}, LARGE_SHARE)


def _against_baselines(word: str) -> list[Pair]:
    """Pairs HIPPO, by default and as its paper has it ("to the letter"), with each of its rivals.

    ``word`` stands between the two names in what the page calls the pair: "HIPPO over SpecVLM".
    """
    return [
        (f"{own} {word} {label}", name, rival)
        for own, name in (("HIPPO", WAITING), ("to the letter", TO_THE_LETTER))
        for label, rival in BASELINES.items()
    ]


def judge_fastest(results: StoredResults) -> Finding:
    return results.compare(RUN, WHOLE_SPEED, _against_baselines("over"), HIGHER_RATIO)


def judge_units_of_table(results: StoredResults) -> Finding:
    """Judges by the two papers whether HIPPO prints SpecVLM's speedups of whole answers.

    A speedup of a whole answer would be lower than SpecVLM's own, because the prefill does not get
    faster. So a number that both papers print is one of decoding alone.
    """
    comparisons = [
        computed(name, COPIED, by_specvlm - by_hippo)
        for name, (by_hippo, by_specvlm) in PRINTED_TWICE.items()
    ]
    return judge_by_rule(ARITHMETIC, COPIED, MORE, comparisons)


def judge_acceptance(results: StoredResults) -> Finding:
    return results.compare(RUN, ACCEPTED, _against_baselines("less"), MORE)


def judge_acceptance_until_refusal(results: StoredResults) -> Finding:
    return results.compare(RUN, ACCEPTED_UNTIL_REFUSAL, _against_baselines("less"), MORE)


def judge_parallel_schedule(results: StoredResults) -> Finding:
    pairs = [("beside over in turns", WAITING, SERIAL)]
    return results.compare(RUN, WHOLE_SPEED, pairs, HIGHER_RATIO)


def judge_gain_over_pearl(results: StoredResults) -> Finding:
    pairs = [*PEARLS, ("HIPPO over PEARL-SpecVLM", WAITING, PEARL_SPECVLM)]
    return results.compare(RUN, WHOLE_SPEED, pairs, HIGHER_RATIO)


def _totals(answers: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Returns the seconds of whole answers, by clip."""
    return {clip: answer["total"] for clip, answer in enumerate(answers)}


def judge_early_prefill(results: StoredResults) -> Finding:
    answers = results.figure("hippo-early")["answers"]
    suites = results.figure_suites("hippo-early", SAVED, tuple(answers), prompt="256 to 8,192")
    comparisons = [
        paired(
            f"{late} over {early}",
            size,
            SAVED,
            _totals(own[late]),
            _totals(own[early]),
        )
        for late, early in (("pearl", "pearl-syn"), *((WAITING, own) for own in EARLY))
        for size, own in answers.items()
    ]
    return judge_by_rule(suites, SAVED, HIGHER_RATIO, comparisons)


def judge_overlap(results: StoredResults) -> Finding:
    def waiting(answer: Answer) -> float:
        # Where the draft works beside the target, ``draft`` has only what the target waits for it.
        return answer.draft / answer.decode

    return results.measure(RUN, WAITING_SHARE, {"HIPPO": (WAITING, waiting)}, SMALL_SHARE)


def judge_pruning_cost(results: StoredResults) -> Finding:
    def share(answer: Answer) -> float:
        # These are the seconds of choosing the tenth, alone and in parallel with the target.
        return (answer.guide + answer.beside_guide) / answer.total

    return results.measure(RUN, CHOOSING, {"HIPPO": (WAITING, share)}, SMALL_SHARE)


def judge_families(results: StoredResults) -> Finding:
    return not_testable(
        "missing: trained pairs of four families. The embedded pair is one.", WHOLE_SPEED.unit
    )


CLAIMS = (
    Claim(
        "Fig. 2",
        "Attention keeps too much at the top and bottom edges of frames.",
        "a plot",
        "lab figure hippo-edges",
        judge_edge_bias,
        "not shown",
        "This target looks where the shapes are.",
    ),
    Claim(
        "Fig. 8",
        "The holistic score removes the bias.",
        "a plot",
        "lab figure hippo-edges",
        judge_holistic_balance,
        "not testable here",
    ),
    Claim(
        "Fig. 3",
        "The draft answers worse on a tenth, by attention or at random.",
        "a plot",
        "lab figure hippo-accuracy",
        judge_draft_accuracy,
        "partly",
        "By attention, for one draft. At random the other loses 2 of 50 questions.",
    ),
    Claim(
        "Fig. 6",
        "Each of the three scores helps.",
        "speed, in a plot",
        "lab figure hippo-ablation",
        judge_components,
        "partly",
        "Only attention does, for one draft.",
    ),
    Claim(
        "Fig. 7",
        "Choices without the target's attention are worse at every ratio.",
        "a plot",
        "lab figure hippo-pruning",
        judge_criteria,
        "not shown",
        "Keeping a little of every frame does better.",
    ),
    Claim(
        "Fig. 4",
        "Drafting takes a substantial share of a round.",
        "a plot",
        f"lab run {RUN}",
        judge_drafting_share,
        "holds",
    ),
    Claim(
        "Table 1",
        "HIPPO accepts far more tokens, counted by the round.",
        "12.42 of 4.00 (MLVU), in two units",
        f"lab run {RUN}",
        judge_acceptance,
        "not shown",
        "By default it accepts fewer than each rival in every suite. To the letter no suite "
        "shows more.",
        "In one unit HIPPO, by default here, accepts fewer tokens than each of its three rivals, "
        "in every suite, by the round and from refusal to refusal. As its paper has it no suite "
        "shows more. The paper compares two units.",
    ),
    Claim(
        "Table 1",
        "The same, counted from refusal to refusal.",
        "12.42 of 4.00 (MLVU), in two units",
        f"lab run {RUN}",
        judge_acceptance_until_refusal,
        "not shown",
        "The same.",
    ),
    Claim(
        "Table 1",
        "SpecVLM's speedups there are of whole answers, as HIPPO's are.",
        "LLaVA-OneVision, four sets",
        "",
        judge_units_of_table,
        "partly",
        "Three are those of SpecVLM's Table 1.",
        "SpecVLM's 2.68x is of decoding alone. HIPPO's Table 1 prints it, and two more of "
        "SpecVLM's own figures, beside HIPPO's speedups of whole answers.",
    ),
    Claim(
        "Table 1",
        "HIPPO is the fastest.",
        "3.51x of 2.35x, 2.02x, 1.82x (MVBench)",
        f"lab run {RUN}",
        judge_fastest,
        "partly",
        "Faster than SD-tree and SpecVLM in descriptions. Vanilla SD is faster in all suites "
        "but one, and to the letter HIPPO is slower than its rivals in 17 of 18 cases.",
    ),
    Claim(
        "Fig. 6",
        "Working in parallel helps.",
        "a plot",
        f"lab run {RUN}",
        judge_parallel_schedule,
        "does not hold",
        "Draft and target share two cores here.",
    ),
    Claim(
        "Table 3",
        "HIPPO beats PEARL, its early prefill and SpecVLM's view.",
        "2.89x of 2.45x, 2.64x, 2.69x at most",
        f"lab run {RUN}",
        judge_gain_over_pearl,
        "not shown",
        "All four are within a few percent.",
    ),
    Claim(
        "Table 3",
        "Drafts that read while the target does make answers faster.",
        "2.64x of 2.45x at most",
        "lab figure hippo-early",
        judge_early_prefill,
        "not shown",
        "At 2,048 tokens and more they make answers slower here. At 256 nothing is shown.",
    ),
    Claim(
        "Table 2",
        "The draft's work is hidden behind the target's.",
        "26.7 of 58.8 s",
        f"lab run {RUN}",
        judge_overlap,
        "does not hold",
        "6 to 10 % of decoding is spent waiting for the draft, just above 5 %.",
    ),
    Claim(
        "Table 2",
        "Choosing costs next to nothing.",
        "0.11 of 58.8 s",
        f"lab run {RUN}",
        judge_pruning_cost,
        "holds",
    ),
    Claim(
        "Fig. 9-20",
        "All of it repeats in four families.",
        "plots",
        "",
        judge_families,
        "not testable here",
    ),
)
