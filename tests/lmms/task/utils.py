"""What the local tasks show: lmms-eval finds these by ``!function utils.NAME``."""

from typing import Any

from PIL import Image


def video(doc: dict[str, Any]) -> list[str]:
    return [doc["clip"]]


def pictures(doc: dict[str, Any]) -> list[Image.Image]:
    return [Image.open(path) for path in doc["pictures"]]


def briefly(doc: dict[str, Any]) -> list[dict[str, Any]]:
    """As chat messages, a system message among them."""
    instruction = [{"type": "text", "text": "Answer the question about the video."}]
    question = [{"type": "video", "url": doc["clip"]}, {"type": "text", "text": doc["question"]}]
    return [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
