"""Claims about log-probabilities: those of a plain forward over the finished answer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from serve.live import QUESTION, Live, inputs_of, made, serving, text_part, video_part

import saccade
from saccade.engine.requests_per_round import RoundTimes
from saccade.inputs import Pair, media

CLOSE = 1e-4
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": dict(temperature=1.4, seed=11),
    "several": dict(temperature=1.4, seed=4, n=3),
}


@torch.no_grad()
def _forced(models: Pair, inputs: Any, answer: Sequence[int]) -> torch.Tensor:
    """Logs of what transformers' own forward gives at every token of an answer, at once."""
    given = dict(inputs)
    ids = torch.cat([given.pop("input_ids"), torch.tensor([list(answer)])], 1)
    given.pop("attention_mask", None)
    if "mm_token_type_ids" in given:
        spare = torch.zeros(1, len(answer), dtype=given["mm_token_type_ids"].dtype)
        given["mm_token_type_ids"] = torch.cat([given["mm_token_type_ids"], spare], 1)
    logits = models.target.backbone.model(input_ids=ids, **given, use_cache=False).logits[0]
    return logits[-len(answer) - 1 : -1].float().log_softmax(-1)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *product(["sage"], ["greedy", "several"]),
        *(
            pytest.param(method, kind, marks=pytest.mark.slow)
            for method, kind in product(["ar", "specvlm", "sd-tree", "sage"], SETTINGS)
            if method != "sage" or kind == "sampled"
        ),
    ],
)
def test_log_probabilities_are_a_plain_forwards(models, clips, method, kind, monkeypatch):
    """Claim: each token's number, and its five rivals', are within 1e-4 of one teacher-forced
    forward, for chains and trees, greedy, drawn and several; streamed they are the same."""
    # who is beside a row moves its last bits, where kernels are torch's
    monkeypatch.setattr(RoundTimes, "requests_per_round", lambda self, live, patience: live)
    settings = SETTINGS[kind]
    inputs = inputs_of(models, QUESTION, clips=[media.read(clips[0])])
    content = [video_part(clips[0]), text_part(QUESTION)]
    options = dict(settings, max_tokens=14, logprobs=True, top_logprobs=5)
    with serving(lambda: made(models, method)) as server:
        whole = server.ask(content, **options).json()
        pieces = _streamed(server, content, **options)
    decode = models.target.tokenizer.decode
    for index, choice in enumerate(whole["choices"]):
        drawn = {"do_sample": False}
        if kind != "greedy":
            drawn = dict(do_sample=True, temperature=1.4, seed=settings["seed"] + index)
        alone = saccade.run(
            models.target.backbone,
            inputs,
            draft=models.draft.backbone,
            method=method,
            max_new_tokens=14,
            tokenizer=models.target.tokenizer,
            **drawn,
        )
        assert choice["message"]["content"] == alone.text
        laws = _forced(models, inputs, alone.ids)
        logprobs = choice["logprobs"]["content"]
        assert len(logprobs) == len(alone.ids)
        assert pieces[index] == logprobs
        for token, law, each in zip(alone.ids, laws, logprobs, strict=True):
            assert abs(each["logprob"] - float(law[token])) <= CLOSE
            assert each["token"] == decode([token], skip_special_tokens=True)
            assert bytes(each["bytes"]).decode() == each["token"]
            best = [rival["logprob"] for rival in each["top_logprobs"]]
            assert best == sorted(best, reverse=True) and len(best) == 5
            assert best == pytest.approx(law.topk(5).values.tolist(), abs=CLOSE)
            assert sum(map(math.exp, best)) <= 1 + 1e-6
            assert each["logprob"] <= best[0] + 1e-9


def _streamed(server: Live, content: Any, **settings: Any) -> dict[int, list[Any]]:
    logprobs: dict[int, list[Any]] = {}
    for line in server.ask(content, stream=True, **settings).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                more = (choice["logprobs"] or {}).get("content", [])
                logprobs.setdefault(choice["index"], []).extend(more)
    return logprobs


def test_without_rivals_there_are_none_and_unasked_there_is_nothing(server):
    """Claim: logprobs alone tells of the tokens only; not asked for, they are null."""
    logprobs = server.ask(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert logprobs and all(each["top_logprobs"] == [] for each in logprobs)
    assert server.ask().json()["choices"][0]["logprobs"] is None


def test_control_a_forward_over_another_answer_differs(models, clips):
    """Control: with one token changed the plain forward is further off than the bound above."""
    inputs = inputs_of(models, QUESTION, clips=[media.read(clips[0])])
    one, other = _forced(models, inputs, [5, 6, 7]), _forced(models, inputs, [9, 6, 7])
    assert float((one - other)[1].abs().max()) > 10 * CLOSE
