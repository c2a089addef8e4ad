"""Claims about what requests share: media, vision and prompts are read once, answers stay."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serve.live import METHOD, Live, image_part, made, serving, text_part, video_part

from saccade.cli.serve import _parse_size
from saccade.core.errors import OptionError
from saccade.inputs import Pair
from saccade.inputs.media import FrameSampling, Limits
from saccade.inputs.media.fetch import Sources
from saccade.serve.server_settings import MediaSettings

MEDIA = MediaSettings(sampling=FrameSampling(num_frames=16))

QUESTIONS = ("Describe the video.", "What colour is it?", "How many objects are there?")


@pytest.fixture(scope="module")
def keeping(models: Pair) -> Iterator[Live]:
    with serving(lambda: made(models, METHOD, media=MEDIA)) as live:
        yield live


@pytest.fixture(scope="module")
def forgetting(models: Pair) -> Iterator[Live]:
    with serving(lambda: made(models, METHOD, media=MEDIA, prefix_cache=0)) as live:
        yield live


def _cached(answer: Any) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _text(answer: Any) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def test_another_question_about_a_video_is_answered_as_without(keeping, forgetting, clips):
    """Claim: the first question reads all, later ones little but their own words; greedy and drawn
    answers, and how many drafts were accepted, are those of a server that keeps nothing."""
    for place, question in enumerate(QUESTIONS):
        content = [video_part(clips[0]), text_part(question)]
        for settings in ({}, dict(temperature=1.0, seed=place), dict(min_p=0.1, seed=5)):
            answer, plain = (each.ask(content, **settings) for each in (keeping, forgetting))
            assert _text(answer) == _text(plain) and _cached(plain) == 0
            first = place == 0 and not settings
            usage = answer.json()["usage"]
            assert first == (_cached(answer) == 0)
            assert first or _cached(answer) > 0.9 * usage["prompt_tokens"]
            assert answer.json()["metrics"] == plain.json()["metrics"]


def test_no_decoder_runs_twice_for_the_same_bytes(keeping, clips, picture, monkeypatch):
    """Claim: media come from what is kept, told by their bytes; other bytes are decoded."""
    assert keeping.service.engine is not None
    decoder_pool = keeping.service.engine.reader._decoders
    decoded: list[str] = []
    before = decoder_pool._clip

    def counted(task: str, *args: Any) -> Any:
        decoded.append(task)
        return before(task, *args)

    monkeypatch.setattr(decoder_pool, "_clip", counted)
    for part in (video_part(clips[2]), image_part(picture)):
        for question in QUESTIONS:
            assert keeping.ask([part, text_part(question)]).status_code == 200
    assert decoded == ["read", "read_image"]
    keeping.ask([video_part(clips[3]), text_part("hi")])
    assert decoded == ["read", "read_image", "read"]


@pytest.mark.extra
def test_no_processor_works_twice_on_the_same_frames(
    keeping, forgetting, clips, picture, monkeypatch
):
    """Claim: pixels come from what is kept, told by the frames and how they are to be made; the
    answer is that of a server that keeps nothing, whose processor works each time."""
    processor = keeping.service.engine.reader._target.processor
    worked: list[str] = []
    for kind in ("video_processor", "image_processor"):
        whole = type(getattr(processor, kind))._preprocess

        def counted(
            self: Any, *args: Any, kind: str = kind, whole: Any = whole, **more: Any
        ) -> Any:
            worked.append(kind)
            return whole(self, *args, **more)

        monkeypatch.setattr(type(getattr(processor, kind)), "_preprocess", counted)
    for part, kind in (
        (video_part(clips[3]), "video_processor"),
        (image_part(picture), "image_processor"),
    ):
        for place, question in enumerate(QUESTIONS):
            worked.clear()
            answer = keeping.ask([part, text_part(f"{question} Now?")])
            assert (worked == []) or place == 0
            plain = forgetting.ask([part, text_part(f"{question} Now?")])
            assert worked[-1] == kind and _text(answer) == _text(plain)


@pytest.mark.extra
def test_a_file_that_changed_is_read_again(models, clips, tmp_path):
    """Claim: another video under the same name is another video."""
    path = tmp_path / "clip.mp4"
    part = {"type": "video_url", "video_url": {"url": f"file://{path}"}}
    content = [part, text_part("Describe the video.")]
    media = replace(MEDIA, sources=Sources(root=tmp_path), limits=Limits(root=tmp_path))
    with serving(lambda: made(models, METHOD, media=media)) as live:
        shutil.copy(clips[0], path)
        assert [_cached(live.ask(content)) > 0 for _ in range(2)] == [False, True]
        shutil.copy(clips[1], path)
        changed = live.ask(content)
        expected = live.ask([video_part(clips[1]), text_part("Describe the video.")])
        assert _text(changed) == _text(expected)
        assert _cached(changed) < _cached(expected)


@pytest.mark.extra
def test_requests_at_once_share_what_is_kept(keeping, forgetting, clips):
    """Claim: four questions about one video at the same time get their answers alone."""
    content = [[video_part(clips[1]), text_part(f"{q} {n}")] for q in QUESTIONS[:2] for n in "ab"]
    expected = [_text(forgetting.ask(each)) for each in content]
    answers: dict[int, str] = {}

    def ask(place: int) -> None:
        answers[place] = _text(keeping.ask(content[place]))

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[place] for place in range(4)] == expected


@pytest.mark.extra
def test_little_room_keeps_little(models, clips):
    """Claim: bytes stay within the bound whatever is asked, and /metrics tells of them."""
    with serving(lambda: made(models, METHOD, media=MEDIA, prefix_cache=3 << 20)) as live:
        for clip in clips:
            assert live.ask([video_part(clip), text_part("hi")]).status_code == 200
        assert live.service.engine is not None
        kept = live.service.engine.prefix_cache
        assert 0 < kept.bytes <= 3 << 20
        numbers = dict(
            line.rsplit(" ", 1) for line in live.client.get("/metrics").text.splitlines()
        )
        assert float(numbers["saccade_prefix_cache_bytes"]) == kept.bytes
        assert "saccade_prefix_cache_hits_total" in numbers


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("0", 0), ("1.5 MiB", 3 << 19), ("64k", 64_000)],
)
def test_sizes_are_read(text, size):
    """Claim: sizes are bytes, of 1000 or 1024 as they say."""
    assert _parse_size(text) == size


@pytest.mark.representatives(2)
@pytest.mark.parametrize("text", ["", "two", "-1", "1e9", "2GiBs", "inf"])
def test_what_is_no_size_is_refused(text):
    """Claim: anything else is told in one sentence with what would do."""
    with pytest.raises(OptionError, match="write 2GiB"):
        _parse_size(text)


def test_a_later_message_with_a_picture_reads_that_picture_alone(
    keeping, forgetting, models, clips, picture
):
    """Claim: where a later message brings a picture, the vision tower runs on the picture alone,
    the rows of all earlier messages come from the prefix cache, and the answer is that of a server
    that keeps nothing. Fails if a new picture makes the tower read the video again."""
    base = models.target.backbone.model.base_model
    patches: list[int] = []

    def count(module: Any, args: Any) -> None:
        patches.append(len(args[0]))

    hook = base.visual.patch_embed.register_forward_pre_hook(count)
    content = [video_part(clips[3]), text_part(QUESTIONS[0])]
    later = [image_part(picture), text_part("And here?")]
    try:
        first = keeping.ask(content)
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": _text(first)},
            {"role": "user", "content": later},
        ]
        del patches[:]
        answer = keeping.ask(messages=messages)
        read = [*patches]
        plain = forgetting.ask(messages=messages)
    finally:
        hook.remove()
    assert len(read) == 1 and len(patches) > 1, "the picture, and in the control the video too"
    assert _text(answer) == _text(plain) and _cached(plain) == 0
    assert _cached(answer) >= first.json()["usage"]["prompt_tokens"] - 1
