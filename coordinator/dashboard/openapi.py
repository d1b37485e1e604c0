"""The API as an OpenAPI 3.1 document, from the table of its routes and the records of its answers."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.dashboard.answers import ApiError
from coordinator.dashboard.routes import PREFIX, Route
from edge_client import __version__

__all__ = ["document", "schema_of"]


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The whole document."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    schema_of(ApiError, schemas)
    for route in routes:
        paths.setdefault(f"/{route.path}", {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fedfit coordinator",
            "version": __version__,
            "description": "Send `Authorization: Bearer TOKEN`; make one with: coordinator page token add NAME",
        },
        "servers": [{"url": PREFIX.rstrip("/")}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    names = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    params = []
    for param in route.params:
        schema: dict[str, Any] = {"type": "string"}
        if param.repeats:
            schema = {"type": "array", "items": {"type": "string"}, "maxItems": param.high}
        elif param.low is not None:
            schema = {"type": "integer", "minimum": param.low, "maximum": param.high}
        if param.choices:
            schema["enum"] = list(param.choices)
        if param.default is not None:
            schema["default"] = param.default
        params.append({"name": param.name, "in": "query", "description": param.about, "schema": schema})
    content = {route.kind: {"schema": schema_of(route.answer, schemas)} if route.answer is not None else {}}
    operation: dict[str, Any] = {
        "summary": " ".join((inspect.getdoc(route.handle) or "").split()),
        "x-role": route.role,
        "parameters": [*names, *params],
        "responses": {
            str(route.status): {"description": "the answer", "content": content},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ApiError"}}},
            },
        },
    }
    if route.body:
        properties: dict[str, Any] = {
            field.name: {**_simple(field.kind), "description": field.about} for field in route.body
        }
        operation["requestBody"] = {
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "properties": properties,
                        "required": [field.name for field in route.body if field.required],
                        "additionalProperties": False,
                    }
                }
            }
        }
    return operation


def _simple(kind: type) -> dict[str, Any]:
    if kind is list:
        return {"type": "array", "items": {"type": "string"}}
    return {"type": {str: "string", bool: "boolean", int: "integer", float: "number"}[kind]}


def schema_of(hint: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a type; records go into `schemas` and are referred to."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in schemas:
            schemas[hint.__name__] = {}  # for records that contain themselves
            hints = typing.get_type_hints(hint)
            schemas[hint.__name__] = {
                "type": "object",
                "description": " ".join((inspect.getdoc(hint) or "").split()),
                "properties": {field.name: schema_of(hints[field.name], schemas) for field in dataclasses.fields(hint)},
                "required": [field.name for field in dataclasses.fields(hint)],
                "additionalProperties": False,
            }
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        several = [schema_of(argument, schemas) for argument in arguments if argument is not type(None)]
        return {"anyOf": [*several, {"type": "null"}]} if type(None) in arguments else {"anyOf": several}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0], schemas)}
    if origin in (dict, Mapping) or hint is Mapping:
        values = arguments[1] if len(arguments) == 2 else Any
        return {"type": "object", "additionalProperties": schema_of(values, schemas)}
    if hint is dict:
        return {"type": "object"}
    return {} if hint is Any else _simple(hint)
