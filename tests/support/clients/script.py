"""What the scripted simulator says: reasoning, prose, two tool calls. Imported by checks that lack our package."""

from __future__ import annotations

import json
from typing import Any

REASONING = "They want the weather.\nIn two cities."
PROSE = "Let me look."
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"city": "Paris", "units": ["°C", "km/h"]},
    {"city": "東京", "note": 'a "quote" and </tool_call>'},
)
SAID = f"<think>\n{REASONING}\n</think>\n\n{PROSE}\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': each}, ensure_ascii=False)}\n</tool_call>"
    for each in ARGUMENTS
)
QUESTION = "What is the capital of France?"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
]
