"""Refuses arguments that the class or function named by `_target_` does not take.

Reads signatures and annotations only; nothing is called. What has no annotations is left to the
object itself.
"""

import inspect
import pydoc
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["check_arguments", "check_targets", "find_target"]

_NUMBERS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number"}
_ANYTHING = (Any, object, inspect.Parameter.empty)


def check_targets(node: Any, key: str) -> None:
    """Check every `_target_` below `node` and the arguments beside it.

    An argument that is null and unknown to the target is left out, in place: another class than
    the one that the config was written for then needs no deletions.

    Raises:
        ValueError: Names the dotted key.
    """
    if isinstance(node, list):
        for index, each in enumerate(node):
            check_targets(each, f"{key}.{index}")
    if not isinstance(node, dict):
        return
    for name, each in node.items():
        check_targets(each, f"{key}.{name}" if key else str(name))
    if "_target_" in node:
        check_arguments(node, key, find_target(node["_target_"], key))


def find_target(path: Any, key: str) -> Callable[..., Any]:
    """Return what `path` names."""
    reason = ""
    try:
        found = pydoc.locate(path) if isinstance(path, str) else None
    except pydoc.ErrorDuringImport as error:
        found, reason = None, f" ({error.value})"
    if not callable(found):
        raise ValueError(
            f"`{key}._target_={path}`: there is no such class or function{reason}; check the path"
        )
    return found


def check_arguments(node: dict[str, Any], key: str, target: Callable[..., Any]) -> None:
    """Check the arguments in `node`, which is below `key`, against the signature of `target`."""
    call: Any = inspect.unwrap(target.__init__) if isinstance(target, type) else target  # type: ignore[misc]
    try:
        parameters = dict(inspect.signature(call).parameters)
    except ValueError:  # written in C
        return
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    given = [name for name in node if not name.startswith("_")]
    unknown = [name for name in given if name not in parameters or name == "self"]
    if not takes_any:
        for name in [name for name in unknown if node[name] is None]:
            del node[name]
            unknown.remove(name)
        if unknown:
            deletions = " ".join(f"~{key}.{name}" for name in unknown)
            raise ValueError(
                f"`{key}.{unknown[0]}`: {getattr(target, '__name__', target)} takes no argument "
                f"{' or '.join(unknown)}; it takes {_names(parameters)}; remove it with "
                f"`{deletions}`"
            )
    hints = _annotations(call)
    for name in given:
        if name not in unknown and name in node:
            _check_value(f"{key}.{name}", node[name], hints.get(name, Any), parameters[name])


def _names(parameters: Mapping[str, inspect.Parameter]) -> str:
    return ", ".join(name for name in parameters if name not in ("self", "params"))


def _annotations(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(call)
    except (NameError, TypeError, AttributeError):  # names that exist for type checkers only
        return {}


def _check_value(key: str, value: Any, hint: Any, parameter: inspect.Parameter) -> None:
    """Refuse a scalar that the annotation rules out."""
    if isinstance(value, dict | list | tuple):
        return
    if value is None and parameter.default is None:
        return
    allowed = _alternatives(hint)
    if any(each in _ANYTHING or isinstance(each, typing.TypeVar) for each in allowed):
        return
    literals = [each for each in allowed if not isinstance(each, type)]
    if value in [each for each in literals if isinstance(each, bool | int | str)]:
        return
    kinds = [each for each in allowed if isinstance(each, type)]
    if type(value) in kinds or (type(value) is int and float in kinds):
        return
    others = [each for each in kinds if each not in (*_NUMBERS, str, type(None))]
    opaque = [each for each in literals if not isinstance(each, bool | int | str)]
    others = [each for each in others if each.__name__ != "Tensor"]
    if (others or opaque) and (isinstance(value, str) or str in kinds):
        return  # a path, a name of a class: up to the object
    expected = [text for kind, text in _NUMBERS.items() if kind in kinds]
    expected += [repr(each) for each in literals if each not in opaque]
    expected += ["a text"] if str in kinds else []
    expected += ["null"] if type(None) in kinds else []
    expected += [each.__name__ for each in others]
    expected += (
        ["a list"] if any(typing.get_origin(each) in (list, tuple) for each in opaque) else []
    )
    if expected:
        raise ValueError(f"`{key}={value}`: expected {' or '.join(expected)}")


def _alternatives(hint: Any) -> list[Any]:
    """The types, values and other forms that an annotation allows."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [form for each in typing.get_args(hint) for form in _alternatives(each)]
    if origin is typing.Literal:
        return list(typing.get_args(hint))
    if hint is None:
        return [type(None)]
    return [hint]
