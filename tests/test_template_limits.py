"""What a chat template may cost: attacks end early and say why, and templates as models have them are left alone."""

from __future__ import annotations

import itertools

import pytest

from multilora_jax.chat_template import check_template, render_chat
from multilora_jax.errors import UserError
from multilora_jax.template_limits import Meter, TemplateLimitError, TemplateLimits
from multilora_jax.template_sandbox import MAX_SOURCE

MESSAGES = [{"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "x" * 100}]


def limits(looks: int = 300) -> TemplateLimits:
    """Small ones; the clock ends the rendering when it is looked at more often than that."""
    return TemplateLimits(max_text=5000, max_number=100, seconds=looks, clock=itertools.count().__next__)


def render(template: str, small: TemplateLimits | None = None) -> str:
    return render_chat(template, MESSAGES, {}, limits=small or limits())


def refused(template: str, small: TemplateLimits | None = None) -> str:
    with pytest.raises(UserError) as caught:
        render(template, small)
    assert (caught.value.status, caught.value.reason, caught.value.param) == (400, "template_limit", "chat_template")
    return caught.value.message


GROWING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"
NESTED = "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 9 }}", "{{ 10 ** 9 * 'a' }}", "{% set x = [0] * 10 ** 9 %}", "{% set x = 10 ** 9 * (0,) %}",
        "{% set x = '%1000000000d' % 1 %}", "{% set x = '%.1000000000f' % 1 %}", "{% set x = '%*d' % (10 ** 9, 1) %}",
        "{% set x = '%((b)a)1000000000d' % {'(b)a': 1} %}", "{% set x = '%1000000000d'|format(1) %}",
        "{% set x = '{:1000000000}'.format(1) %}", "{% set x = '{:{}}'.format(1, 1000000000) %}",
        "{% set x = '{0[}]:1000000000}'.format({'}': 1}) %}", "{% set x = '{a:1000000000}'.format_map({'a': 1}) %}",
        "{% set x = '{0}{0}{0}'.format('a' * 4000) %}", "{% set x = '%(a)s%(a)s' % {'a': 'a' * 4000} %}",
        "{% set x = 'a'.center(10 ** 9) %}", "{% set x = 'a'.zfill(10 ** 9) %}", "{% set x = 'a'.ljust(width) %}",
        "{% set x = 'a'|center(10 ** 9) %}", "{% set x = 'a'|indent(10 ** 9) %}",
        "{% set x = 'a'|center(1000000000) %}",
        "{% set x = ('\n' * 2000)|indent('abc') %}", "{% set x = 'a'|batch(10 ** 9, 0)|list %}",
        "{% set x = 'a'|slice(10 ** 9)|list %}", "{% set x = [[1]]|tojson(indent=10 ** 9) %}",
        "{% set x = ('a' * 1000).replace('a', 'bbbbbb') %}", "{% set x = ('a' * 1000)|replace('a', 'bbbbbb') %}",
        "{% set x = ('a' * 1000)|replace(new='bbbbbb', old='a') %}", "{% set x = ('a' * 1000).join('b' * 100) %}",
        "{% set x = ('b' * 100)|join('a' * 1000) %}", "{% set x = range(100)|join('a' * 1000) %}",
        "{% set x = [[1], [2]]|sum(start=[]) %}", "{% set x = [[1]]|sum(none, []) %}",
        "{% set x = 9 ** 9999999 %}", "{% set x = 7 ** 99999 * 7 ** 99999 %}",
        "{{ strftime_now('%1000000000Y') }}", "{{ strftime_now('%c' * 2000) }}",
        "{% set x = range(99999)|list %}", "{% set x = range(9999)|map('string')|list %}",
        "{% set x = [range(9999)|map('string'), 1]|map('list')|list %}",
        "{% set x = dict(a='a' * 4000, b='a' * 4000) %}",
        GROWING.replace("EXPRESSION", "ns.x ~ ns.x"), GROWING.replace("EXPRESSION", "ns.x + ns.x"),
        GROWING.replace("EXPRESSION", "[ns.x, ns.x]|join"), GROWING.replace("EXPRESSION", "'%s%s' % (ns.x, ns.x)"),
        NESTED.replace("EXPRESSION", "[ns.x, ns.x]"), NESTED.replace("EXPRESSION", "(ns.x, ns.x)"),
        NESTED.replace("EXPRESSION", "{'a': ns.x, 'b': ns.x}"), NESTED.replace("EXPRESSION", "dict(a=ns.x, b=ns.x)"),
        "{% for i in range(99) %}{{ 'a' * 100 }}{% endfor %}", "{% for i in range(99) %}" + "a" * 100 + "{% endfor %}",
        "{% set x %}{% for i in range(99) %}{{ [1] * 10 }}{% endfor %}{% endset %}",
        "{% macro f() %}" + "a" * 100 + "{% endmacro %}{% for i in range(99) %}{% set x = f() %}{% endfor %}",
    ],
)  # fmt: skip
def test_what_grows_too_large_is_never_made(template):
    small = TemplateLimits(max_text=5000, max_number=100)
    with pytest.raises(UserError) as caught:
        render_chat(template, MESSAGES, {"width": 10**9}, limits=small)
    assert (caught.value.reason, caught.value.param) == ("template_limit", "chat_template")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if false %}{% endfor %}",
        "{% for i in range(99999) recursive %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for i in [[], []] recursive %}{{ loop([[], []]) }}{{ loop([[], []]) }}{% endfor %}",
        "{% set x = range(99999)|select('odd')|first %}{% set x = range(99999)|select('equalto', -1)|first %}"
        "{% for i in range(99999) %}{% set y = i|string %}{% endfor %}",
        "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% set x = c.next() %}{% endfor %}",
    ],
)
def test_what_goes_round_for_ever_is_ended(template):
    assert "ran for more than" in refused(template)


def test_the_time_is_that_of_one_rendering():
    loop = "{% for i in range(200) %}{% endfor %}x"
    assert render(loop) == render(loop) == "x"
    refused(loop, limits(100))
    assert render(loop, limits(300)) == "x"


@pytest.mark.parametrize(
    "template",
    ["{{ 'a'|urlize }}", "{{ 'a'|wordwrap(1) }}", "{{ lipsum(1) }}", "{{ 'a'.encode() }}", "{{ 'a'.expandtabs(9) }}",
     "{{ (1).to_bytes(1000000000, 'big') }}", "{{ 'a'.translate({97: 'bb'}) }}", "{{ {}.fromkeys([1]) }}"],
)  # fmt: skip
def test_what_no_template_needs_is_not_there(template):
    with pytest.raises(UserError) as caught:
        render(template)
    assert caught.value.reason == "chat_template_error"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 2 * 3 }}{{ 1 + 1 }}", "ababab[1, 1]1024362"),
        ("{{ '%5.1f|%s' % (1.25, 'a') }}{{ '{:>3}|{}'.format(1, 'a') }}{{ '%s'|format(7) }}", "  1.2|a  1|a7"),
        ("{{ '2024010112345678 %s' % 1 }}{{ '2024010112345678 {}'.format(1) }}", "2024010112345678 1" * 2),
        ("{{ [1, 2]|join(', ') }}{{ ', '.join(['a', 'b']) }}{{ (1, 2)|join }}", "1, 2a, b12"),
        ("{{ 'a-b'|replace('-', '+') }}{{ 'a-b'.replace('-', '') }}{{ 'a\nb'|indent(2) }}", "a+baba\n  b"),
        ("{{ 1 ~ 'a' ~ none }}{{ messages[0].role ~ ':' }}", "1aNoneuser:"),
        ("{{ messages|map(attribute='role')|join(',') }}"
         "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
         "user,assistant1"),
        ("{% set ns = namespace(n=0, l=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
         "{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.l }}", "2['user', 'assistant']"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{% endfor %}",
         "11True"),
        ("{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }};{% endfor %}", "1;2;;;3;;"),
        ("{% macro f(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}"
         "{% call f(1, 3) %}in{% endcall %}", "<12><13in>"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
        ("{{ {'a': messages[0].role, 'b': (1, [2])}|tojson }}{{ [1]|tojson(indent=1) }}",
         '{"a": "user", "b": [1, [2]]}[\n 1\n]'),
        ("{{ messages[0].content.split('\n')[-1] }}{{ messages[1:]|length }}{{ [3, 1]|sort|first }}{{ [1, 2]|sum }}",
         "there113"),
        ("{% for k, v in {'a': messages[0].role}.items() %}{{ k }}{{ v }}{% endfor %}", "auser"),
        ("{% for k, v in {'a': 1}|items %}{{ k }}{{ v }}{% endfor %}{{ [1, 2, 3]|batch(2)|list }}", "a1[[1, 2], [3]]"),
        ("{% set a, b = 1, messages[0].role %}{{ a }}{{ b }}{{ namespace(a=1) }}", "1user<Namespace>"),
        ("{{ x|default(1700000000) }}{{ 'a'|truncate(5) }}{{ 2.55|round(1) }}{{ 'é'|upper }}", "1700000000a2.5É"),
    ],
)  # fmt: skip
def test_templates_as_they_are_mean_what_they_did(template, text):
    assert render(template) == text


def test_long_conversations_fit():
    messages = [{"role": "user", "content": "word " * 200_000}] * 10
    template = (
        "{% for m in messages %}{% if not loop.last or messages|length > 3 %}<{{ m.role }}>"
        "{{ m.content.replace('word', 'words')|trim }}\n{{ '%s' % m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match="16777216 characters"):
        render_chat(template, messages, {})
    assert len(render_chat(template, messages[:7], {})) > 14 * 10**6


def test_templates_that_do_not_compile():
    check_template("{% if true %}a{% endif %}")
    for source, reason in (("{% if %}", "chat_template_error"), ("a" * (MAX_SOURCE + 1), "template_limit"),
                           ("{{ 'a'|nothing }}", "chat_template_error")):  # fmt: skip
        with pytest.raises(UserError) as caught:
            check_template(source)
        assert caught.value.reason == reason


def test_sizes_count_shared_parts_wherever_they_are():
    meter = Meter(TemplateLimits(max_text=1000))
    inner = ["a" * 84]
    assert meter.size(inner) == 100
    assert meter.size([inner, inner]) == 2 * (100 + 16)
    assert meter.size({"ab": inner}) == 2 + 100 + 2 * 16
    with pytest.raises(TemplateLimitError, match="1000 characters"):
        meter.size([inner] * 9)
    for _ in range(100):  # what is held for its size is bounded too
        meter.size([inner])
    assert len(meter._sizes) < 12
