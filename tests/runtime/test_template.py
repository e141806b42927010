"""Chat templates render as in transformers, and hostile ones neither get out nor run away."""

from __future__ import annotations

import resource
import sys
import time

import pytest

from specedge.runtime.errors import BundleError, PromptError
from specedge.runtime.template import MAX_TEMPLATE, ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " a 'quoted' <word> \n"},
    {"role": "assistant", "content": "<think>hm</think>\n\nyes"},
    {"role": "user", "content": "go on"},
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source, messages=MESSAGES):
    return ChatTemplate(source, NAMES, "chat_template.jinja").render(messages)


# Pieces of templates in use: Llama 3, Gemma, Qwen 3, Mistral, Phi, SmolLM.
IN_USE = {
    "namespace": "{% set ns = namespace(system='', n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system ~ ns.n }}",
    "slices": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% endif %}"
    "{% for m in loop_messages[::-1] %}{{ loop.index0 % 2 == 0 }}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "thinking": "{% for m in messages %}{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{{ m.content.split('<think>')[0].rstrip('\\n') }}"
    "{% endif %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=4) }}{{ tools is none }}",
    "macro": "{% macro turn(m, tail=true) -%} [{{ m.role | upper }}] {{ m.content }}{% if tail %}|{% endif %}"
    "{%- endmacro %}{% for m in messages %}{{ turn(m, tail=not loop.last) }}{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(' + ') }}"
    "{{ messages | length }}{{ messages | rejectattr('role', 'eq', 'user') | list | last }}"
    "{{ (messages | first).role | capitalize }}{{ 'a,b'.split(',') | join('-') | replace('-', '=') }}"
    "{{ missing | default('none') }}{{ ['b', 'a'] | sort }}{{ '  x' | indent(2, true) }}",
    "blocks": "\n    {% if add_generation_prompt %}\n  in\n    {% endif %}\n{%- set x %}cap{{ bos_token }}{% endset %}"
    "{{ x }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "dictionary": "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}"
    "{{ messages[0].get('name', '?') }}{{ {'a': [1, (2, 3)]} }}{{ dict(a=1) }}",
    "numbers": "{{ 7 // 2 }}{{ 7 / 2 }}{{ -7 % 3 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ 1.5 | round | int }}{{ [1] + [2] }}",
    "loops": "{% for i in range(3) %}{% for m in messages if m.role != 'user' %}{{ i }}{{ m.role[0] }}"
    "{{ loop.length }}{% else %}-{% endfor %}{% endfor %}",
    "tests": "{{ messages is iterable and messages is not mapping and messages[0].content is string }}"
    "{{ nothing is defined }}{{ 'a' in ['a'] }}{{ false is boolean }}{{ 3 is divisibleby 3 }}",
}


@pytest.mark.both
@pytest.mark.parametrize("name", IN_USE)
def test_templates_render_as_in_transformers(name):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    compiled = utils._compile_jinja_template(IN_USE[name])
    expected = compiled.render(messages=MESSAGES, tools=None, documents=None, add_generation_prompt=True, **NAMES)
    assert render(IN_USE[name]) == expected


def test_a_loop_renders_without_transformers():
    source = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    assert render(source, MESSAGES[:2]) == "<s>system: Be brief.\n<s>user: a 'quoted' <word>\n"


def test_the_date():
    assert render("{{ strftime_now('%d %b %Y') }}") == time.strftime("%d %b %Y")


def peak():
    """Most memory that the process has had, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size << 10


NS = "{% set ns = namespace(s='aaaa', l=[1], d={}, t=(1,)) %}{% for i in range(60) %}"
HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "a long range": "{% for a in range(99999) %}{% endfor %}",
    "a loop whose filter is slow": "{% set s = 'a' * 1000000 %}{% for i in range(9999) %}"
    "{% for j in range(9999) if 'b' in s %}{% endfor %}{% endfor %}",
    "a long product": "{{ 'A' * 10**9 }}",
    "a long constant product": "{{ 'A' * 1000000000 }}",
    "a long list": "{{ [0] * 1000000000 }}",
    "doubling by ~": NS + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
    "doubling by +": NS + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling lists": NS + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "doubling dictionaries": NS + "{% set ns.d = {'a': ns.d, 'b': ns.d} %}{% endfor %}{{ ns.d }}",
    "doubling tuples": NS + "{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ ns.t }}",
    "doubling arguments": "{% macro m(n) %}{% if n < 40 %}{{ m(n + 1, varargs, varargs) }}{% endif %}{% endmacro %}"
    "{{ m(0, 1, 1) }}",
    "doubling calls": "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "comparing twins": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] | list %}{% set ns.b = [ns.b, ns.b] | list %}{% endfor %}{{ ns.a == ns.b }}",
    "deep parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "3,000 nested ifs": "{% if a %}" * 3_000 + "{% endif %}" * 3_000,
    "1,000 nested loops": "{% for a in b %}" * 1_000 + "{% endfor %}" * 1_000,
    "a wide filter": "{{ 'x' | center(1000000000) }}",
    "a wide method": "{{ 'x'.center(1000000000) }}",
    "a wide format": "{{ '{:1000000000}'.format(1) }}",
    "a wide % format": "{{ '%1000000000d' % 1 }}",
    "a wide format filter": "{{ ['%999999999d'] | map('format', 1) | list }}",
    "a large power": "{{ 9 ** 9 ** 9 }}",
    "large numbers": "{{ 10**1000 * 10**1000 * 10**1000 }}",
    "a long join": "{{ (range(9999) | list) | join('A' * 100000) }}",
    "a long join method": "{{ ('B' * 100000).join(['a'] * 5000) }}",
    "a long replacement": "{{ ('A' * 100000) | replace('A', 'B' * 100000) }}",
    "a long replacement method": "{{ ('A' * 100000).replace('A', 'B' * 100000) }}",
    "a long indent": "{{ ('a\n' * 100000) | indent(9999) }}",
    "a long batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "a long JSON": "{{ messages | tojson(indent=100000) }}",
    "a long capture": "{% set x %}{% for i in range(9999) %}{% for j in range(9) %}" + "y" * 1000 + "{% endfor %}"
    "{% endfor %}{% endset %}",
    "a long output": "{% for i in range(9999) %}" + "y" * 1000 + "{% endfor %}",
    "a namespace shown": "{% set a = 'x' * 100000 %}{% for i in range(99) %}{{ a }}{% endfor %}",
    "a wide date": "{{ strftime_now('%999999999Y') }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "self": "{{ self.__init__.__globals__ }}",
    "a macro's function": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "the attr filter": "{{ '' | attr('__class__') }}",
    "an attribute by map": "{{ [''] | map(attribute='__class__') | list | string | length + ns }}",
    "a frame": "{{ messages.append.__self__ }}",
    "change": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "division by zero": "{{ 1 / 0 }}",
    "no syntax": "{% for %}",
    "another loop's end": "{% endgeneration %}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_one_error(name):
    before, memory = time.perf_counter(), peak()
    with pytest.raises((BundleError, PromptError)) as caught:
        render(HOSTILE[name])
    assert time.perf_counter() - before < 5
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
    assert peak() - memory < 256 << 20


def test_what_a_template_says_is_one_printable_line():
    with pytest.raises(PromptError, match=r"no\? system turn"):
        render("{{ raise_exception('no\x1b system\n turn') }}")


def test_a_template_that_is_too_large():
    with pytest.raises(BundleError, match="allowed"):
        render(" " * (MAX_TEMPLATE + 1))


def test_a_template_can_be_used_again_after_it_was_stopped():
    template = ChatTemplate(
        "{% for i in range(messages[0].n) %}{% for j in range(9999) %}{% endfor %}{% endfor %}ok",
        {},
        "chat_template.jinja",
    )
    with pytest.raises(BundleError, match="longer than 1 s"):
        template.render([{"role": "user", "n": 9999}])
    assert template.render([{"role": "user", "n": 1}]) == "ok"
