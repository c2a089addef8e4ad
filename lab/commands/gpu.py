"""The command ``python -m lab gpu``, which compares a GPU's speed with what its bandwidth allows.

It makes models of published shapes with random weights. Three kinds of speedup are printed:
predicted from bandwidth alone, projected from measured forwards, and measured over whole answers.
``lab/hardware/gpu.py`` computes and measures them.
"""

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
    visual_tokens: Annotated[int, typer.Option(min=16, help="In the prompt.")] = 12288,
    machine: Annotated[str, typer.Option(help="H100 or H200, for its bandwidth.")] = "H200",
    predict: Annotated[
        bool, typer.Option("--predict", help="Only predict; make no model.")
    ] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Shrunken shapes, to try the command on a CPU too.")
    ] = False,
    max_new_tokens: command_options.Tokens = 128,
    repeat: command_options.Repeat = 3,
    device: command_options.Device = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare captured steps with bytes over bandwidth, and whole answers with generate.

    Weights are random and acceptance is imposed at the papers' figures.
    """
    prepare(threads, verbose)
    import torch

    from lab.hardware import gpu as bench
    from saccade.bench.hardware.published import CONFIGS

    for name in (target, draft):
        if not name.startswith("Qwen2.5-VL") or name not in CONFIGS:
            names = ", ".join(each for each in CONFIGS if each.startswith("Qwen2.5-VL"))
            raise OptionError(f"this command cannot make {name}; it can make: {names}")
    if machine not in bench.BANDWIDTH:
        machines = ", ".join(bench.BANDWIDTH)
        raise OptionError(f"--machine {machine} is unknown; there are: {machines}")
    bandwidth = bench.BANDWIDTH[machine]  # In bytes a second.
    # In ``facts``, "predicted" has seconds and "steps" has milliseconds.
    facts: dict[str, Any] = {"machine": machine, "target": target, "draft": draft}
    facts["visual_tokens"] = visual_tokens
    lines = []
    predictions = bench.predict_speedups(target, draft, visual_tokens, bandwidth)
    facts["predicted"] = [
        {**asdict(each), "t1": target_step, "draft": draft_step, "speedup": speedup}
        for each, target_step, draft_step, speedup in predictions
    ]
    for each, target_step, draft_step, speedup in predictions:
        lines.append(
            f"predicted for {each.method}: T(1) {target_step * 1e3:.1f} ms, a draft's step "
            f"{draft_step * 1e3:.2f} ms, tau {each.tau:.2f}, {speedup:.2f} x plain decoding"
        )
    if not predict:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        shapes = [bench.published_config(name, tiny=tiny) for name in (target, draft)]
        big, small = (bench.build_model(config, place, dtype) for config in shapes)
        # Single forwards: the target's over all visual tokens, the draft's over those that its view
        # keeps.
        target_steps = bench.measure_steps("target", big, visual_tokens, bandwidth)
        contexts = {each: max(1, int(visual_tokens * each.keep)) for each in bench.REPORTED}
        draft_steps = {
            each: bench.measure_steps("draft", small, context, bandwidth, rows=(1,))[0]
            for each, context in contexts.items()
        }
        steps = (*target_steps, *draft_steps.values())
        facts["steps"] = [{**asdict(step), "ratio": step.ratio} for step in steps]
        facts["projected"] = {
            each.method: bench.project_speedup(target_steps, step, each)
            for each, step in draft_steps.items()
        }
        # Whole answers about a video of noise.
        prompt = bench.noise_video_inputs(shapes[0], visual_tokens)
        answers = bench.measure_answers(big, small, prompt, tokens=max_new_tokens, repeat=repeat)
        facts["answers"] = [asdict(each) for each in answers]
        lines += [
            f"{s.model}, {s.rows} rows over {s.context} keys: {s.captured:.2f} ms captured, "
            f"{s.ordinary:.2f} ms ordinary, {s.ratio:.2f} x the {s.floor:.2f} ms by bandwidth; "
            f"logits differ by {s.difference:.1e}"
            for s in steps
        ]
        lines += [
            f"projected for {method} from measured steps: {speedup:.2f} x plain decoding"
            for method, speedup in facts["projected"].items()
        ]
        lines += [
            f"measured for {each.method}: {each.tokens_per_second:.1f} tokens a second, "
            f"{each.over_ar:.2f} x ar, {each.over_generate:.2f} x generate"
            for each in answers
        ]
    if as_json:
        typer.echo(json.dumps(facts))
        return
    out.print("\n".join(lines), soft_wrap=True, markup=False)
