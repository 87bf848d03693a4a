"""A Python function as a tool: its schemas from its annotations and docstring, its arguments and its result.

The MCP SDK's own reading of functions (``func_metadata``) does the work, so that a function gets the same schemas
here as in an MCP server that is written with the SDK. Descriptions of parameters come from
``Field(description=…)`` or from the docstring (Google, NumPy or reST style).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import docstring_parser
import mcp_types as mcp
from mcp.server.mcpserver.exceptions import InvalidSignature
from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata, func_metadata
from pydantic import PydanticUserError, ValidationError

from turnstile_server.own_tools.content import as_result
from turnstile_server.own_tools.declare import DECLARED, ToolContext, ToolDeclaration
from turnstile_server.tools.protocol import ToolResult, ToolSpec, WrongArguments

_UNSTRUCTURED = (inspect.Signature.empty, str, None, type(None), Any)
"""Return annotations whose result is text alone."""


class UnusableFunction(Exception):
    """The function cannot be a tool; the text says why."""


class FunctionSignature:
    """Raises UnusableFunction for a function that cannot be a tool. Bound methods are functions too."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, timeout_s: float | None = None):
        declared = declaration(function)
        self.function = function
        self._metadata, self.context_parameter = _metadata(function)
        shown = name or (declared.name if declared else None) or function.__name__
        about = docstring_parser.parse(inspect.getdoc(function) or "")
        if not about.description:
            raise UnusableFunction("it has no docstring, which is what the model reads about it")
        self.spec = ToolSpec(
            shown,
            about.description.strip(),
            _input_schema(self._metadata, {part.arg_name: part.description or "" for part in about.params}),
            title=declared.title if declared else None,
            output_schema=_without_titles(self._metadata.output_schema),
            annotations=_annotations(declared) if declared else None,
            timeout_s=timeout_s or (declared.timeout_s if declared else None),
        )

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function's annotations say. Raises WrongArguments."""
        try:
            return self._metadata.arg_model.model_validate(dict(given)).model_dump_one_level()
        except ValidationError as error:
            raise WrongArguments(f"wrong arguments for {self.spec.name}: {faults(error)}") from error

    def json_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as JSON values, checked, for a function that runs elsewhere. Raises WrongArguments."""
        try:
            checked = self._metadata.arg_model.model_validate(dict(given))
        except ValidationError as error:
            raise WrongArguments(f"wrong arguments for {self.spec.name}: {faults(error)}") from error
        return checked.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def result(self, returned: Any) -> ToolResult:
        """The return value of the function as a result; one that its annotation does not allow is an error."""
        try:
            converted = self._metadata.convert_result(returned)
        except ValidationError as error:
            return ToolResult(
                f"{self.spec.name} returned what its annotation does not allow: {faults(error)}", is_error=True
            )
        if not isinstance(converted, mcp.CallToolResult):
            return ToolResult(f"{self.spec.name} asked for input, which no tool here can", is_error=True)
        return as_result(converted)


def declaration(function: Callable[..., Any]) -> ToolDeclaration | None:
    """The declaration that ``@tool`` made of the function, None where it has no such decorator."""
    found = vars(inspect.unwrap(function) if not inspect.ismethod(function) else function.__func__).get(DECLARED)
    assert found is None or isinstance(found, ToolDeclaration)
    return found


def faults(error: ValidationError) -> str:
    """Everything that a validation found, in one sentence."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'the value'}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors(include_url=False, include_input=False)
    )


def _metadata(function: Callable[..., Any]) -> tuple[FuncMetadata, str | None]:
    """The SDK's reading of the function, and the name of its parameter for the context."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError) as error:
        raise UnusableFunction(f"its annotations cannot be read: {error}") from error
    context: str | None = None
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UnusableFunction(f"its parameter {parameter} cannot be given by name")
        if parameter.annotation is parameter.empty:
            raise UnusableFunction(f"its parameter {parameter.name!r} has no type annotation")
        if parameter.annotation is ToolContext:
            if context is not None:
                raise UnusableFunction("it has two parameters for the context")
            context = parameter.name
    returns = signature.return_annotation
    structured = False if returns in _UNSTRUCTURED else None
    try:
        return func_metadata(function, () if context is None else (context,), structured), context
    except (InvalidSignature, PydanticUserError) as error:
        raise UnusableFunction(str(error)) from error


def _input_schema(metadata: FuncMetadata, described: Mapping[str, str]) -> dict[str, Any]:
    schema = _without_titles(metadata.arg_model.model_json_schema(by_alias=True))
    assert schema is not None
    properties = {
        name: {"description": described[name], **about} if described.get(name) else about
        for name, about in schema.get("properties", {}).items()
    }
    kept = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {**kept, "type": "object", "properties": properties, "additionalProperties": False}


def _without_titles(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema without the titles that pydantic makes from names: a smaller prompt."""
    if schema is None:
        return None
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            kept[key] = {name: _without_titles(about) for name, about in value.items()}
        elif isinstance(value, dict):
            kept[key] = _without_titles(value)
        elif isinstance(value, list):
            kept[key] = [_without_titles(item) if isinstance(item, dict) else item for item in value]
        else:
            kept[key] = value
    return kept


def _annotations(declared: ToolDeclaration) -> mcp.ToolAnnotations | None:
    hints = {
        "read_only_hint": declared.read_only,
        "destructive_hint": declared.destructive,
        "idempotent_hint": declared.idempotent,
        "open_world_hint": declared.open_world,
    }
    said = {name: hint for name, hint in hints.items() if hint is not None}
    return mcp.ToolAnnotations(**said) if said else None
