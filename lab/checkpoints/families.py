"""Builds the config and the processor of each family's tiny checkpoint.

The tests run on checkpoints of a few layers with random weights, which ``lab.checkpoints`` makes of
what is built here. A family is an architecture of transformers, such as Qwen2-VL; those of 2025 and
2026 are in ``newer_families.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers as hf

# Sides of a patch and of a picture, in pixels: a picture has 4 x 4 patches, or 2 x 2 tokens if four
# patches are merged.
PATCH, SIDE = 14, 56
# The settings of a tiny vision tower.
TOWER: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
# The settings of an image processor that maps pixels from 0..1 to -1..1.
NORMAL = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
TILES = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
"""The picture sizes that "any resolution" families cut into tiles, in pixels."""


@dataclass(frozen=True)
class Size:
    """The size of the language model."""

    layers: int = 2
    hidden: int = 128
    vocab: int = 320  # Rows of the embedding; the tokenizer uses fewer.
    # Whether the embedding is the output matrix as well. ``lab.checkpoints`` sets this in the
    # config afterwards, in place of what the functions here say.
    tied: bool = False

    def text(self, **more: Any) -> dict[str, Any]:
        """Returns the fields of a text config, with ``more`` fields of a family."""
        heads = self.hidden // 32
        return dict(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 5 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=16384,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            **more,
        )


Ids = Mapping[str, int]
Parts = tuple[Any, Callable[[Any, str], Any]]
"""A model's config, and a function from (tokenizer, chat template) to its processor."""


@dataclass(frozen=True)
class Family:
    """What a family needs: its markup, its special tokens, and how its parts are built.

    Markup is the text that stands for an image, a video or a sound in the chat template. It is
    empty if the family reads none.
    """

    # Called with the language model's size and the ids of ``tokens`` by name.
    build: Callable[[Size, Ids], Parts]
    image: str = ""
    video: str = ""
    audio: str = ""
    # The text of special tokens, by the name of the tokenizer's attribute, such as "image_token".
    tokens: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()  # Further special tokens, for which the tokenizer has no attribute.


# -- Qwen: a grid of patches, four of which merge, with positions on three axes ------------------

MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6])
# Between these numbers of pixels a processor resizes a picture or a video. They are areas, although
# transformers calls them edges.
PIXELS = dict(shortest_edge=28 * 28, longest_edge=SIDE * SIDE * 64)
QWEN_IMAGES: dict[str, Any] = dict(size=PIXELS, patch_size=PATCH, merge_size=2, **NORMAL)
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


def _qwen_ids(ids: Ids) -> dict[str, int]:
    return {f"{name}_id": number for name, number in ids.items()}


def _qwen_processor(kind: Any, images: Any, videos: Any, **more: Any) -> Callable[[Any, str], Any]:
    settings = QWEN_IMAGES | dict(temporal_patch_size=2) | more
    return lambda tokenizer, template: kind(
        image_processor=images(**settings),
        tokenizer=tokenizer,
        video_processor=videos(**settings, do_sample_frames=False, cap_pixels_per_frame=False),
        chat_template=template,
    )


def _qwen2(size: Size, ids: Ids) -> Parts:
    config = hf.Qwen2VLConfig(
        text_config=size.text(rope_parameters=MROPE),
        vision_config=dict(
            depth=1, embed_dim=32, hidden_size=size.hidden, num_heads=2, mlp_ratio=2
        ),
        tie_word_embeddings=False,
        **_qwen_ids(ids),
    )
    return config, _qwen_processor(
        hf.Qwen2VLProcessor, hf.Qwen2VLImageProcessor, hf.Qwen2VLVideoProcessor
    )


def _qwen25_vision(size: Size) -> dict[str, Any]:
    return dict(
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=size.hidden,
        window_size=SIDE,
        fullatt_block_indexes=[1],
    )


def _qwen25(size: Size, ids: Ids) -> Parts:
    config = hf.Qwen2_5_VLConfig(
        text_config=size.text(rope_parameters=MROPE),
        vision_config=_qwen25_vision(size) | dict(tokens_per_second=2),
        tie_word_embeddings=False,
        **_qwen_ids(ids),
    )
    return config, _qwen_processor(
        hf.Qwen2_5_VLProcessor, hf.Qwen2VLImageProcessor, hf.Qwen2VLVideoProcessor
    )


def _qwen3(config: Any, **more: Any) -> Callable[[Size, Ids], Parts]:
    """Returns the builder of a Qwen3-VL family; ``more`` has the language model's experts."""

    def build(size: Size, ids: Ids) -> Parts:
        vision = dict(
            depth=3,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            patch_size=PATCH,
            out_hidden_size=size.hidden,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        )
        rope = MROPE | dict(mrope_interleaved=True)
        model_config = config(
            text_config=size.text(rope_parameters=rope, head_dim=32, **more),
            vision_config=vision,
            tie_word_embeddings=False,
            **_qwen_ids(ids),
        )
        return model_config, _qwen_processor(
            hf.Qwen3VLProcessor, hf.Qwen2VLImageProcessor, hf.Qwen3VLVideoProcessor
        )

    return build


OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def _omni(size: Size, ids: Ids) -> Parts:
    """Returns the parts of Qwen 2.5 Omni without its voice.

    As in the hub's checkpoints, the config is the whole model's, with the thinker's inside. Only
    the thinker, which writes the text, is loaded from such a checkpoint.
    """
    thinker = hf.Qwen2_5OmniThinkerConfig(
        audio_config=dict(
            num_mel_bins=16,
            encoder_layers=1,
            encoder_attention_heads=2,
            encoder_ffn_dim=48,
            d_model=32,
            n_window=20,
            output_dim=size.hidden,
        ),
        vision_config=_qwen25_vision(size),
        text_config=size.text(rope_parameters=MROPE),
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        audio_token_index=ids["audio_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        tie_word_embeddings=False,
    )

    def processor(tokenizer: Any, template: str) -> Any:
        settings = QWEN_IMAGES | dict(temporal_patch_size=2)
        return hf.Qwen2_5OmniProcessor(
            image_processor=hf.Qwen2VLImageProcessor(**settings),
            video_processor=hf.Qwen2VLVideoProcessor(
                **settings, do_sample_frames=False, cap_pixels_per_frame=False
            ),
            feature_extractor=hf.WhisperFeatureExtractor(feature_size=16, chunk_length=4),
            tokenizer=tokenizer,
            chat_template=template,
        )

    whole = hf.Qwen2_5OmniConfig(thinker_config=thinker.to_dict(), enable_audio_output=False)
    return whole, processor


# -- LLaVA: square pictures, whole or in tiles, some with newline tokens -------------------------

LLAVA_TOKENS = {"image_token": "<image>", "video_token": "<video>"}


def _clip(**more: Any) -> dict[str, Any]:
    """Returns the settings of a CLIP vision tower, with ``more`` settings."""
    kind = dict(model_type="clip_vision_model", image_size=SIDE, patch_size=PATCH)
    return TOWER | dict(num_hidden_layers=2) | kind | more


def _squares(**more: Any) -> dict[str, Any]:
    """Returns the settings of a processor that crops pictures to squares, with ``more``."""
    edge = dict(height=SIDE, width=SIDE)
    return dict(size=dict(shortest_edge=SIDE), crop_size=edge, **NORMAL, **more)


def _llava(
    config: Any, processor: Any, images: Any, videos: Any = None, *, tiles: bool = True, **more: Any
) -> Callable[[Size, Ids], Parts]:
    """Returns the builder of a LLaVA family.

    With ``tiles``, pictures are cut into tiles. ``videos`` is the class of the video processor, or
    None if the family reads no videos. ``more`` has further fields of the config.
    """
    cut: dict[str, Any] = dict(image_grid_pinpoints=TILES) if tiles else {}

    def build(size: Size, ids: Ids) -> Parts:
        model_config = config(
            vision_config=_clip(),
            text_config=dict(model_type="llama", **size.text()),
            image_seq_length=(SIDE // PATCH) ** 2,
            tie_word_embeddings=False,
            **{f"{name}_index": number for name, number in ids.items()},
            **cut,
            **more,
        )
        readers = dict(image_processor=images(**_squares(**cut)))
        if videos is not None:
            readers |= dict(video_processor=videos(**_squares(do_sample_frames=False)))
        return model_config, lambda tokenizer, template: processor(
            **readers,
            tokenizer=tokenizer,
            chat_template=template,
            patch_size=PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )

    return build


def _onevision(size: Size, ids: Ids) -> Parts:
    vision = _clip(vision_use_head=False) | dict(model_type="siglip_vision_model")
    config = hf.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=dict(model_type="qwen2", **size.text()),
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        image_grid_pinpoints=TILES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    edge = dict(size=dict(height=SIDE, width=SIDE), **NORMAL)
    return config, lambda tokenizer, template: hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(**edge, image_grid_pinpoints=TILES),
        video_processor=hf.LlavaOnevisionVideoProcessor(**edge, do_sample_frames=False),
        tokenizer=tokenizer,
        chat_template=template,
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
    )


# -- other vision-language families ------------------------------------------------------------


def _internvl(size: Size, ids: Ids) -> Parts:
    cells = (SIDE // PATCH // 2) ** 2
    config = hf.InternVLConfig(
        vision_config=TOWER | dict(image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH]),
        text_config=dict(model_type="qwen2", **size.text()),
        image_token_id=ids["context_image_token"],
        image_seq_length=cells,
        tie_word_embeddings=False,
    )
    edge = dict(size=dict(height=SIDE, width=SIDE), **NORMAL)
    return config, lambda tokenizer, template: hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessor(**edge, crop_to_patches=True, max_patches=4),
        tokenizer=tokenizer,
        video_processor=hf.InternVLVideoProcessor(**edge),
        image_seq_length=cells,
        chat_template=template,
    )


def _video_llama(size: Size, ids: Ids) -> Parts:
    config = hf.VideoLlama3Config(
        vision_config=TOWER | dict(patch_size=PATCH),
        text_config=dict(model_type="qwen2", **size.text()),
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        tie_word_embeddings=False,
    )
    settings = dict(size=PIXELS, patch_size=PATCH, **NORMAL)
    return config, lambda tokenizer, template: hf.VideoLlama3Processor(
        image_processor=hf.VideoLlama3ImageProcessor(**settings),
        tokenizer=tokenizer,
        video_processor=hf.VideoLlama3VideoProcessor(**settings, do_sample_frames=False),
        chat_template=template,
    )


def _smolvlm(size: Size, ids: Ids) -> Parts:
    """Builds SmolVLM, whose processor needs the package num2words."""
    config = hf.SmolVLMConfig(
        vision_config=TOWER | dict(image_size=SIDE, patch_size=PATCH),
        text_config=dict(model_type="llama", **size.text()),
        image_token_id=ids["image_token"],
        scale_factor=2,
        tie_word_embeddings=False,
    )
    edges = dict(size=dict(longest_edge=2 * SIDE), max_image_size=dict(longest_edge=SIDE), **NORMAL)
    return config, lambda tokenizer, template: hf.SmolVLMProcessor(
        image_processor=hf.SmolVLMImageProcessor(**edges),
        tokenizer=tokenizer,
        video_processor=hf.SmolVLMVideoProcessor(**edges, do_sample_frames=False),
        image_seq_len=(SIDE // PATCH // 2) ** 2,
        chat_template=template,
    )


# -- text only ---------------------------------------------------------------------------------


def _llama(size: Size, ids: Ids) -> Parts:
    def tokenizer_alone(tokenizer: Any, template: str) -> Any:
        tokenizer.chat_template = template
        return tokenizer

    return hf.LlamaConfig(**size.text(head_dim=32)), tokenizer_alone


def _qwen(build: Callable[[Size, Ids], Parts], *, each_frame: bool = False) -> Family:
    """Returns a Qwen family.

    With ``each_frame``, the processor itself puts the start and end tokens around every frame, so
    the markup of a video has none.
    """
    start = QWEN_TOKENS["vision_start_token"]
    end = QWEN_TOKENS["vision_end_token"]
    image = QWEN_TOKENS["image_token"]
    video = QWEN_TOKENS["video_token"]
    video_markup = video if each_frame else f"{start}{video}{end}"
    return Family(build, f"{start}{image}{end}", video_markup, tokens=QWEN_TOKENS)


FAMILIES: dict[str, Family] = {
    "qwen2-vl": _qwen(_qwen2),
    "qwen2.5-vl": _qwen(_qwen25),
    "qwen3-vl": _qwen(_qwen3(hf.Qwen3VLConfig), each_frame=True),
    "qwen3-vl-moe": _qwen(
        _qwen3(hf.Qwen3VLMoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
        each_frame=True,
    ),
    "llava-onevision": Family(_onevision, "<image>\n", "<video>\n", tokens=LLAVA_TOKENS),
    "llava-1.5": Family(
        _llava(hf.LlavaConfig, hf.LlavaProcessor, hf.CLIPImageProcessor, tiles=False),
        "<image>\n",
        tokens={"image_token": "<image>"},
    ),
    "llava-next": Family(
        _llava(hf.LlavaNextConfig, hf.LlavaNextProcessor, hf.LlavaNextImageProcessor),
        "<image>\n",
        tokens={"image_token": "<image>"},
    ),
    "llava-next-video": Family(
        _llava(
            hf.LlavaNextVideoConfig,
            hf.LlavaNextVideoProcessor,
            hf.LlavaNextImageProcessor,
            hf.LlavaNextVideoVideoProcessor,
        ),
        "<image>\n",
        "<video>\n",
        tokens=LLAVA_TOKENS,
    ),
    "qwen2.5-omni": Family(
        _omni,
        "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        OMNI_TOKENS,
    ),
    "llama": Family(_llama),
    "internvl": Family(
        _internvl,
        "<IMG_CONTEXT>\n",
        "<video>\n",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "video-llava": Family(
        _llava(
            hf.VideoLlavaConfig,
            hf.VideoLlavaProcessor,
            hf.VideoLlavaImageProcessor,
            hf.VideoLlavaVideoProcessor,
            tiles=False,
            video_seq_length=8 * ((SIDE // PATCH) ** 2 + 1),  # 8 frames, each with a class token.
        ),
        "<image>\n",
        "<video>\n",
        tokens=LLAVA_TOKENS,
    ),
    "video-llama-3": Family(
        _video_llama,
        "<|image_pad|>\n",
        "<|video_pad|>\n",
        tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    ),
    "smolvlm": Family(
        _smolvlm,
        "<image>",
        "<video>",
        tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    ),
}
