"""``python -m lab gpu``: published shapes with random weights against a GPU's bandwidth."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from saccade.cli import command_options
from saccade.cli.terminal import Json, Threads, Verbose, out, prepare
from saccade.core.errors import OptionError


def gpu(
    target: Annotated[str, typer.Option(help="A published shape.")] = "Qwen2.5-VL-32B",
    draft: Annotated[str, typer.Option(help="A published shape.")] = "Qwen2.5-VL-7B",
    visual_tokens: Annotated[int, typer.Option(min=16, help="Of the prompt.")] = 12288,
    machine: Annotated[str, typer.Option(help="H100 or H200: whose bandwidth.")] = "H200",
    predict: Annotated[
        bool, typer.Option("--predict", help="The arithmetic only: no model is made.")
    ] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Shrunken shapes: tries the command, on a CPU too.")
    ] = False,
    max_new_tokens: command_options.Tokens = 128,
    repeat: command_options.Repeat = 3,
    device: command_options.Device = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Time steps of fixed shape against bytes over bandwidth, and whole answers against generate.

    Weights are random and acceptance is imposed at the papers' figures.
    """
    prepare(threads, verbose)
    import torch

    from lab.hardware import gpu as bench
    from saccade.bench.hardware.published import CONFIGS

    for name in (target, draft):
        if not name.startswith("Qwen2.5-VL") or name not in CONFIGS:
            known = ", ".join(each for each in CONFIGS if each.startswith("Qwen2.5-VL"))
            raise OptionError(f"{name} is no shape this can make: {known}")
    if machine not in bench.BANDWIDTH:
        raise OptionError(f"--machine {machine} is unknown: {', '.join(bench.BANDWIDTH)}")
    speed = bench.BANDWIDTH[machine]
    found: dict[str, Any] = {"machine": machine, "target": target, "draft": draft}
    found["visual_tokens"] = visual_tokens
    lines = []
    predictions = bench.predicted(target, draft, visual_tokens, speed)
    found["predicted"] = [
        {**asdict(each), "t1": once, "draft": step, "speedup": gain}
        for each, once, step, gain in predictions
    ]
    for each, once, step, gain in predictions:
        lines.append(
            f"predicted {each.method}: T(1) {once * 1e3:.1f} ms, a draft's step {step * 1e3:.2f} "
            f"ms, tau {each.tau:.2f}: {gain:.2f} x plain decoding"
        )
    if not predict:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        shapes = [bench.config(name, tiny=tiny) for name in (target, draft)]
        big, small = (bench.build(made, place, dtype) for made in shapes)
        timed = bench.steps("target", big, visual_tokens, speed)
        kept = {each: max(1, int(visual_tokens * each.keep)) for each in bench.REPORTED}
        drafted = {
            each: bench.steps("draft", small, context, speed, rows=(1,))[0]
            for each, context in kept.items()
        }
        found["steps"] = [{**asdict(s), "ratio": s.ratio} for s in (*timed, *drafted.values())]
        found["projected"] = {
            each.method: bench.projected(timed, one, each) for each, one in drafted.items()
        }
        prompt = bench.inputs(shapes[0], visual_tokens)
        ran = bench.answers(big, small, prompt, tokens=max_new_tokens, repeat=repeat)
        found["answers"] = [asdict(each) for each in ran]
        lines += [
            f"{s.model} of {s.rows} rows over {s.context} keys: {s.captured:.2f} ms (ordinary "
            f"{s.ordinary:.2f}), {s.ratio:.2f} x its {s.floor:.2f} ms of bytes; "
            f"logits {s.difference:.1e} apart"
            for s in (*timed, *drafted.values())
        ]
        lines += [
            f"projected {method}: {gain:.2f} x" for method, gain in found["projected"].items()
        ]
        lines += [
            f"ran {r.method}: {r.tokens_per_second:.1f} tokens a second, {r.over_ar:.2f} x ar, "
            f"{r.over_generate:.2f} x generate"
            for r in ran
        ]
    if as_json:
        typer.echo(json.dumps(found))
        return
    out.print("\n".join(lines), soft_wrap=True, markup=False)
