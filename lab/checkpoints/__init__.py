"""Tiny random checkpoints of every family, made offline in the format of the real ones.

What the tests load and what a contributor needs to try a family: config, weights, tokenizer,
processor and chat template, as ``save_pretrained`` writes them. Nothing was trained; weights are
scaled so that greedy text varies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lab.checkpoints import families
from lab.checkpoints.families import SIDE, TILES, Family, Size
from lab.checkpoints.newer_families import NEWER_FAMILIES
from saccade.core.errors import OptionError

__all__ = ["FAMILIES", "SIDE", "TILES", "Size", "make"]

FAMILIES = {**families.FAMILIES, **NEWER_FAMILIES}

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TEMPLATE = (
    (
        "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n"
        "{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}"
        "{%- for c in m['content'] -%}"
        "{%- if c['type'] == 'image' -%}IMAGE{%- elif c['type'] == 'video' -%}VIDEO"
        "{%- elif c['type'] == 'audio' -%}AUDIO{%- else -%}{{ c['text'] }}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    .replace("}}\n", "}}{{ '\\n' }}")
    .replace(">\n", ">{{ '\\n' }}")
    .replace("nt\n", "nt{{ '\\n' }}")
)


def make(
    name: str,
    folder: str | Path,
    *,
    seed: int = 0,
    size: Size | None = None,
    noise: float = 0.0,
) -> Path:
    """Writes a checkpoint of family ``name`` (see ``FAMILIES``) into ``folder`` and returns it.

    ``noise`` disturbs the decoder's weights by that share of their spread: the same seed with a
    little of it makes a draft that is often right. Raises OptionError for an unknown family or a
    folder that holds something already.
    """
    if name not in FAMILIES:
        raise OptionError(f"unknown family {name!r}; known: {', '.join(FAMILIES)}")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OptionError(f"{folder} is there already; give a new or empty folder")
    family, size = FAMILIES[name], size or Size()
    tokenizer = _tokenizer(family)
    if len(tokenizer) > size.vocab:
        raise OptionError(f"the vocabulary needs {len(tokenizer)} rows or more")
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in family.tokens.items()}
    config, processor = family.build(size, ids)
    model = _random(config, seed, len(tokenizer) - len(_specials(family)))
    if noise:
        _disturb(model, noise, seed)
    template = TEMPLATE.replace("IMAGE", family.image).replace("VIDEO", family.video)
    template = template.replace("AUDIO", family.audio)
    model.save_pretrained(target)
    processor(tokenizer, template).save_pretrained(target)
    return target


def _specials(family: Family) -> list[str]:
    return [*CONTROL, *dict.fromkeys(family.tokens.values()), *family.more]


def _tokenizer(family: Family) -> Any:
    """One token a byte, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(_specials(family))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(family.tokens),
        model_max_length=16384,
    )


def _random(config: Any, seed: int, text: int) -> Any:
    """A model whose layers mix well, its logits spread by about 4; ids past ``text`` never win."""
    text_only = type(config) not in hf.MODEL_FOR_MULTIMODAL_LM_MAPPING
    model = (hf.AutoModelForCausalLM if text_only else hf.AutoModelForMultimodalLM).from_config(
        config
    )
    inner = getattr(model, "thinker", model)  # the part of Qwen2.5-Omni that reads and writes text
    generator = torch.Generator().manual_seed(seed)
    head = inner.get_output_embeddings().weight
    embeddings = inner.get_input_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2 and not name.endswith("image_newline"):
                centre = 1.0 if "norm" in name or ".ln" in name else 0.0
                weight.normal_(centre, 0.2, generator=generator)
            elif weight is embeddings or name.endswith("image_newline"):
                weight.normal_(0, 1, generator=generator)
            else:
                fan = weight[0].numel()
                if "experts" in name and weight.ndim == 3:  # One matrix an expert.
                    fan = round(fan**0.5)
                looks = "layers" in name and ("q_proj" in name or "k_proj" in name)
                sharp = 4.0 if weight is head else 2.0 if looks else 1.0  # else text repeats itself
                weight.normal_(0, sharp / fan**0.5, generator=generator)
        head[text:] = 0
    inner.generation_config = model.generation_config = hf.GenerationConfig(
        do_sample=False, pad_token_id=text
    )
    return model.eval()


def _disturb(model: Any, noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for weight in getattr(model, "thinker", model).get_decoder().parameters():
            spread = torch.randn(weight.shape, generator=generator) * weight.std().nan_to_num(0.0)
            weight.add_(noise * spread)
