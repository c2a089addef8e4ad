"""Makes, writes and loads the tokenizer, processor and checkpoint folders of the embedded pair.

The pair is a small Qwen2.5-VL target and draft, trained on a synthetic world (`train.py`).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from lab.training.model import SPECIAL, SPECIAL_ID, VOCAB, create
from saccade.inputs.checkpoints import EMBEDDED
from saccade.inputs.training_domain import DOMAIN_FILE
from saccade.world import dialogues, scenes

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}"
    "{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' or 'video' in c %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# This is Qwen2's own splitting rule.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PIXELS = dict(shortest_edge=28 * 28, longest_edge=1024 * 1024)
IMAGES: dict[str, Any] = dict(
    size=_PIXELS,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
)


def _sentences(count: int) -> Iterator[str]:
    """Yields the questions and answers of conversations about the world."""
    for seed in range(count):
        scene = scenes.scene(seed)
        for turn in dialogues.conversation(
            scene, dialogues.TASKS[seed % len(dialogues.TASKS)], seed
        ):
            yield turn.question
            yield turn.answer


def train_tokenizer(samples: int = 4000) -> Qwen2Tokenizer:
    """Trains a byte-level BPE of `VOCAB` entries on conversations about the world."""
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Every chat has the names of roles, which these conversations lack. They are repeated, so that
    # each becomes one token.
    raw.train_from_iterator([*_sentences(samples), *["user\nassistant\nsystem\n"] * 50], trainer)
    size = raw.get_vocab_size()
    # Unused tokens fill the vocabulary, so that the special tokens get the last ids.
    raw.add_tokens([f"<|unused_{i}|>" for i in range(VOCAB - len(SPECIAL) - size)])
    raw.add_special_tokens(list(SPECIAL))
    tokenizer = Qwen2Tokenizer(
        tokenizer_object=raw,
        unk_token=SPECIAL[0],
        eos_token="<|im_end|>",
        pad_token=SPECIAL[0],
        bos_token=None,
        extra_special_tokens=list(SPECIAL[1:]),
        model_max_length=32768,
    )
    if {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL} != SPECIAL_ID:
        raise RuntimeError("the tokenizer's special tokens do not have the ids the model expects")
    return tokenizer


def make_processor(samples: int = 4000) -> Qwen2_5_VLProcessor:
    """Makes the processor, which rounds the sides of a frame to multiples of 28 pixels.

    Only frames below 28 x 28 or above 1024 x 1024 pixels in all are also enlarged or reduced.
    """
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**IMAGES),
        tokenizer=train_tokenizer(samples),
        video_processor=Qwen2VLVideoProcessor(
            **IMAGES, do_sample_frames=False, cap_pixels_per_frame=False
        ),
        chat_template=CHAT_TEMPLATE,
    )


def save(
    model: Qwen2_5_VLForConditionalGeneration, proc: Qwen2_5_VLProcessor, folder: Path
) -> None:
    """Writes an ordinary checkpoint folder with weights rounded to bfloat16.

    The model itself is not changed.
    """
    rounded = create(model.config.text_config.num_hidden_layers)
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    rounded.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[SPECIAL_ID["<|im_end|>"], SPECIAL_ID["<|endoftext|>"]],
        pad_token_id=SPECIAL_ID["<|endoftext|>"],
    )
    rounded.save_pretrained(folder)
    proc.save_pretrained(folder)
    shutil.copy(EMBEDDED / "target" / DOMAIN_FILE, folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def load(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    """Loads a saved model of the pair, with its rounded weights in float32."""
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )


def load_processor(folder: Path) -> Qwen2_5_VLProcessor:
    """Loads the processor of a folder."""
    return Qwen2_5_VLProcessor.from_pretrained(folder, local_files_only=True)
