"""A Jinja environment for templates that nobody vouches for: no way out, and every step counted.

Jinja's own sandbox keeps a template from Python's internals, but not from running
for hours or filling the memory. Killing a thread is not possible and a process for
every prompt is too slow for a device, so this environment bounds what one step can do
and counts the steps:

- Every value a template makes (literals, operators, filters, calls) is weighed when it is
  made: as text it may not be longer than `LIMIT`. So no single step in C works on much.
- Every loop turn, call, filter and operator checks a clock, and charges the text it writes.
- Filters, tests and text methods are lists of what chat templates use; the rest is not there.

What is left over is the time of one step on data of at most `LIMIT` characters, some milliseconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["LIMIT", "Sandbox", "TemplateAbortedError"]

LIMIT = 1 << 20
_MAX_WRITTEN = 4 * LIMIT  # blocks that are captured and then dropped count too
_MAX_NUMBER = 10_000  # widths and counts that filters and `range` may be given
_MAX_BITS = 1024


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS = _words(
    "abs batch capitalize count d default dictsort e escape first float indent int items join last length list lower "
    "map max min reject rejectattr replace reverse round safe select selectattr sort string title trim unique upper"
)
_TESTS = _words(
    "boolean callable defined divisibleby eq equalto even false float ge gt greaterthan in integer iterable le lower "
    "lt lessthan mapping ne none number odd sameas sequence string true undefined upper == != > >= < <="
)
_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
        "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
        "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
    ),
    dict: _words("copy get items keys values"),
    list: _words("copy count index"),
    tuple: _words("count index"),
}


class TemplateAbortedError(TemplateError):
    """A template took too long or made too much."""


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)`, which does not show what it holds: that could be of any length."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Counted(NodeTransformer):
    """Sends what a template makes through the weighing filters, and charges each body for its text."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def _filter(self, node: nodes.Expr, name: str) -> nodes.Filter:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        return made.set_environment(self._environment)  # type: ignore[return-value]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802  visitor protocol
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._filter(node, "_weighed")

    visit_List = visit_Dict = visit_Tuple = _literal  # noqa: N815

    def _body(self, node: Any) -> nodes.Node:
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("charge"), [nodes.Const(written)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno).set_environment(self._environment))
        if getattr(node, "test", None) is not None:  # a loop's filter runs without its body
            node.test = nodes.And(nodes.Not(call), node.test).set_lineno(node.lineno).set_environment(self._environment)
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _body  # noqa: N815


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment for one chat template, with the names that transformers gives templates.

    Args:
        seconds: How long a template may be compiled or rendered.
    """

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._finalize,
            cache_size=0,
            optimized=False,
        )
        self._seconds = seconds
        self.restart()
        self.filters = {name: self._guarded(self.filters[name]) for name in _FILTERS}
        self.filters.update(
            join=self._guarded(_join),
            replace=self._guarded(_replace),
            indent=self._guarded(_indent),
            tojson=self._guarded(_tojson),
            _concat=self._guarded(_concat),
            _weighed=self._guarded(lambda value: value),
        )
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._guarded(tests[name]) for name in _TESTS}
        self.globals = {
            "range": _range,
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def restart(self) -> None:
        """Starts the clock and the count of written text anew."""
        self._deadline = monotonic() + self._seconds
        self._written = 0

    def charge(self, written: int) -> None:
        """Counts a step that writes this many characters.

        Raises:
            TemplateAbortedError: The template has used up its time or its space.
        """
        self._written += written
        if self._written > _MAX_WRITTEN:
            raise TemplateAbortedError(f"it writes more than {_MAX_WRITTEN:,} characters")
        if monotonic() > self._deadline:
            raise TemplateAbortedError(f"it takes longer than {self._seconds:g} s")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` can make any length; `is_safe_attribute` refuses it."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in Jinja
        __self.charge(0)
        _weigh([args, kwargs])
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            __obj = functools.partial(_GUARDED_METHODS[name], owner) if name in _GUARDED_METHODS else __obj
        result = super().call(__context, __obj, *args, **kwargs)
        _weigh(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.charge(0)
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Counted(self).visit(tree)  # type: ignore[no-any-return]

    def _finalize(self, value: Any) -> Any:
        self.charge(_weigh(value))
        return value

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that is counted, takes no huge numbers, and whose result is weighed."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.charge(0)
            for value in (*args[1:], *kwargs.values()):
                if isinstance(value, int) and abs(value) > _MAX_NUMBER and function.__name__ not in _COMPARING:
                    raise TemplateAbortedError(f"it gives a filter the number {value}")
            result = function(*args, **kwargs)
            _weigh(result)
            return result

        return guarded


_GUARDED_METHODS: dict[str, Callable[..., str]] = {}  # filled below: text methods whose results can be long
_COMPARING = ("eq", "ne", "gt", "ge", "lt", "le", "do_default", "test_divisibleby")


def _weigh(value: Any, spent: int = 0) -> int:
    """About how long a value is as text; raises as soon as that is too much."""
    if isinstance(value, str):
        spent += len(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            spent = _weigh(item, _weigh(key, spent + 4))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            spent = _weigh(item, spent + 2)
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise TemplateAbortedError(f"it makes a number of {value.bit_length():,} bits")
    else:
        spent += 1
    if spent > LIMIT:
        raise TemplateAbortedError(f"it makes a value longer than {LIMIT:,} characters")
    return spent


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sized = [operand for operand in (left, right) if isinstance(operand, (str, list, tuple))]
    if operator == "+" and len(sized) == 2:
        _weigh(right, _weigh(left))
    elif operator == "*" and sized:
        count = right if sized[0] is left else left
        if isinstance(count, int) and count > 0 and count * max(_weigh(sized[0]), 1) > LIMIT:
            raise TemplateAbortedError(f"it makes a value longer than {LIMIT:,} characters")
    elif operator == "%" and isinstance(left, str):
        raise TemplateAbortedError("it formats text with %, which is not offered here")
    elif operator == "**":
        if not all(isinstance(operand, (int, float)) and abs(operand) <= _MAX_BITS for operand in (left, right)):
            raise TemplateAbortedError("it raises a number to a power that is too large")
    elif isinstance(left, int) and isinstance(right, int):
        _weigh(left)
        _weigh(right)


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    parts = [_attribute(item, attribute) for item in value]
    _weigh(parts, len(parts) * len(d))
    return d.join(str(part) for part in parts)


def _attribute(item: Any, name: str | int | None) -> Any:
    if name is None:
        return item
    if not isinstance(item, Mapping):
        raise SecurityError("join can take attributes of mappings only")
    return item.get(name, "")


def _method_join(separator: str, parts: Iterable[Any]) -> str:
    texts = list(parts)
    _weigh(texts, len(texts) * len(separator))
    return separator.join(texts)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    if len(text) + found * len(new) > LIMIT:
        raise TemplateAbortedError(f"it makes a text longer than {LIMIT:,} characters")
    return text.replace(old, new, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    padding = " " * width if isinstance(width, int) else width
    lines = str(text).splitlines(keepends=True)
    if len(text) + len(lines) * len(padding) > LIMIT:
        raise TemplateAbortedError(f"it makes a text longer than {LIMIT:,} characters")
    return "".join(
        padding + line if (number or first) and (blank or line.strip()) else line for number, line in enumerate(lines)
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if (isinstance(indent, int) and indent > 16) or (isinstance(indent, str) and len(indent) > 16):
        raise TemplateAbortedError("it indents JSON by more than 16 columns")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_GUARDED_METHODS.update(join=_method_join, replace=_replace)


def _concat(values: list[Any]) -> str:
    _weigh(values)
    return "".join(str(value) for value in values)


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > _MAX_NUMBER:
        raise TemplateAbortedError(f"it counts through {len(numbers):,} numbers")
    return numbers


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message)[:LIMIT])


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100 or any(part[:1].isdigit() for part in pattern.split("%")[1:]):
        raise TemplateAbortedError("it asks for an unusual form of the date")
    return datetime.now().strftime(pattern)
