"""What all Kubernetes objects have: typed fields under Kubernetes' own names, and a fixed order in YAML.

Only the fields that are written here are known, and no others are accepted: a typo fails when the object is made. The
models that other packages generate from the API accept unknown fields silently and lack some of the kinds.
"""

from __future__ import annotations

from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Part(BaseModel):
    """A part of an object. Fields are written in the order in which they are declared; None is left out."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Metadata(Part):
    name: str | None = None
    namespace: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class KubernetesObject(Part):
    """An object that can be applied."""

    api_version_: ClassVar[str]
    kind_: ClassVar[str]
    metadata: Metadata

    def to_dict(self) -> dict[str, Any]:
        """As `kubectl` reads it."""
        fields = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return dict(apiVersion=self.api_version_, kind=self.kind_, **fields)


class _Dumper(yaml.SafeDumper):
    """Indents lists, and writes texts of several lines as they are."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 (PyYAML's name)
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (PyYAML's name)
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """Documents of one file, in order. The same objects give the same bytes."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=2**16
    )
