"""Command-line flags of the commands: `--config FILE` and one flag for every key of the configuration.

A command calls `define_flags()` at import, adds flags of its own, and ends with `run(main)`. Flags may be written
with dashes or underscores (`--max-num-seqs`, `--max_num_seqs`); lists and mappings take commas, several words or
several flags (`--lora_modules a=x,b=y`, `--lora-modules a=x b=y`); booleans `--warm_up`, `--nowarm_up`,
`--no-warm-up` or `--warm_up false`.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from absl import app, flags

from multilora_jax.config import EngineConfig, describe_keys
from multilora_jax.config_values import default_of, nearest, typed_value
from multilora_jax.errors import ConfigError, UserError

# The flags count as those of the command that asks for them, so that its --help lists them.
flags.disclaim_key_flags()

_BOOLEANS = ("true", "false", "1", "0")
_HELP = ("--help", "-help", "-h", "--helpshort", "--helpfull")
_KIND_WORDS = {int: "an integer", float: "a number", bool: "true or false"}


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines `--config` and a flag for each configuration key."""
    flags.DEFINE_string(
        "config", None, "YAML file of the keys below; a flag overrides its key.", flag_values=flag_values
    )
    docs = describe_keys()
    kinds = _kinds()
    for f in fields(EngineConfig):
        default, doc = default_of(f), docs[f.name]
        kind = kinds[f.name]
        if kind is bool:
            flags.DEFINE_boolean(f.name, default, doc, flag_values=flag_values)
        elif kind is int:
            flags.DEFINE_integer(f.name, default, doc, flag_values=flag_values)
        elif kind is float:
            flags.DEFINE_float(f.name, default, doc, flag_values=flag_values)
        elif kind is list:
            flags.DEFINE_multi_string(f.name, None, doc.rstrip("."), flag_values=flag_values)
        elif isinstance(kind, tuple):
            flags.DEFINE_enum(f.name, default, kind, doc, flag_values=flag_values)
        else:
            flags.DEFINE_string(f.name, default, doc, flag_values=flag_values)


def normalise_argv(argv: Sequence[str], lists: Collection[str] = ()) -> list[str]:
    """`argv` (the program first) in the one form that absl parses.

    Dashes in flag names become underscores, `--no-x` becomes `--nox`, `--x false` becomes `--x=false` for a
    boolean key, and the words after a list key, or after one of `lists`, become repeats of its flag. All after `--`
    stays as it is.
    """
    kinds = _kinds() | dict.fromkeys(lists, list)
    out = list(argv[:1])
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        if not word.startswith("--"):
            out.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name.startswith("no_") and kinds.get(name[3:]) is bool:
            name = "no" + name[3:]
        out.append(f"--{name}{equals}{value}")
        if equals or not rest:
            continue
        if kinds.get(name) is bool and rest[0].lower() in _BOOLEANS:
            out[-1] = f"--{name}={rest.pop(0)}"
        elif kinds.get(name) is list and not rest[0].startswith("-"):
            out.pop()
            while rest and not rest[0].startswith("-"):
                out.append(f"--{name}={rest.pop(0)}")
    return out


def config_from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> EngineConfig:
    """The configuration that the parsed flags ask for: the file of `--config`, overridden by every flag given.

    Raises:
        ConfigError, NotFoundError: as `EngineConfig.from_yaml`.
    """
    kinds = _kinds()
    overrides: dict[str, Any] = {}
    for key, kind in kinds.items():
        flag = flag_values[key]
        if flag.present:
            overrides[key] = _split(flag.value or []) if kind is list else flag.value
    path = flag_values["config"].value
    if path is not None:
        return EngineConfig.from_yaml(path, overrides)
    if not overrides:
        raise ConfigError("give --config FILE or --model MODEL (--help lists the keys)", reason="missing_key")
    return EngineConfig.from_dict(overrides, source="command line")


def run(
    main: Callable[[list[str]], Any],
    *,
    commands: Sequence[str] = (),
    argv: Sequence[str] | None = None,
    arguments: str = "",
    about: str = "",
    example: str = "",
    lists: Collection[str] = (),
) -> None:
    """Parses the flags, calls `main(words)` with the words that are no flags, and exits.

    Args:
        main: returns the exit status, None for 0; a UserError that it raises is printed without a traceback and
            exits with 1. An interrupt ends with one line too, and 130.
        commands: the words of which exactly one must be given; with none, no word may be given.
        argv: the program and its arguments; those of this process by default.
        arguments: what further words stand for ("PATH..."), for --help; with none, no further word may be given.
        about: what the program does, in a sentence, for --help.
        example: a command line to copy, for --help.
        lists: flags of the program's own that take several words, as list keys do.
    """
    argv = normalise_argv(sys.argv if argv is None else argv, lists)
    words = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if any(word in _HELP for word in words):
        print(help_text(flags.FLAGS.get_key_flags_for_module(sys.argv[0]), commands, about, example, arguments))
        sys.exit(0)

    def parse(argv: list[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            sys.exit(f"error: command line: {explain(error)} (see --help)")

    def checked_main(left: list[str]) -> Any:
        try:
            return main(_check_words(left[1:], commands, more=bool(arguments)))
        except UserError as error:
            sys.exit(f"error: {error.message}")
        except KeyboardInterrupt as error:
            print("interrupted", *map(str, error.args), sep=": ", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)

    app.run(checked_main, argv=argv, flags_parser=parse)


def run_command(commands: Mapping[str, Any], about: str) -> None:
    """`run` for a program of several commands, each with flags of its own: another one's flag is an unknown flag.

    Args:
        commands: name to a module with `ABOUT`, `EXAMPLE` and `ARGUMENTS` (see `run`), `define_flags()` and
            `main(words)`, whose words are those after the command; and, where it has flags of several words, `LISTS`.
        about: what they are about, for --help without a command.
    """
    first = [*itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:])][:1]
    name = next((word for word in first or sys.argv[1:] if word in commands), None)
    with _quiet_without_a_reader():
        if name is None:
            # Nothing can be said of flags without their command, so that its name is all that is looked at.
            words = [*first, *(word for word in sys.argv[1:] if word in _HELP)]
            about = f"{about}\nThe flags of a command: COMMAND --help"
            run(lambda _: None, commands=tuple(commands), argv=[sys.argv[0], *words], about=about)
        else:
            command = commands[name]
            command.define_flags()
            run(
                lambda words: command.main(words[1:]),
                commands=(name,), arguments=command.ARGUMENTS, about=command.ABOUT, example=command.EXAMPLE,
                lists=getattr(command, "LISTS", ()),
            )  # fmt: skip


@contextmanager
def _quiet_without_a_reader() -> Iterator[None]:
    """Exits as a program that SIGPIPE ends where whoever reads the output has left (`| head`)."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def help_text(
    shown: Sequence[flags.Flag],
    commands: Sequence[str] = (),
    about: str = "",
    example: str = "",
    arguments: str = "",
) -> str:
    """What --help prints: usage, example, then each flag with its type, meaning and default."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {os.path.basename(sys.argv[0])}"
    command = f" {'|'.join(commands)}" if commands else ""
    command += f" {arguments}" if arguments else ""
    config = " [--config FILE]" if any(flag.name == "config" for flag in shown) else ""
    lines = [f"usage: {program}{command}{config} [--key value ...]"]
    lines += [f"example: {example}"] if example else []
    lines += ["", about] if about else []
    rule = "; a flag overrides the key of the same name in the file" if config else ""
    lines += ["", f"Flags (write dashes or underscores{rule}):"] if shown else []
    for flag in shown:
        values = getattr(flag.parser, "enum_values", None)
        kind = "|".join(values) if values else {"bool": "true|false"}.get(flag.flag_type(), flag.flag_type().upper())
        default = f"default: {_plain(flag.default)}" if flag.default not in (None, [], "") else "no default"
        lines += ["", f"  --{flag.name} {kind}"]
        meaning = flag.help.removeprefix(f"<{kind}>: ")  # absl's own list of an enumeration's words
        lines += textwrap.wrap(
            f"{meaning} [{default}]", 100, break_on_hyphens=False, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return "\n".join(lines)


def explain(error: flags.Error) -> str:
    """An error of the flags' parser in the words that a bad configuration gets."""
    if isinstance(error, flags.UnrecognizedFlagError):
        close = nearest(error.flagname, [f.name for f in flags.FLAGS.get_key_flags_for_module(sys.argv[0])])
        return f"unknown flag --{error.flagname}" + (f": did you mean --{close}?" if close else "")
    missing = re.search(r"Missing value for flag (\S+)", str(error))
    if missing:
        return f"{missing[1].lstrip('-')} needs a value: --{missing[1].lstrip('-')} VALUE"
    bad = re.match(r"flag --(\w+)=(.*?): (.*)", str(error), re.DOTALL)
    if not bad:
        return str(error)
    name, value, why = bad.groups()
    kind = _kinds().get(name)
    if isinstance(kind, tuple) and tuple(getattr(flags.FLAGS[name].parser, "enum_values", ())) == kind:
        try:
            typed_value(name, get_type_hints(EngineConfig)[name], value)
        except ConfigError as refused:
            return refused.message
    if isinstance(kind, type) and kind in _KIND_WORDS:
        return f"{name} must be {_KIND_WORDS[kind]}, got {value!r}"
    return f"{name}: {why}"


def _plain(value: Any) -> str:
    """A default as it is written on the command line."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_words(words: list[str], commands: Sequence[str], *, more: bool = False) -> list[str]:
    if commands and not words:
        raise UserError(f"name a command: one of {', '.join(commands)}", reason="bad_argument")
    if commands and words[0] not in commands:
        close = nearest(words[0], commands)
        hint = f"did you mean {close}?" if close else f"the commands are {', '.join(commands)}"
        raise UserError(f"unknown command {words[0]!r}: {hint}", reason="bad_argument")
    if len(words) > bool(commands) and not more:
        extra = words[bool(commands)]
        raise UserError(f"unexpected argument {extra!r}: flags are written --key value", reason="bad_argument")
    return words


def _kinds() -> dict[str, Any]:
    """For each key: bool, int, float, str, list, or the tuple of the words that it takes."""
    out: dict[str, Any] = {}
    for key, hint in get_type_hints(EngineConfig).items():
        if get_origin(hint) in (Union, UnionType):  # one that may be left empty
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        if get_origin(hint) is Literal:
            out[key] = get_args(hint)
        elif get_origin(hint) in (tuple, dict):
            out[key] = list
        else:
            out[key] = hint
    return out


def _split(values: list[str]) -> list[str]:
    """The parts of comma-separated values; a part with a comma in it is written in double quotes."""
    return [part for row in csv.reader(values, skipinitialspace=True) for part in row if part]
