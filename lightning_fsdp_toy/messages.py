"""One line for the user out of the many that a failed composition of the config gives."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "describe_config_error",
    "describe_group_error",
    "describe_idle_group",
    "describe_unknown_key",
    "naming",
    "one_line",
]


def one_line(text: object) -> str:
    """Join the lines of `text`; line breaks and runs of blanks become one blank."""
    return " ".join(str(text).split())


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Turn whatever is raised inside into a `ValueError` of one line that names `key`.

    What a config names is anybody's code, and may raise anything.
    """
    try:
        yield
    except Exception as error:
        is_wrapped = type(error).__name__ == "InstantiationException" and error.__cause__
        cause = error.__cause__ if is_wrapped else error
        text = one_line(str(cause).split("\nfull_key")[0])
        known = ("ValueError", "TypeError", "MisconfigurationException", "InstantiationException")
        if type(cause).__name__ not in known:
            text = f"{type(cause).__name__}: {text}"
        argument = re.match(r"`([a-z_][a-z_.]*)`", text)
        if argument and key.isidentifier() and argument[1].split(".")[0] != key:
            text = f"`{key}.{text[1:]}"
        is_named = f"`{key}." in text or f"`{key}=" in text or f"`{key}`" in text
        raise ValueError(text if is_named else f"`{key}`: {text}") from cause


def describe_config_error(error: Exception, keys: Iterable[str]) -> str:
    """Say in one line which key of the command line or the config is wrong, and what to do.

    Args:
        error: What Hydra or OmegaConf raised.
        keys: All dotted keys of the config, to suggest the nearest.
    """
    missing = getattr(error, "missing_cfg_file", None)
    options = getattr(error, "options", None)
    if missing and options:
        group, _, option = missing.rpartition("/")
        return f"`{group}={option}`: no such option; `{group}` can be {', '.join(options)}"
    unknown = re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))
    if unknown:
        return describe_unknown_key(unknown[1], keys)
    override = getattr(error, "override", None)
    text = one_line(str(error).split("\nSee http")[0].split("\nConfig search path")[0])
    full_key = re.search(r"full_key: (\S+)", text)
    if full_key:
        return f"`{full_key[1]}`: {text.split(' full_key:')[0]}"
    return f"`{override}`: {text}" if override and override not in text else text


def describe_group_error(overrides: Iterable[str], config_dir: Path) -> str:
    """Say which override gives a group something that is no option; empty if none does."""
    for override in overrides:
        group, sign, value = override.partition("=")
        folder = config_dir / group
        if not sign or override.startswith("-"):
            continue
        if not group:
            return f"`{override}`: no key before `=`; write `key=value`"
        if folder.is_dir() and not (folder / f"{value}.yaml").is_file():
            options = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
            none = f"; for none write `~{group}`" if group in ("logger", "callbacks") else ""
            return f"`{override}`: no such option; `{group}` can be {options}{none}"
    return ""


def describe_idle_group(error: Exception, config_dir: Path) -> str:
    """Say which task has the group that was chosen without it; empty if that is not the error."""
    unknown = re.match(r"Could not override '(\w+)'\. No match in the defaults list", str(error))
    if unknown is None or not (config_dir / unknown[1]).is_dir():
        return ""
    group = unknown[1]
    tasks = [
        path.stem
        for path in sorted((config_dir / "task").glob("*.yaml"))
        if f"- /{group}:" in path.read_text(encoding="utf-8")
    ]
    remedy = " or ".join(f"`task={name}`" for name in tasks)
    return f"`{group}` is a group of another task: choose {remedy}, or leave it out"


def describe_unknown_key(key: str, keys: Iterable[str]) -> str:
    """Say that `key` does not exist, and which one was probably meant.

    >>> describe_unknown_key("trainer.max_step", ["trainer.max_steps", "devices"])
    'unknown key `trainer.max_step`: did you mean `trainer.max_steps`?'
    """
    keys = list(keys)
    parent = key.rpartition(".")[0]
    if parent in keys and not any(known.startswith(f"{parent}.") for known in keys):
        return f"unknown key `{key}`: `{parent}` is one value: set it whole, as in conf/"
    keys = [known for known in keys if not key.startswith(f"{known}.")]
    if key in keys:
        return f"`{key}` is null, and Hydra deletes no key that is null: leave it, or set it"
    parent, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    near = [siblings[name] for name in difflib.get_close_matches(leaf, siblings, n=1)]
    near = near or [k for k in keys if k.rpartition(".")[2] == leaf]  # right name, wrong place
    if near:
        best = max(near, key=lambda known: difflib.SequenceMatcher(None, known, key).ratio())
        return f"unknown key `{key}`: did you mean `{best}`?"
    parent = key
    while parent:
        parent = parent.rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        names = {known[len(prefix) :].split(".")[0] for known in keys if known.startswith(prefix)}
        if names:
            where = f"`{parent}`" if parent else "the config"
            return f"unknown key `{key}`: {where} has {', '.join(sorted(names - {'_target_'}))}"
    return f"unknown key `{key}`"
