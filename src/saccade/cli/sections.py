"""Help in sections: every command's options under what they are about, the usual ones first."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

SECTIONS: dict[str, tuple[str, ...]] = {
    "Arguments": ("video", "videos", "manifest", "question"),
    "Input": (
        *("prompt", "document", "num_frames", "fps", "every_frame", "start", "end", "tokens"),
        *("media_root", "media_host", "private_media_hosts", "any_media_host"),
        *("allow_media_options", "max_frames", "max_media_mb", "max_body_mb", "max_upload_mb"),
        *("max_prompt", "shard", "retry_errors"),
    ),
    "Models": ("target", "draft", "captioner", "config", "positions", "trust_remote_code"),
    "Decoding": (
        *("method", "methods", "max_new_tokens", "temperature", "top_p", "top_k", "stop", "seed"),
        *("exact", "keep", "max_choices"),
    ),
    "Hardware": (
        *("device", "dtype", "threads", "quantize", "device_map", "tp", "memory", "batch", "ray"),
        *("workers", "replicas", "max_replicas"),
    ),
    "Output": (
        *("out_file", "out_path", "out_dir", "quiet", "as_json", "trace", "picture", "verbose"),
        *("repeat", "seconds"),
    ),
}
OTHERS = "Other options"


class Sections(TyperCommand):
    """A command whose help is in ``SECTIONS``, in their order; what is in none comes last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        told = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        names = {title: [name for name in own if told.get(name)] for title, own in SECTIONS.items()}
        placed = {name for own in names.values() for name in own}
        names[OTHERS] = [name for name in told if told[name] and name not in placed]
        for title, own in names.items():
            if own:
                with formatter.section(title):
                    formatter.write_dl([told[name] for name in own])
