"""Chat messages and tools of a body, checked and brought into the form chat templates are written for. Pure.

Runs in the tokenizer workers. Templates know contents as text and tool arguments as objects; clients send contents
as text or as lists of parts, and tool arguments as JSON text. Fields we do not know stay, for the template.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglmt.http.checks import MAX_INT64
from sglmt.http.errors import ApiError, bad_field, shown
from sglmt.http.json_body import check_depth
from sglmt.http.limits import ModelLimits

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARS = 256
PART_SEPARATOR = "\n"  # between the text parts of one content


def check_messages(messages: list[Message] | None) -> list[Message]:
    """The messages as the template gets them: contents are text, `developer` is `system`."""
    if messages is None:
        raise bad_field("messages", "this field is required")
    if not messages:
        raise bad_field("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise bad_field("messages", f"at most {MAX_MESSAGES} messages, got {len(messages)}")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, param: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise bad_field(f"{param}.role", f"one of {', '.join(ROLES)} is expected, got {_shown(role)}")
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str) and role != "developer":
        return message
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise ApiError(400, f"{param}.{name}: not supported here", f"{param}.{name}", "unsupported_parameter")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None and not isinstance(message[name], str):
            raise bad_field(f"{param}.{name}", "a string is expected")
    checked = {**message, "role": "system" if role == "developer" else role}
    check_depth(message, param)
    calls = message.get("tool_calls")
    if calls:
        checked["tool_calls"] = _tool_calls(calls, role, f"{param}.tool_calls")
    else:
        checked.pop("tool_calls", None)
    if content is None and role == "assistant":
        checked["content"] = ""
    else:
        checked["content"] = content_text(content, f"{param}.content")
    return checked


def content_text(content: Any, param: str) -> str:
    """A content's text; the texts of several parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_field(param, "this field is required")
    if not isinstance(content, list):
        raise bad_field(param, "a string or a list of text parts is expected")
    return PART_SEPARATOR.join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise bad_field(param, "a content part is an object")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        message = f"{param}.type: only text parts can be read by this model, got {_shown(kind)}"
        raise ApiError(400, message, f"{param}.type", "unsupported_content_part")
    text = part.get(kind)
    if not isinstance(text, str):
        raise bad_field(f"{param}.{kind}", "a string is expected")
    return text


def _tool_calls(calls: Any, role: str, param: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise bad_field(param, "only assistant messages have tool calls")
    if not isinstance(calls, list):
        raise bad_field(param, "a list is expected")
    return [_tool_call(call, f"{param}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_field(f"{param}.function", "an object with name and arguments is expected")
    if not isinstance(function.get("name"), str):
        raise bad_field(f"{param}.function.name", "a string is expected")
    if not isinstance(call.get("id", ""), str | None):
        raise bad_field(f"{param}.id", "a string is expected")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments, f"{param}.function.arguments")
    elif arguments is not None and not isinstance(arguments, dict):
        raise bad_field(f"{param}.function.arguments", "JSON text is expected")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _arguments(text: str, param: str) -> Any:
    """Arguments as an object where the text is one; what a model wrote wrongly goes back to it as it was."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise bad_field(param, "nested too deeply") from None
    except msgspec.DecodeError as error:
        if "surrogate" in str(error) or "\\ud" in text.lower():
            raise bad_field(param, "the text has an unpaired surrogate, which is not a character") from None
        return text
    check_depth(value, param)
    return value if isinstance(value, dict) else text


def check_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as the template gets them; None when there are none."""
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"at most {MAX_TOOLS} tools, got {len(tools)}")
    check_depth(tools, "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{index}]")
        if name in names:
            raise bad_field(f"tools[{index}].function.name", f"{shown(name)} is there twice")
        names.add(name)
    return tools


def _check_tool(tool: dict[str, Any], param: str) -> str:
    """The function's name."""
    if tool.get("type") != "function":
        raise bad_field(f"{param}.type", f"only function tools, got {_shown(tool.get('type'))}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_field(f"{param}.function", "an object is expected")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME_CHARS:
        raise bad_field(f"{param}.function.name", f"a name of 1 to {MAX_TOOL_NAME_CHARS} characters is expected")
    if not isinstance(function.get("description", ""), str | None):
        raise bad_field(f"{param}.function.description", "a string is expected")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise bad_field(f"{param}.function.parameters", "a JSON schema (an object) is expected")
    return name


def offered_tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, limits: ModelLimits
) -> list[dict[str, Any]] | None:
    """The tools the prompt tells the model of: all with `auto`, none with `none`.

    Forcing a call takes an engine that can be held to a grammar; none of ours can be held to that of a call, so it
    is refused, naming the engine.
    """
    checked = check_tools(tools)
    if choice is None or choice == "auto":
        return checked
    if choice == "none":
        return None
    if choice != "required" and not isinstance(choice, dict):
        raise bad_field("tool_choice", f"auto, none, required or a named function, got {_shown(choice)}")
    if checked is None:
        raise bad_field("tool_choice", "there are no tools to call; send tools too")
    if isinstance(choice, dict):
        _check_named_choice(choice, checked)
    message = f"tool_choice: the {limits.engine} engine cannot be made to call a tool; use auto or none"
    raise ApiError(400, message, "tool_choice", "unsupported_by_engine")


def _check_named_choice(choice: dict[str, Any], tools: list[dict[str, Any]]) -> None:
    if choice.get("type") != "function":
        raise bad_field("tool_choice.type", f"function is expected, got {_shown(choice.get('type'))}")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_field("tool_choice.function.name", "a string is expected")
    if name not in tool_names(tools):
        raise bad_field("tool_choice.function.name", f"{shown(name)} is none of the tools")


def tool_names(tools: list[dict[str, Any]]) -> frozenset[str]:
    """The functions that may be called."""
    return frozenset(tool["function"]["name"] for tool in tools)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return shown(value)
    if value is None:
        return "nothing"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT64:
        return shown(value)
    return "something else"
