"""Sparse-to-Dense's claims, and how each is judged on the embedded pair."""

from __future__ import annotations

from lab.claims.claim import (
    Claim,
    Finding,
    StoredResults,
    Verdict,
    decoding_speed,
    grade,
    grade_ordering,
    interval_text,
)
from saccade.bench import measures

CAPTIONS = "papers-2k", "shapes-caption-2k"
OTHERS = ("streaming", "layerskip")


def judge_speedup(results: StoredResults) -> Finding:
    alone, data = results.speed(*CAPTIONS, "std"), results.figure("std-batch")
    together = data["rows"]["std"]["speed"]
    least = min(alone[1], together[1])
    verdict = grade(least >= 1.59, max(alone[1], together[1]) > 1)
    return Finding(
        verdict,
        f"{interval_text(alone)}x alone, {interval_text(together)}x in one batch of "
        f"{data['clips']} (three turns)",
    )


def judge_fastest(results: StoredResults) -> Finding:
    gains = [results.gain(*CAPTIONS, "std", other, decoding_speed) for other in OTHERS]
    return Finding(grade_ordering(gains), results.speeds(*CAPTIONS, ("std", *OTHERS)))


def judge_acceptance(results: StoredResults) -> Finding:
    rate_by_method = {
        name: measures.acceptance_rate(results.answers(*CAPTIONS, name)) or 0.0
        for name in ("std", *OTHERS)
    }
    verdict = grade(rate_by_method["std"] > max(rate_by_method[name] for name in OTHERS))
    return Finding(
        verdict,
        "accepted of drafted: " + ", ".join(f"{n} {v:.1%}" for n, v in rate_by_method.items()),
    )


def judge_layer_skipping(results: StoredResults) -> Finding:
    rate = measures.acceptance_rate(results.answers(*CAPTIONS, "layerskip")) or 0.0
    speedup = results.speed(*CAPTIONS, "layerskip")
    return Finding(
        grade_layer_skipping(rate, speedup[2]), f"accepts {rate:.1%}, {interval_text(speedup)}x"
    )


def grade_layer_skipping(rate: float, speed: float) -> Verdict:
    """Returns the verdict on skipping layers, from the share accepted and the highest speedup."""
    return grade(0.05 <= rate <= 0.1 and speed < 1, speed < 1)


def judge_agreement(results: StoredResults) -> Finding:
    data = results.figure("std-agreement")
    (lines,) = data["panels"].values()
    sixteenth = min(range(len(data["at"])), key=lambda i: abs(data["at"][i] - data["size"] / 16))
    share_at_sixteenth = lines["std"][sixteenth]
    verdict = grade(share_at_sixteenth[0] >= 0.95, max(value[0] for value in lines["std"]) >= 0.95)
    best = max(value[0] for value in lines["std"])
    return Finding(
        verdict,
        f"{interval_text(share_at_sixteenth)} of the tokens with {data['at'][sixteenth]} of "
        f"{data['size']} keys a head, {best:.2f} at best; a window "
        f"{interval_text(lines['streaming'][sixteenth])}",
    )


def judge_gamma_peak(results: StoredResults) -> Finding:
    return _judge_peak(results, "std-gamma", "gamma")


def judge_key_peak(results: StoredResults) -> Finding:
    return _judge_peak(results, "std-k", "K")


def _judge_peak(results: StoredResults, figure: str, name: str) -> Finding:
    """Judges whether the speed rises and then falls again within the settings that were tried.

    The peak has to lie above the intervals of both ends.
    """
    data = results.figure(figure)
    speeds = data["panels"]["times as fast as ar (decoding)"]["std"]
    top = max(speeds)
    is_inside = top not in (speeds[0], speeds[-1])
    verdict = grade(is_inside and top[0] > max(speeds[0][2], speeds[-1][2]), is_inside)
    each = ", ".join(f"{at}: {s[0]:.2f}x" for at, s in zip(data["at"], speeds, strict=True))
    return Finding(verdict, f"{name} {each}")


def judge_time_by_keys(results: StoredResults) -> Finding:
    (lines,) = results.figure("std-io")["panels"].values()
    keys, seconds = lines["keys read (predicted)"], lines["seconds (measured)"]
    ratio = [own[0] / read[0] for own, read in zip(seconds, keys, strict=True)]
    verdict = grade(max(ratio) < 1.15, min(ratio) < 1.15)
    return Finding(
        verdict,
        f"seconds a token are {min(ratio):.1f} to {max(ratio):.1f} times the share of keys read",
    )


def judge_fewer_keys(results: StoredResults) -> Finding:
    answers = results.answers(*CAPTIONS, "std")
    steps = sum(sum(answer.drafted) for answer in answers)
    gamma = steps / sum(answer.rounds for answer in answers)
    alpha = measures.acceptance_rate(answers) or 0.0
    read_keys = sum(
        a.prompt_tokens - a.visual_tokens + (a.draft_visual_tokens or 0) for a in answers
    )
    needed = read_keys / sum(answer.prompt_tokens for answer in answers) + 1 / gamma
    verdict = grade(alpha > needed)
    return Finding(verdict, f"alpha {alpha:.2f}, needed {needed:.2f}, gamma {gamma:.1f}")


CLAIMS = (
    Claim(
        "Sec. 2",
        "With the top K keys the next token is the same 95 % of the time.",
        "95 % of tokens",
        "figure std-agreement",
        judge_agreement,
        "partly",
        "It holds with half of the keys and not with the paper's sixteenth. Attention is so even "
        "that a sixteenth of the keys misses much of it, and a window of as many keys does as "
        "well.",
    ),
    Claim(
        "Fig. 1a",
        "Speed rises with gamma and falls again from 13.",
        "times plain decoding, in a plot",
        "figure std-gamma",
        judge_gamma_peak,
        "does not hold",
        "Speed falls from the first token on. A draft step costs nearly as much as a step of the "
        "target, so each further one costs more than it gains.",
    ),
    Claim(
        "Fig. 1b",
        "Too small a K is accepted too little, too large a K is slow.",
        "times plain decoding, in a plot",
        "figure std-k",
        judge_key_peak,
        "does not hold",
        "The largest K is the fastest, but only slightly. The keys of 2,048 tokens are not what "
        "limits a step here, so more of them cost next to nothing and more tokens are accepted.",
    ),
    Claim(
        "Sec. 3.3",
        "Fewer keys are read than by plain decoding: alpha > (K + m_t)/(m_v + m_t) + 1/gamma.",
        "an inequality in keys read",
        "papers-2k",
        judge_fewer_keys,
        "holds",
        "Drafts read half of the video (1,024 keys in all), and nearly four fifths of the drafted "
        "tokens are accepted. The next row says why this does not pay here.",
    ),
    Claim(
        "Sec. 3.3",
        "Time a token follows the keys read.",
        "keys read",
        "figure std-io",
        judge_time_by_keys,
        "does not hold",
        "Every step also reads the weights and has overhead, whatever the keys are. The formula "
        "counts keys alone.",
    ),
    Claim(
        "Table 1",
        "STD decodes 1.59x to 1.94x as fast.",
        "1.59x to 1.94x plain decoding, in batches of 8, the mean of three runs",
        "papers-2k, figure std-batch",
        judge_speedup,
        "does not hold",
        "STD saves the reading of keys, which takes little time beside the target's weights at "
        "2,048 keys, so a draft step costs nearly what it saves. STD is ahead from 8,192 keys on: "
        "1.5x at 16,384 and 2.1x at 32,768 (figure growth-filled, where an acceptance of nine in "
        "ten is imposed). The paper's 1,024 keys in all are half of what is here.",
    ),
    Claim(
        "Table 1",
        "STD is faster than drafting on a window (Streaming) or by half the layers (LayerSkip).",
        "1.59x to 1.94x; Streaming 1.32x to 1.61x, LayerSkip 0.33x to 0.63x",
        "papers-2k",
        judge_fastest,
        "partly",
        "STD is faster than LayerSkip, and as fast as Streaming within the interval.",
    ),
    Claim(
        "Table 1",
        "STD is accepted most.",
        "47.8 to 81.8 % of drafted tokens; Streaming 34.7 to 59.6 %, LayerSkip 3.7 to 10.0 %",
        "papers-2k",
        judge_acceptance,
        "holds",
        "With the paper's 1,024 keys in all it is ahead of Streaming, whose window slides, by six "
        "in a hundred. With few keys it is ahead by more (61 of the video: tau 5.73 against 4.29, "
        "docs/methods).",
    ),
    Claim(
        "Table 1",
        "Skipping layers without tuning accepts 5 to 10 % and is slower than plain decoding.",
        "3.7 to 10.0 % of drafted tokens, 0.33x to 0.63x",
        "papers-2k",
        judge_layer_skipping,
        "partly",
        "Drafts by half of this target's layers are accepted a little more often than the "
        "paper's, and they are slower all the same.",
    ),
)
