"""Makes tiny random checkpoints of every family, offline and in the format of the real ones.

Tests load them, and a contributor can try a family with them. A checkpoint has a config, weights, a
tokenizer, a processor and a chat template, as ``save_pretrained`` writes them. Nothing is trained,
but the weights are scaled so that greedy text varies.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lab.checkpoints import families
from lab.checkpoints.families import SIDE, TILES, Family, Size
from lab.checkpoints.newer_families import NEWER_FAMILIES
from lab.checkpoints.true_vocabularies import TRUE_VOCABULARIES
from saccade.core.errors import OptionError

__all__ = ["FAMILIES", "SIDE", "TILES", "TRUE_VOCABULARIES", "Size", "make"]

FAMILIES = {**families.FAMILIES, **NEWER_FAMILIES}

# Special tokens that every family has here, before those of its own markup.
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# IMAGE, VIDEO and AUDIO stand for a family's own markup, which ``make`` fills in. The tags ``{%-``
# drop the whitespace before them, so newlines that a chat needs have to be written as
# ``{{ '\n' }}``. The replacements below do this for the newline after a message's role, after
# "<|im_end|>" and after the "assistant" with which an answer begins.
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
    true_vocabulary: bool = False,
) -> Path:
    """Writes a checkpoint of family ``name`` (see ``FAMILIES``) into ``folder``, and returns that.

    The same ``seed`` makes the same weights. ``noise`` is added to the decoder's weights, as a
    share of their standard deviation: a second checkpoint of the same seed with a little noise is a
    draft that is often right. With ``true_vocabulary`` the checkpoint has the tokens and the chat
    template of the family's real checkpoints (see ``TRUE_VOCABULARIES``). Its embedding then has as
    many rows as theirs, and is the head as well.

    Raises OptionError for an unknown family, one without a true vocabulary here, a vocabulary that
    is too small, a folder that is not empty, or a package that is missing.
    """
    if name not in FAMILIES:
        raise OptionError(f"unknown family {name!r}; known: {', '.join(FAMILIES)}")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OptionError(f"{folder} exists and is not empty; give a new or empty folder")
    family = FAMILIES[name]
    size = size or Size()
    template = TEMPLATE.replace("IMAGE", family.image).replace("VIDEO", family.video)
    template = template.replace("AUDIO", family.audio)
    if true_vocabulary:
        if name not in TRUE_VOCABULARIES:
            known = ", ".join(TRUE_VOCABULARIES)
            raise OptionError(f"no true vocabulary of {name} is known here; known: {known}")
        source = TRUE_VOCABULARIES[name]
        tokenizer = source.make_tokenizer(family.tokens)
        template = source.template()
        size = replace(size, vocab=source.rows, tied=True)
    else:
        tokenizer = _make_tokenizer(family)
    if len(tokenizer) > size.vocab:
        raise OptionError(f"the vocabulary needs {len(tokenizer)} rows or more, not {size.vocab}")
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in family.tokens.items()}
    config, processor = family.build(size, ids)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = size.tied
    model = _make_random_model(config, seed, tokenizer.convert_tokens_to_ids(CONTROL[0]))
    if noise:
        _add_noise(model, noise, seed)
    model.save_pretrained(target)
    processor(tokenizer, template).save_pretrained(target)
    return target


def _special_tokens(family: Family) -> list[str]:
    return [*CONTROL, *dict.fromkeys(family.tokens.values()), *family.more]


def _make_tokenizer(family: Family) -> Any:
    """Returns a tokenizer with a token for each byte, followed by the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(_special_tokens(family))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(family.tokens),
        model_max_length=16384,
    )


def _make_random_model(config: Any, seed: int, text: int) -> Any:
    """Returns a random model whose logits have a standard deviation of about 4.

    ``text`` is the number of ids that stand for text. Ids from there on are special tokens, whose
    rows of the head are zero, so that greedy decoding never picks them. If the embedding is the
    head as well (tied), its numbers are a tenth of those of an embedding that is not, and the
    logits have a standard deviation of about 1. With a larger embedding the likeliest next token
    would be the token just read.
    """
    is_text_only = type(config) not in hf.MODEL_FOR_MULTIMODAL_LM_MAPPING
    auto_class = hf.AutoModelForCausalLM if is_text_only else hf.AutoModelForMultimodalLM
    model = auto_class.from_config(config)
    inner = getattr(model, "thinker", model)  # Qwen2.5-Omni reads and writes text by its thinker.
    generator = torch.Generator().manual_seed(seed)
    head = inner.get_output_embeddings().weight
    embeddings = inner.get_input_embeddings().weight
    tied = head is embeddings
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2 and not name.endswith("image_newline"):
                # Weights of norms are about 1, and biases about 0.
                centre = 1.0 if "norm" in name or ".ln" in name else 0.0
                weight.normal_(centre, 0.2, generator=generator)
            elif weight is embeddings or name.endswith("image_newline"):
                weight.normal_(0, 0.1 if tied else 1, generator=generator)
            else:
                input_count = weight[0].numel()
                if "experts" in name and weight.ndim == 3:  # There is one matrix an expert.
                    input_count = round(input_count**0.5)
                std = _scale(name, weight is head) / input_count**0.5
                weight.normal_(0, std, generator=generator)
        head[text:] = 0
    inner.generation_config = model.generation_config = hf.GenerationConfig(
        do_sample=False, pad_token_id=text
    )
    return model.eval()


def _scale(name: str, is_head: bool) -> float:
    """Returns the standard deviation that a matrix's outputs have if its inputs have one of 1.

    The head and the matrices of queries and keys have larger ones than the rest, because a model
    whose logits and attention are not sharp writes the same text over and over.
    """
    if is_head:
        return 4.0
    attends = "layers" in name and ("q_proj" in name or "k_proj" in name)
    return 2.0 if attends else 1.0


def _add_noise(model: Any, noise: float, seed: int) -> None:
    """Adds random numbers to the decoder's weights.

    Their standard deviation is the share ``noise`` of that of the weight tensor they are added to.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for weight in getattr(model, "thinker", model).get_decoder().parameters():
            spread = torch.randn(weight.shape, generator=generator) * weight.std().nan_to_num(0.0)
            weight.add_(noise * spread)
