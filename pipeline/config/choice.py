"""Define recipe sections that hold one of several classes: chosen by `name`, or a user's own class by `class`.

    objective: {name: cispo, cap: 4}
    objective: {class: mypackage.module:MyObjective, options: {cap: 4}}

The value of the section is an instance of the class, whose fields are the section's keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from pydantic import Field, GetCoreSchemaHandler, SerializationInfo, ValidationError, create_model
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from pipeline.config.sections import Section
from precision.settings import Settings, name_of
from precision.text import did_you_mean, one_line, quoted

UNKNOWN_OPTION = "unknown_option"
"""Type of pydantic's error about an unknown option of a user's own class."""


class OwnClass(Section):
    """A class of the user's own."""

    class_: str = Field(alias="class", description="package.module:Class, importable where the run's processes run.")
    options: dict[str, Any] = Field(default_factory=dict, description="The fields of the class.")


@dataclass(frozen=True)
class Choice:
    """Annotation of a section of several classes: `named` are those chosen by name, all derived from `base`."""

    base: type[Settings]
    named: Mapping[str, type[Settings]]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Name that is no choice here → explanation."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        by_name = {name: handler.generate_schema(choice) for name, choice in self.named.items()}
        chosen = core_schema.tagged_union_schema(by_name, "name")
        return core_schema.no_info_plain_validator_function(
            self._validated,
            json_schema_input_schema=core_schema.union_schema([chosen, handler.generate_schema(OwnClass)]),
            serialization=core_schema.plain_serializer_function_ser_schema(self._written, info_arg=True),
        )

    def _validated(self, value: Any) -> Settings:
        """Return an instance unchanged, and data as the instance that they describe. Raises ValueError (a
        ValidationError for the fields of the class)."""
        if isinstance(value, self.base):
            return value
        if not isinstance(value, dict):
            if isinstance(value, str) and value in self.named:
                raise ValueError(f"expected a section: {{name: {value}}}, got {quoted(value)}")
            raise ValueError(f"expected name and the keys that belong to it, got {quoted(value)}")
        if "class" in value:
            own = OwnClass.model_validate(value)
            own_class = self._own(own.class_)
            # Errors of an option are reported under `options`, their place in the recipe.
            taken = [field.alias or name for name, field in own_class.model_fields.items()]
            shown = ", ".join(name for name in taken if name != "name") or "no options"
            problems = []
            for option, given in own.options.items():
                if own_class.model_config.get("extra") == "forbid" and option not in {*taken, *own_class.model_fields}:
                    said = f"{own_class.__name__} takes {shown}{did_you_mean(option, taken)}"
                    unknown = PydanticCustomError(UNKNOWN_OPTION, "{said}", dict(said=said))
                    problems.append(InitErrorDetails(type=unknown, loc=("options", option), input=given))
            if problems:
                raise ValidationError.from_exception_data(own_class.__name__, problems)
            fields: Any = {"class": (str, ...), "options": (own_class, ...)}
            model = create_model(own_class.__name__, **fields)
            checked: Any = model.model_validate({"class": own.class_, "options": own.options})
            options: Settings = checked.options
            return options
        name = value.get("name")
        chosen = self.named.get(str(name))
        if chosen is None:
            problem = "name is missing" if name is None else f"name is {quoted(name)}"
            other = self.elsewhere.get(str(name).lower())
            meant = f"; {other}" if other else did_you_mean(str(name), self.named)
            raise ValueError(
                f"{problem}; expected one of {', '.join(self.named)}, or class: package.module:Class{meant}"
            )
        return chosen.model_validate(value)

    def _written(self, value: Settings, info: SerializationInfo) -> dict[str, Any]:
        data = value.model_dump(mode=info.mode)
        if self.named.get(data["name"]) is type(value):
            return data
        del data["name"]
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "options": data}

    def _own(self, path: str) -> type[Settings]:
        """Return the class at `package.module:Class`. Raises ValueError."""
        module, colon, name = path.partition(":")
        if not colon:
            raise ValueError(f"class is {quoted(path)}, expected package.module:Class")
        try:
            holder = import_module(module)
        except Exception as error:
            raise ValueError(
                f"class {one_line(path, 120)} cannot be imported ({type(error).__name__}: {one_line(error, 200)}); "
                "install its package, or put the folder that holds it on PYTHONPATH"
            ) from error
        if not hasattr(holder, name):
            own = [word for word, thing in vars(holder).items() if isinstance(thing, type)]
            raise ValueError(f"class {one_line(path, 120)}: {module} has no {quoted(name)}{did_you_mean(name, own)}")
        found, kind = getattr(holder, name), f"{self.base.__module__}.{self.base.__name__}"
        if not (isinstance(found, type) and issubclass(found, self.base)):
            raise ValueError(f"class {path} is no subclass of {kind}; derive it from that")
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise ValueError(f"class {path} lacks {missing}; write the members that {kind} asks for")
        try:
            name_of(found)
        except TypeError as error:
            raise ValueError(f"class {path}: {error}") from error
        return found
