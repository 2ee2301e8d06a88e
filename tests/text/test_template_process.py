"""Strangers' templates: whatever one does, it ends in a TemplateError, and the next rendering works."""

import gc
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from heedful.errors import TemplateError
from heedful.text.template_process import TemplateProcess

TWICE = "{% for i in range(60) %}BODY{% endfor %}"
NEVER_ENDING = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a list": "{% set r = range(99999) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{% if loop.depth < 99 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "constant power": "{{ 10 ** (10 ** 10) }}",
    "power": "{{ n ** (n ** n) }}",
    "comparison": "{% set s = namespace(x=[], y=[]) %}"
    + TWICE.replace("BODY", "{% set s.x = [s.x, s.x] %}{% set s.y = [s.y, s.y] %}")
    + "{{ s.x == s.y }}",
}
OUT_OF_MEMORY = {
    "multiplied": "{{ 'a' * 10 ** 9 }}",
    "doubled": "{% set s = namespace(x='aa') %}" + TWICE.replace("BODY", "{% set s.x = s.x ~ s.x %}"),
    "width": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 2) | list }}",
    "join": "{{ range(99999) | join('a' * 1000000) }}",
}
REFUSED = {
    "range": ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    "format string": ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    "mutation": ("{{ messages.append(1) }}", "unsafe"),
    "endless macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "parentheses": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "RecursionError"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "syntax": ("{% if %}\n", "syntax error: Expected an expression.*line 1"),
    "undefined": ("{{ a.b }}", "'a' is undefined"),
    "type": ("{{ 'a' + 1 }}", "TypeError"),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "words": ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
}


def process(source: str, *, max_chars: int = 100_000, cpu_seconds: float = 0.4) -> TemplateProcess:
    return TemplateProcess(source, max_chars=max_chars, cpu_seconds=cpu_seconds)


@pytest.mark.parametrize("source", NEVER_ENDING.values(), ids=NEVER_ENDING.keys())
def test_time_is_limited(source: str) -> None:
    with pytest.raises(TemplateError, match=r"took more than 0\.4 s"):
        process(source).render({"n": 99})


@pytest.mark.parametrize("source", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY.keys())
def test_memory_is_limited(source: str) -> None:
    with pytest.raises(TemplateError, match="ran out of the memory"):
        process(source, cpu_seconds=5).render({})


@pytest.mark.parametrize(("source", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_faults_are_named(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        process(source, cpu_seconds=5).render({"messages": []})


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__ }}", "{{ messages | attr('__class__') }}", "{{ '{0.__class__}'.format(1) }}"]
)
def test_objects_behind_the_values_are_out_of_reach(source: str) -> None:
    assert process(source, cpu_seconds=5).render({"messages": []}) == ""


def test_output_is_limited() -> None:
    small = process("{% for i in range(n) %}0123456789{% endfor %}", max_chars=50)
    assert len(small.render({"n": 5})) == 50
    with pytest.raises(TemplateError, match="more than 50 characters"):
        small.render({"n": 6})


def test_an_error_has_bounded_text() -> None:
    with pytest.raises(TemplateError) as caught:
        process("{{ raise_exception('a' * 1000000) }}").render({})
    assert len(str(caught.value)) < 3000


def test_it_goes_on_after_each_kind_of_end() -> None:
    template = process("{{ 12 // n }}{% if n == 9 %}{{ n ** (n ** n) }}{% elif n == 8 %}{{ 'a' * 8 ** 11 }}{% endif %}")
    for n, words in [(0, "ZeroDivisionError"), (9, "took more than"), (8, "memory")]:
        assert template.render({"n": 2}) == "6"
        with pytest.raises(TemplateError, match=words):
            template.render({"n": n})
    assert template.render({"n": 3}) == "4"


def test_outside_of_the_main_thread() -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            process(NEVER_ENDING["nested loops"]).render({})
        except TemplateError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "took more than" in str(caught)


def test_many_threads_share_one_process() -> None:
    template = process("{{ n }}:{{ text }}")
    results: dict[int, str] = {}

    def run(n: int) -> None:
        for _ in range(20):
            results[n] = template.render({"n": n, "text": "x" * n * 1000})

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"{n}:{'x' * n * 1000}" for n in range(4)}


def test_a_killed_process_is_replaced() -> None:
    template = process("{{ pid }}")
    template.render({"pid": 1})
    worker = template._worker
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker.exit_status()
    assert template.render({"pid": 2}) == "2"


def test_an_interrupted_exchange_does_not_meet_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    template = process("{{ n }}")
    template.render({"n": 1})
    worker = template._worker
    assert worker is not None

    class Interrupted:
        def __init__(self, pipe: Any) -> None:
            self.close = pipe.close

        def readline(self) -> bytes:
            raise KeyboardInterrupt

    monkeypatch.setattr(worker._process, "stdout", Interrupted(worker._process.stdout))
    with pytest.raises(KeyboardInterrupt):
        template.render({"n": 2})
    assert template.render({"n": 3}) == "3"


def test_the_process_ends_with_its_template() -> None:
    template = process("{{ n }}")
    template.render({"n": 1})
    assert template._worker is not None
    running = template._worker._process
    del template
    gc.collect()
    assert running.returncode == -signal.SIGKILL


def run_alone(program: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_a_forked_child_starts_its_own() -> None:
    run_alone(
        "import os\n"
        "from heedful.text.template_process import TemplateProcess\n"
        "template = TemplateProcess('{{ n }}', max_chars=9, cpu_seconds=9)\n"
        "assert template.render({'n': 1}) == '1'\n"
        "worker = template._worker\n"
        "pid = os.fork()\n"
        "assert template.render({'n': 2}) == '2'\n"
        "assert (template._worker is worker) == bool(pid)\n"
        "if pid:\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    assert template.render({'n': 3}) == '3'\n"
    )


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(TemplateError, match="no process could be started"):
        process("x").render({})


def test_this_process_imports_no_jinja2() -> None:
    run_alone(
        "import sys\n"
        "from heedful.text.template_process import TemplateProcess\n"
        "assert TemplateProcess('x', max_chars=9, cpu_seconds=9).render({}) == 'x'\n"
        "assert 'jinja2' not in sys.modules and 'torch' not in sys.modules\n"
    )
