"""Check of a document against a custom resource definition (CRD), as the API server checks it, but stricter.

A server drops unknown fields in silence; here they are problems. The rules beside the schema are written in the Common
Expression Language (CEL). The extra `k8s` installs what this needs.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

_ONLY_IN_UPDATES = "oldSelf"


def read_crd_schema(path: Path, kind: str, *, version: str) -> dict[str, Any]:
    """Return the schema of a version of a kind from a file that `kubectl get crd NAME -o yaml` has printed.

    Raises:
        UsageError: the file can't be read, or has no definition of this kind and version.
    """
    yaml = _import("yaml")
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} can't be read: {error}.") from None
    for document in documents:
        if isinstance(document, dict) and document.get("spec", {}).get("names", {}).get("kind") == kind:
            schemas: dict[str, dict[str, Any]] = {
                each["name"]: each["schema"]["openAPIV3Schema"] for each in document["spec"]["versions"]
            }
            if version in schemas:
                return schemas[version]
    raise UsageError(
        f"{path} defines no {kind} of version {version}.", hint="kubectl get crd jobsets.jobset.x-k8s.io -o yaml > FILE"
    )


def check_against_schema(document: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a document, each with the path of the field."""
    jsonschema = _import("jsonschema")
    own = _make_strict(deepcopy(dict(schema)))
    own["properties"]["metadata"] = {"type": "object"}
    errors = jsonschema.Draft7Validator(own).iter_errors(document)
    problems = [f"{'.'.join(map(str, error.absolute_path)) or '.'}: {error.message[:200]}" for error in errors]
    return [*problems, *_check_rules(document, schema, at="")]


def _make_strict(schema: Any) -> Any:
    """Make unknown fields an error, and remove the one keyword that JSON Schema reads differently."""
    if isinstance(schema, list):
        for inner in schema:
            _make_strict(inner)
    if isinstance(schema, dict):
        may_have_more = schema.get("x-kubernetes-preserve-unknown-fields")
        if schema.get("type") == "object" and "properties" in schema and not may_have_more:
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string") is True:
            schema.pop("type", None)
        for inner in schema.values():
            _make_strict(inner)
    return schema


def _check_rules(value: Any, schema: Mapping[str, Any], *, at: str) -> Iterator[str]:
    """Return the rules of the schema that a new document breaks."""
    cel = _import("cel")
    for rule in schema.get("x-kubernetes-validations", []):
        if _ONLY_IN_UPDATES in rule["rule"]:
            continue
        context = cel.Context()
        context.add_variable("self", value)
        try:
            is_kept = cel.evaluate(rule["rule"], context)
        except Exception:  # the rule reads a field that is not there
            continue
        if is_kept is not True:
            yield f"{at or '.'}: {rule.get('message') or rule['rule']}"
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from _check_rules(value[name], inner, at=f"{at}.{name}".lstrip("."))
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, inner_value in enumerate(value):
            yield from _check_rules(inner_value, schema["items"], at=f"{at}[{number}]")


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(f"{name} is not installed.", hint="pip install 'paceline[k8s]'") from None
