"""A server for the tests: in this process on a thread of its own, over the embedded pair.

``SACCADE_TEST_URL`` names another server for the client tests, see docs/serve.md.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import openai
import pytest
from fastapi import applications
from PIL import Image
from serve.live import Endpoint, Live, made, serving

from saccade.inputs import Pair, load_pair, media
from saccade.serve.request_schema import ChatRequest, TextRequest
from saccade.serve.responses_schema import ResponsesRequest
from saccade.world import drawing, scenes


@pytest.fixture(scope="session", autouse=True)
def _fast() -> Iterator[None]:
    """Shapes and types unchecked: other tests have checked what servers run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session", autouse=True)
def _schemas_made_once() -> Iterator[None]:
    """Every server describes the same routes and requests, which takes a quarter of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applications, "get_openapi", _made_once(applications.get_openapi))
        for kind in (ChatRequest, TextRequest, ResponsesRequest):
            patch.setattr(kind, "model_json_schema", _made_once(kind.model_json_schema))
        yield


def _made_once(make: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Returns a function that gives copies of what the first call made."""
    first: list[dict[str, Any]] = []

    def copy_of_first(**settings: Any) -> dict[str, Any]:
        if not first:
            first.append(make(**settings))
        return copy.deepcopy(first[0])

    return copy_of_first


@pytest.fixture(scope="session")
def models(pair: Path) -> Pair:
    return Pair(*load_pair("shapes", None))


@pytest.fixture(scope="session")
def server(models: Pair) -> Iterator[Live]:
    with serving(lambda: made(models)) as live:
        yield live


@pytest.fixture
def idle(server: Live) -> Iterator[Live]:
    """The shared server, which has nothing to do before, and must have nothing to do after."""
    assert server.empties(10)
    yield server
    assert server.empties(10)


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four short videos."""
    folder = tmp_path_factory.mktemp("clips")
    paths = [folder / f"clip{number}.mp4" for number in range(4)]
    for number, path in enumerate(paths):
        drawing.write_clip(scenes.scene(20_000_011 + number), path, 16, 112)
    return paths


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory, clips: list[Path]) -> Path:
    """A frame of the first video as a PNG."""
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    Image.fromarray(media.read(clips[0]).frames[0]).save(path)
    return path


@pytest.fixture(scope="session")
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    url = os.environ.get("SACCADE_TEST_URL")
    key = os.environ.get("SACCADE_TEST_KEY", "none")
    live = None if url else request.getfixturevalue("server")
    with openai.OpenAI(
        base_url=url or f"{live.url}/v1", api_key=key, timeout=120, max_retries=0
    ) as client:
        yield Endpoint(client, os.environ.get("SACCADE_TEST_MODEL", "shapes"), live)


@pytest.fixture
def ours(endpoint: Endpoint) -> Live:
    """Our own server, for what only ours promises; skipped elsewhere."""
    if endpoint.ours is None:
        pytest.skip("asserts what only our own server promises")
    return endpoint.ours
