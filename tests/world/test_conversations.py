"""Training a draft on conversations in LLaVA's format: what is read, what is learnt of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lab import checkpoints
from saccade.core.errors import OptionError
from saccade.inputs import Loaded, load
from saccade.world.train_draft import conversations
from saccade.world.train_draft.conversations import Conversations, training_sample

FAMILIES = ("llava-1.5", "llava-next", "llava-onevision", "qwen2.5-vl")
TALK = (
    ("human", "<image>\nWhat is shown?"),
    ("gpt", "A red box."),
    ("human", "And what is shown? A red box."),
    ("gpt", "A red box. And a star."),
    ("human", "Thanks?"),
    ("gpt", "Yes."),
)


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": what} for who, what in turns]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family, and three pictures of several sizes."""
    root = tmp_path_factory.mktemp("llava")
    for name in FAMILIES:
        checkpoints.make(name, root / name)
    (root / "coco").mkdir()
    noise = np.random.default_rng(0)
    for number, size in enumerate([(56, 56, 3), (70, 56, 3), (56, 110, 3)]):
        pixels = noise.integers(0, 255, size, dtype=np.uint8)
        Image.fromarray(pixels).save(root / "coco" / f"{number}.png")
    return root


def written(folder: Path, rows: Any, name: str = "data.json") -> str:
    path = folder / name
    path.write_text(json.dumps(rows))
    return str(path)


def row(number: int = 0, turns: Any = TALK, **more: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "image": f"coco/{number}.png", "conversations": chat(*turns)} | more


def model(folder: Path, family: str) -> Loaded:
    return load(str(folder / family), fused=False)


def labelled(loaded: Loaded, sample: dict[str, torch.Tensor]) -> list[str]:
    """Every run of labels, spelled."""
    labels = sample["labels"][0].tolist()
    runs: list[list[int]] = [[]]
    for label in labels:
        if label >= 0:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [str(loaded.tokenizer.decode(run)) for run in runs if run]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_of_a_conversation_is_learnt(folder: Path, family: str) -> None:
    """Claim: the labels are all of gpt's answers, each up to the token that ends it, and nothing a
    human says, though a human says the same words; each label is the token after its place. Fails
    where the last answer alone is learnt, or a picture's rows shift the others."""
    loaded = model(folder, family)
    (talk,) = conversations.read_conversations(written(folder, [row()]))
    sample = training_sample(loaded, talk, np.random.default_rng(0), 0.0)
    assert sample is not None
    end = loaded.tokenizer.eos_token
    assert labelled(loaded, sample) == [what + end for who, what in TALK if who == "gpt"]
    at = (sample["labels"][0] >= 0).nonzero()[:, 0]
    assert torch.equal(sample["labels"][0, at], sample["input_ids"][0, at + 1])
    is_visual = [int(token) in loaded.backbone.placeholders for token in sample["input_ids"][0]]
    assert sum(is_visual) > 2 and bool(sample["kept_mask"].all())


def test_marks_are_where_media_stand(folder: Path) -> None:
    """Claim: ``<image>`` stands where it is written, several in several turns; without a mark the
    picture comes first; a system's turn and a last question without an answer are no answer."""
    two = [("human", "One <image> two."), ("gpt", "A."), ("human", "Now <image>"), ("gpt", "B.")]
    rows = [
        row(turns=two, image=["coco/0.png", "coco/1.png"]),
        row(turns=[("system", "Be short."), ("human", "Look."), ("gpt", "C."), ("human", "So?")]),
        {"conversations": chat(("human", "No picture."), ("gpt", "D."))},
    ]
    unanswered = row(turns=[*two, ("human", "So? <image>")], image=["coco/0.png"] * 3)
    then_system = row(
        turns=[*two, ("human", "So? <image>"), ("system", "Be short.")], image=["coco/0.png"] * 3
    )
    first, second, third, *others = conversations.read_conversations(
        written(folder, [*rows, unanswered, then_system])
    )
    for talk in others:
        assert len(talk.turns) == 4 and len(talk.images) == 2
    kinds = [[part["type"] for part in turn["content"]] for turn in first.turns]
    assert kinds == [["text", "image", "text"], ["text"], ["text", "image"], ["text"]]
    assert [path.name for path in first.images] == ["0.png", "1.png"]
    assert [turn["role"] for turn in second.turns] == ["system", "user", "assistant"]
    assert second.turns[1]["content"][0] == {"type": "image"}
    assert third.images == () and third.turns[0]["content"] == [
        {"type": "text", "text": "No picture."}
    ]
    for family in ("llava-1.5", "qwen2.5-vl"):
        loaded = model(folder, family)
        end = loaded.tokenizer.eos_token
        answers = [
            training_sample(loaded, talk, np.random.default_rng(0), 0.0) for talk in (first, third)
        ]
        assert [labelled(loaded, each) for each in answers if each] == [
            ["A." + end, "B." + end],
            ["D." + end],
        ]


def test_an_answer_that_the_template_leaves_out_is_refused(folder: Path, monkeypatch: Any) -> None:
    """Claim: where a template writes no token of an earlier answer as the answer begins (it may
    drop reasoning), the conversation is refused in a sentence. Fails with an IndexError."""
    loaded = model(folder, "llava-1.5")
    (talk,) = conversations.read_conversations(written(folder, [row()]))
    # As if the ids of the turns up to the answer differed from the whole text before it begins.
    monkeypatch.setattr(conversations, "common_length", lambda one, other: 0)
    with pytest.raises(OptionError, match="cannot be told apart"):
        training_sample(loaded, talk, np.random.default_rng(0), 0.0)


def test_what_is_too_long_loses_its_end(folder: Path, monkeypatch: Any) -> None:
    """Claim: a conversation longer than the draft reads loses its last turns; a single answer its
    end; one whose question alone is too long is passed over for the next."""
    loaded = model(folder, "llava-1.5")
    (talk,) = conversations.read_conversations(written(folder, [row()]))
    whole = training_sample(loaded, talk, np.random.default_rng(0), 0.0)
    assert whole is not None
    end, length = loaded.tokenizer.eos_token, whole["input_ids"].shape[1]
    for context, expected in (
        (length, ["A red box." + end, "A red box. And a star." + end, "Yes." + end]),
        (length - 1, ["A red box." + end, "A red box. And a star." + end]),
        (int((whole["labels"][0] >= 0).nonzero()[0, 0]) + 4, ["A r"]),
    ):
        monkeypatch.setattr(loaded.backbone, "max_positions", context)
        sample = training_sample(loaded, talk, np.random.default_rng(0), 0.0)
        assert sample is not None and labelled(loaded, sample) == expected
        assert sample["input_ids"].shape[1] <= context
    monkeypatch.setattr(loaded.backbone, "max_positions", 4)
    assert training_sample(loaded, talk, np.random.default_rng(0), 0.0) is None
    with pytest.raises(OptionError, match="every conversation is too long"):
        Conversations(loaded, [talk], (0, 0), count=1, batch=1, max_drop=0.0)[0]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_conversation_comes_once_before_any_comes_again(folder: Path, family: str) -> None:
    """Claim: batches follow from (seed, phase, index) alone, go through the data in another order
    each time, and may mix pictures of several sizes with text alone. Fails where a resumed run
    would see other samples."""
    turns = [("human", "What?"), ("gpt", "It is {}.")]
    rows = [row(n, [turns[0], ("gpt", f"It is {n}.")]) for n in range(3)]
    rows.append({"conversations": chat(turns[0], ("gpt", "It is 3."))})
    talks = conversations.read_conversations(written(folder, rows))
    loaded = model(folder, family)
    data = Conversations(loaded, talks, (5, 1), count=4, batch=2, max_drop=0.5)
    seen = []
    for index in (2, 0, 1, 3):
        item, again = data[index], data[index]
        assert all(torch.equal(item[name], again[name]) for name in item)
        for labels in item["labels"]:
            seen.append((index, loaded.tokenizer.decode(labels[labels >= 0])))
        loaded.backbone.model(**{k: v for k, v in item.items() if k not in ("kept_mask", "labels")})
    order = [text for _, text in sorted(seen, key=lambda pair: pair[0])]
    end = loaded.tokenizer.eos_token
    assert set(order[:4]) == set(order[4:]) == {f"It is {n}.{end}" for n in range(4)}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({}, "no list of conversations"),
        ([], "no list of conversations"),
        ([{"id": "x"}], "entry 0 .* it has no 'conversations'"),
        ([row(9)], "entry 0 .* there is no .*9.png"),
        ([row(), row(turns=[("robot", "Hm.")])], "entry 1 .* unknown speaker 'robot'"),
        ([row(turns=TALK[1:])], "do not take turns"),
        ([row(turns=TALK[:1])], "nothing is answered"),
        ([row(turns=[TALK[0], ("gpt", " ")])], "gpt says nothing"),
        ([row(image=["coco/0.png", "coco/1.png"])], "2 images and 1 marks"),
        ([row(image=None)], "0 images and 1 marks"),
        (["text"], "entry 0"),
    ],
)
def test_what_is_not_llavas_is_refused_in_a_sentence(folder: Path, rows: Any, says: str) -> None:
    """Claim: a file that is not whole is refused with the entry and what it lacks, before a model
    is loaded."""
    with pytest.raises(OptionError, match=says) as caught:
        conversations.read_conversations(written(folder, rows, "bad.json"))
    assert "\n" not in str(caught.value)


def test_a_mark_in_an_answer_is_a_word(folder: Path) -> None:
    """Claim: only a human shows media, so an answer that is a mark is text, also where the number
    of marks would fit. Fails if it becomes a picture of the answer."""
    turns = (("human", "Which mark?"), ("gpt", "<image>"))
    (talk,) = conversations.read_conversations(written(folder, [row(turns=turns)], "marks.json"))
    question, answer = talk.turns
    assert [part["type"] for part in question["content"]] == ["image", "text"]
    assert answer["content"] == [{"type": "text", "text": "<image>"}]


def test_a_line_an_entry_and_files_that_are_none(folder: Path) -> None:
    """Claim: .jsonl has an entry a line; what cannot be read is said."""
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row(n)) for n in range(2)))
    assert [talk.id for talk in conversations.read_conversations(str(folder / "data.jsonl"))] == [
        "r0",
        "r1",
    ]
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    assert (
        conversations.read_conversations(written(elsewhere, [row()]), str(folder))[0]
        .images[0]
        .exists()
    )
    (folder / "none.json").write_text("{")
    for name, says in (("none.json", "is not JSON"), ("nowhere.json", "cannot read")):
        with pytest.raises(OptionError, match=says):
            conversations.read_conversations(str(folder / name))
