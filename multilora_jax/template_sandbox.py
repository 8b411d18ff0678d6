"""The Jinja environment of chat templates: a sandbox in which time and memory are metered too.

Jinja's own sandbox keeps a template from reaching anything of the program's, not from looping for ever or from making
a text of many gigabytes. So the parsed template is given calls of the meter: in every turn of a loop, and wherever
text, lists or dicts come into being. All values being bounded, so is the time between two looks at the clock.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Generator
from datetime import datetime
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from multilora_jax.template_limits import TemplateLimitError, meter

MAX_SOURCE = 2**20
"""Most characters of a template; real ones have some thousands."""
# Filters and methods that no chat template needs, and whose cost their arguments do not show beforehand.
_DROPPED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_DROPPED_METHODS = frozenset({"encode", "expandtabs", "from_bytes", "fromkeys", "maketrans", "to_bytes", "translate"})
_SIZED_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "truncate"})
_TICK, _WRITE, _BUILT, _CONCAT = "@tick", "@write", "@built", "@concat"  # names that no template can spell


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's own words for training; for serving its body is all there is to it."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """One that does not print what it holds: that may change after the meter has seen it."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "sort_keys": sort_keys}
    if indent is None and separators is None:
        return json.dumps(value, **options)
    meter().check_numbers(indent)
    encoder, total, pieces = json.JSONEncoder(**options, separators=separators), 0, []
    for piece in encoder.iterencode(value):
        total = meter().check(total + len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 1000 or re.search(r"%[^a-zA-Z%]*\d", form):
        raise TemplateLimitError("it formats the time with a width or at great length")
    return datetime.now().strftime(form)


class _Metering(NodeTransformer):
    """Puts calls of the meter into a parsed template, as filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick_of(node), lineno=node.lineno))
        if node.test is not None:  # where it never holds, the body never runs
            node.test = nodes.And(_tick_of(node), node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        # The environment's `finalize` sees expressions only.
        static = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        count = nodes.ExprStmt(_filter(nodes.Const(static, lineno=node.lineno), _WRITE), lineno=node.lineno)
        return [count, node] if static else [node]

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_plain(node.items) else _filter(node, _BUILT)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_plain(node.items) else _filter(node, _BUILT)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_plain([pair.value for pair in node.items]) else _filter(node, _BUILT)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _CONCAT)


def _is_plain(items: list[Any]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _tick_of(node: nodes.Node) -> nodes.Filter:
    return _filter(nodes.Const(None, lineno=node.lineno), _TICK)


# With the context, though none needs it: Jinja computes other filters of constants once and for all, uncounted.


@pass_context
def _tick(_: Context, __: None) -> bool:
    meter().tick()
    return True


@pass_context
def _write(_: Context, characters: int) -> None:
    meter().write(characters)


@pass_context
def _built(_: Context, value: Any) -> Any:
    meter().size(value)
    return value


@pass_context
def _concat(_: Context, parts: tuple[Any, ...]) -> str:
    count = meter()
    count.check(sum(map(count.size, parts)))
    return "".join(map(str, parts))


@pass_context
def _finalize(_: Context, value: Any) -> Any:
    count = meter()
    count.write(len(value) if type(value) is str else count.size(value))
    return value


def _before_filter(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Looks at a filter's arguments, the filtered value first; returns them, iterators as lists where needed."""
    count, value, rest = meter(), args[0], args[1:]
    if name in _SIZED_FILTERS:
        count.check_numbers(*rest, *options.values())
    if name == "indent":
        width = rest[0] if rest else options.get("width", 4)
        count.check(
            count.size(value) + (str(value).count("\n") + 1) * (width if isinstance(width, int) else len(width))
        )
    elif name == "replace":
        old = options.get("old", rest[0] if rest else "")
        new = options.get("new", rest[-1] if len(rest) == 1 else rest[1] if rest else "")
        count.before_replace(str(value), str(old), str(new))
    elif name == "join":
        items = list(value)
        count.before_join(str(rest[0] if rest else options.get("d", "")), items)
        return (items, *rest)
    elif name == "format":
        count.before_percent(value, (rest, options))
    elif name == "sum" and not isinstance(options.get("start", rest[1] if len(rest) > 1 else 0), int | float):
        raise TemplateLimitError("it sums what are not numbers")
    return args


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    leading = int(getattr(function, "jinja_pass_arg", None) is not None)  # the context or the environment

    @functools.wraps(function)  # what Jinja passes first is told by an attribute, which is copied
    def call(*args: Any, **options: Any) -> Any:
        meter().tick()
        args = args[:leading] + _before_filter(name, args[leading:], options)
        return _counted(function(*args, **options))

    return call


def _counted(result: Any) -> Any:
    if isinstance(result, Generator):
        return meter().items(result)
    if type(result) is not bool:
        meter().size(result)
    return result


def _before_method(text: str, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Looks at the arguments of a text's method; returns them, iterators as lists where needed."""
    count = meter()
    if name in ("format", "format_map"):
        count.before_format(text, args, options)
        return args
    count.check_numbers(*args, *options.values())
    if name == "replace" and len(args) > 1:
        count.before_replace(text, args[0], args[1])
    elif name == "join" and args:
        items = list(args[0])
        count.before_join(text, items)
        return (items, *args[1:])
    return args


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it. What is compiled or rendered runs inside `metered`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_finalize
        )
        self.filters["tojson"] = _to_json
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        self.filters = {name: _metered_filter(name, function) for name, function in self.filters.items()}
        self.filters.update({_TICK: _tick, _WRITE: _write, _BUILT: _built, _CONCAT: _concat})
        del self.globals["lipsum"]
        self.globals.update(namespace=_Namespace, raise_exception=_raise_exception, strftime_now=_strftime_now)

    def template(self, source: str) -> Template:
        """A compiled template. Raises what Jinja does, and TemplateLimitError for a source beyond MAX_SOURCE."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"it has more than {MAX_SOURCE} characters")
        tree = _Metering().visit(self.parse(source))
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _DROPPED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        count = meter()
        size = count.before_operator(operator, left, right)
        result = self.binop_table[operator](left, right)
        if size is not None and not isinstance(result, str):
            count.hold(result, size)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter().tick()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = _before_method(owner, method.__name__, args, kwargs)
        return _counted(super().call(__context, __obj, *args, **kwargs))
