"""Claims about captioners: what comes with them works, on frames alone, and fails in a sentence."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers import AMOUNT, WORDS, backbone, input_for, llama, noisy, qwen25, truth
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import saccade
from saccade.core.errors import ModelError
from saccade.drafting.views import basic
from saccade.inputs import captions
from saccade.world import drawing, scenes

pytestmark = pytest.mark.usefixtures("unchecked")

UNSEEN = 30_000_000  # training draws its seeds below 10,000,000
FRAMES = [np.full((40, 48, 3), 40 * i, dtype=np.uint8) for i in range(5)]
SAYABLE = "a red blue green box circle star on the left right above below is are two three".split()


@cache
def frames_of(seed: int) -> list[np.ndarray]:
    return list(drawing.render(scenes.scene(seed), 8, 112))


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BLIP with its processor, saved as a checkpoint folder."""
    words = [*"[PAD] [UNK] [CLS] [SEP] [MASK] [DEC]".split(), *SAYABLE]
    vocab = {word: number for number, word in enumerate(words)}
    layers = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.BlipConfig(
        text_config=layers
        | dict(
            vocab_size=len(words),
            encoder_hidden_size=16,
            max_position_embeddings=80,
            bos_token_id=5,
            eos_token_id=3,
            sep_token_id=3,
            pad_token_id=0,
        ),
        vision_config=layers | dict(image_size=32, patch_size=8),
        projection_dim=16,
        image_text_hidden_size=16,
    )
    torch.manual_seed(1)
    model = transformers.BlipForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 3 / weight[0].numel() ** 0.5)
            if name.endswith("predictions.bias") or name.endswith("decoder.bias"):
                weight[:6] = -100  # words only
    processor = transformers.BlipProcessor(
        transformers.BlipImageProcessor(size=dict(height=32, width=32)),
        transformers.BertTokenizer(vocab=vocab, bos_token="[DEC]"),
    )
    folder = tmp_path_factory.mktemp("captioners") / "blip"
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_blip_folder_captions_the_middle_frame(blip):
    """Claim: one caption, of words alone, the same every time, from the middle frame and no other.

    Fails if specials are left in it, if another frame is read, or if the prompt is repeated.
    """
    caption = captions.captioner(str(blip), [FRAMES])
    assert caption.question is None
    ((text,),) = caption({})
    assert text and set(text.split()) <= set(SAYABLE)
    assert caption({}) == [[text]]
    others = [FRAMES[0], FRAMES[1], FRAMES[2], FRAMES[0], FRAMES[1]]
    assert captions.captioner(str(blip), [others])({}) == [[text]]
    assert caption.frames == [FRAMES[2]]


def test_a_captioner_may_lie_in_the_home_folder(blip, monkeypatch):
    """Claim: a captioner's folder may begin with ~, as a target's may."""
    monkeypatch.setenv("HOME", str(Path(blip).parent))
    captioner = captions.captioner(f"~/{Path(blip).name}", [FRAMES])
    assert captioner({}) == captions.captioner(str(blip), [FRAMES])({})


def test_captions_have_an_end(blip):
    """Claim: a model that never ends by itself is cut at the stated number of tokens."""
    ((text,),) = captions.captioner(str(blip), [FRAMES])({})
    assert captions.MAX_TOKENS - 2 <= len(text.split()) <= captions.MAX_TOKENS


class Asked(dict[str, Any]):
    """What a processor made of a frame, on whatever device."""

    def to(self, device: Any) -> Asked:
        return self


class Kind:
    """A stand-in for a captioner of a kind: writes down what it is asked for, and answers."""

    device = "cpu"

    def __init__(self, kind: str) -> None:
        self.config = transformers.BartConfig()  # an encoder and a decoder, as Florence-2
        self.config.model_type = kind
        self.texts: list[str | None] = []
        self.beams: list[int] = []

    def __call__(self, *, images: Any, return_tensors: str, text: str | None = None) -> Asked:
        self.texts.append(text)
        return Asked(input_ids=torch.tensor([[7, 8, 9]]))

    def generate(self, *, input_ids: Any, num_beams: int, do_sample: bool, **more: Any) -> Any:
        self.beams.append(num_beams)
        assert not do_sample and more == {"max_new_tokens": captions.MAX_TOKENS}
        return torch.tensor([[0, 1, 2, 3]])

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, ids.tolist()))


@pytest.mark.parametrize(
    ("kind", "task", "beams"), [("florence2", "<CAPTION>", 3), ("blip", None, 1)]
)
def test_florence_2_is_asked_for_its_task_with_its_beams(kind, task, beams):
    """Claim: a Florence-2 is asked for each frame by the task prompt ``<CAPTION>`` with 3 beams, as
    TABED's published code asks it, and all that its decoder wrote is the caption: the prompt is its
    encoder's. The control: another kind is asked for nothing, with one beam."""
    recorder = Kind(kind)
    assert captions.ImageToText(recorder, recorder, FRAMES[:2])({}) == [["0 1 2 3"] * 2]
    assert recorder.texts == [task] * 2 and recorder.beams == [beams] * 2


def test_captions_are_made_one_call_at_a_time(monkeypatch):
    """Claim: calls from several threads caption one after the other, since a model may keep what it
    read last on itself. Fails where two are under way at once."""
    inside, most = [], []

    def write_caption(self: Any, frame: Any) -> str:
        inside.append(frame)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return "a box"

    monkeypatch.setattr(captions.ImageToText, "_caption", write_caption)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(captions.ImageToText(None, None, FRAMES[:2]), {}) for _ in range(4)]
    assert [call.result() for call in calls] == [[["a box", "a box"]]] * 4
    assert max(most) == 1 and len(most) == 8


def test_tabed_reads_the_caption_and_stays_lossless(blip):
    """Claim: tabed-mtcp puts the BLIP's very words in the place of the video, and its answer is the
    target's. Fails if the caption is never asked for, or drafting gave up on the way.
    """
    captioner = captions.captioner(str(blip), [FRAMES])
    caption_texts: list[str] = []
    heard: list[str] = []

    def overheard(inputs: Any) -> list[str]:
        caption_texts.extend(*captioner(inputs))
        return caption_texts[-1:]

    class Heard(type(WORDS["tokenizer"])):  # type: ignore[misc]
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            heard.append(text)
            return super().encode(text, add_special_tokens)

    result = saccade.run(
        backbone(qwen25()),
        input_for("qwen2_5_vl"),
        draft=backbone(noisy(qwen25, 0, AMOUNT)),
        method="tabed-mtcp",
        tokenizer=Heard(),
        captioner=overheard,
        max_new_tokens=40,
        do_sample=False,
    )
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    assert len(caption_texts) == 1 and f"image: {caption_texts[0]}" in heard


def test_control_the_caption_matters_to_the_draft(blip):
    """Control: another caption drafts otherwise under sd/view=caption, for the same answer."""
    drafted = []
    for text in (captions.captioner(str(blip), [FRAMES])({})[0][0], "nothing at all"):
        result = saccade.run(
            backbone(qwen25()),
            input_for("qwen2_5_vl"),
            draft=backbone(noisy(qwen25, 0, AMOUNT)),
            method="sd/view=caption",
            tokenizer=WORDS["tokenizer"],
            captioner=lambda inputs, text=text: [text],
            max_new_tokens=20,
        )
        assert result.ids == truth("qwen2_5_vl")[:20] and result.fallback_reason is None
        drafted.append([r.tokens for r in result.rounds])
    assert drafted[0] != drafted[1]
    assert basic.CAPTION.text_kind == "caption"


# -- the embedded ones -------------------------------------------------------------------------


def named(text: str) -> set[tuple[str, str]]:
    """The (colour, shape) pairs a text names."""
    pattern = rf"\b({'|'.join(scenes.COLORS)}) ({'|'.join(scenes.SHAPES)})\b"
    return set(re.findall(pattern, text))


def shapes(seed: int) -> set[tuple[str, str]]:
    """The (colour, shape) pairs of the middle frame."""
    scene = scenes.scene(seed)
    return {(s.color, scene.objects[s.index].shape) for s in scenes.visible_states(scene, 4.5 / 8)}


def hits(texts: Sequence[str], seeds: Sequence[int]) -> int:
    return sum(bool(named(text) & shapes(seed)) for text, seed in zip(texts, seeds, strict=True))


@pytest.mark.extra
@pytest.mark.usefixtures("pair")
def test_the_embedded_captioner_says_what_is_there():
    """Claim: of ten clips it never saw, the embedded captioner names a thing (colour *and* shape)
    of the middle frame in at least eight. The control: the same captions held against each other
    clip in turn hit at most half as often; that is what chance gives.
    """
    seeds = range(UNSEEN, UNSEEN + 10)
    texts = []
    for seed in seeds:
        ((text,),) = captions.captioner(captions.SHAPES, [frames_of(seed)])({})
        assert isinstance(text, str) and named(text)
        texts.append(text)
    right = hits(texts, seeds)
    assert right >= 8
    for turn in range(1, 10):
        assert hits(texts, [*seeds[turn:], *seeds[:turn]]) <= right // 2


def test_a_chat_model_is_asked_and_not_repeated(pair):
    """Claim: a model with a chat template, loaded from its folder, is asked in its own format, and
    its caption holds the answer alone: no question, no role, no special token.
    """
    caption = captions.captioner(str(pair / "target"), [frames_of(UNSEEN)])
    assert caption.question == "Describe the image."
    ((text,),) = caption({})
    assert text and text == text.strip()
    assert not re.search(r"<\||\buser\b|\bassistant\b|Describe the image", text)
    assert caption({}) == [[text]]


def test_the_embedded_captioner_is_loaded_once(pair):
    """Claim: a model is read from disk once, however many clips ask for it."""
    one = captions.captioner(captions.SHAPES, [frames_of(UNSEEN)])
    two = captions.captioner(captions.SHAPES, [frames_of(UNSEEN + 1)])
    assert one.model is two.model and one.frames is not two.frames
    folder = str(pair / "target")
    assert captions.captioner(folder, [FRAMES]).model is captions.captioner(folder, [FRAMES]).model


# -- what cannot caption -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("captioners") / "llama"
    llama(0, 1).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def no_config(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def no_weights(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "blip"}')
    return folder


def not_json(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def no_processor(folder: Path) -> Path:
    qwen25(0, 1).save_pretrained(folder)
    return folder


INVALID_LOGITS_MESSAGE: dict[str, Any] = {
    "no folder": lambda folder: folder / "nowhere",
    "no config": no_config,
    "no weights": no_weights,
    "no json": not_json,
    "no processor": no_processor,
}


def assert_a_sentence(error: BaseException, name: str) -> None:
    message = str(error)
    assert name in message and "\n" not in message and len(message) > 20


@pytest.mark.parametrize("kind", INVALID_LOGITS_MESSAGE)
def test_a_folder_that_holds_no_captioner_is_refused_in_a_sentence(kind, tmp_path):
    """Claim: whatever is wrong with a folder is one sentence that names it."""
    folder = str(INVALID_LOGITS_MESSAGE[kind](tmp_path))
    with pytest.raises(ModelError) as caught:
        captions.captioner(folder, [FRAMES])
    assert_a_sentence(caught.value, folder)


def test_a_text_only_model_is_refused_in_a_sentence(text_only):
    """Claim: a model that reads no images is no captioner, and that is said when it is loaded."""
    with pytest.raises(ModelError) as caught:
        captions.captioner(str(text_only), [FRAMES])
    assert_a_sentence(caught.value, str(text_only))


def test_an_unknown_name_is_refused_in_a_sentence(monkeypatch):
    """Claim: a hub id that is not at hand, offline, is one sentence too."""
    # the hub's client reads the environment when it is imported, before any test
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        captions.captioner("nobody/no-such-captioner", [FRAMES])
    assert_a_sentence(caught.value, "nobody/no-such-captioner")
