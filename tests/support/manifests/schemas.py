"""Check objects as an API server would, short of its admission webhooks: structure, unknown fields, defaults, CEL.

Built-in kinds by kubernetes-validate. JobSet and LeaderWorkerSet by copies of their CRDs (crds/, JSON without the
descriptions), monitors by a schema of the few fields that one may use here. A kind that is not known is a failure.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import cel
import jsonschema
import kubernetes_validate

KUBERNETES = "1.33"
"""The oldest release that manifests are meant for."""
_CRDS = Path(__file__).parent / "crds"
_METADATA = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

Object = dict[str, Any]


def problems(found: Object, old: Object | None = None) -> list[tuple[str, str]]:
    """(who caught it, what) of one object; `old` is what it would replace, for rules about changes."""
    key = (found.get("kind", ""), found.get("apiVersion", ""))
    if key in custom_schemas():
        schema, validator = custom_schemas()[key]
        metadata = [("schema", text) for text in _core(_metadata_only(found))]
        structure = [("schema", f"{_path(error)}: {error.message[:160]}") for error in validator.iter_errors(found)]
        if structure or metadata:
            return metadata + structure
        filled, stored = copy.deepcopy(found), copy.deepcopy(old)
        add_defaults(schema, filled)
        add_defaults(schema, stored)
        return [("CEL", text) for text in broken_rules(schema, filled, found["kind"], stored)]
    return [("schema", text) for text in _core(found)]


def _metadata_only(found: Object) -> Object:
    """Metadata is the same in all kinds: a ConfigMap stands for them."""
    return dict(apiVersion="v1", kind="ConfigMap", metadata=found.get("metadata"))


def _core(found: Object) -> list[str]:
    try:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"unknown kind: {error.message}"]
    except kubernetes_validate.ValidationError as error:
        return [f"{_path(error)}: {error.message[:160]}"]
    except (KeyError, AttributeError, TypeError) as error:
        return [f"no object: {type(error).__name__} {error}"]
    return []


def _path(error: Any) -> str:
    return ".".join(str(part) for part in error.absolute_path)


@lru_cache(maxsize=1)
def custom_schemas() -> Mapping[tuple[str, str], tuple[Object, jsonschema.protocols.Validator]]:
    """(kind, apiVersion) → the schema, and the validator that refuses unknown fields."""
    found = {}
    for file in sorted(_CRDS.glob("*.json")):
        crd = json.loads(file.read_text())
        for version in crd["spec"]["versions"]:
            if version["served"]:
                schema = version["schema"]["openAPIV3Schema"]
                schema["properties"]["metadata"] = _METADATA
                key = crd["spec"]["names"]["kind"], f"{crd['spec']['group']}/{version['name']}"
                found[key] = schema, jsonschema.Draft4Validator(strict(schema))
    return found


def strict(schema: Any) -> Any:
    """A structural schema as a JSON schema that refuses unknown fields, as `kubectl --validate=strict` does."""
    if not isinstance(schema, dict):
        return schema
    ignored = ("nullable", "format", "default", "description", "example")
    out = {name: value for name, value in schema.items() if not name.startswith("x-") and name not in ignored}
    if "properties" in schema:
        out["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            out["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        out["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        out["items"] = strict(schema["items"])
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable"):
        out["type"] = [out["type"], "null"]
    return out


def add_defaults(schema: Object, value: Any) -> None:
    """Fill in what the server would, in place."""
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name not in value and "default" in part:
                value[name] = copy.deepcopy(part["default"])
            if name in value:
                add_defaults(part, value[name])
        if isinstance(schema.get("additionalProperties"), dict):
            for one in value.values():
                add_defaults(schema["additionalProperties"], one)
    elif isinstance(value, list):
        for one in value:
            add_defaults(schema.get("items", {}), one)


def broken_rules(schema: Object, value: Any, where: str, old: Any = None) -> Iterator[str]:
    """CEL rules that do not hold, and lists whose entries are not unique by their keys."""
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        known = {"self": value} | ({} if old is None else {"oldSelf": old})
        if not cel.evaluate(rule["rule"], known):
            yield f"{where}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                before = old.get(name) if isinstance(old, dict) else None
                yield from broken_rules(part, value[name], f"{where}.{name}", before)
    elif isinstance(value, list):
        yield from _broken_entries(schema, value, where)


def _broken_entries(schema: Object, value: list[Any], where: str) -> Iterator[str]:
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys:
        seen = [tuple(one.get(key) for key in keys) for one in value]
        if len(set(seen)) < len(seen):
            yield f"{where}: duplicate {keys} in {seen}"
    for place, one in enumerate(value):
        yield from broken_rules(schema.get("items", {}), one, f"{where}[{place}]")
