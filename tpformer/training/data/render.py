"""Renders one chat template, which may be hostile: a program of its own, with little time and memory.

It reads {"template", "values"} as JSON from its input, and writes {"text"}, {"refused"} or {"missing"}. It imports
nothing of tpformer, so that it starts quickly.
"""

import json
import sys
from datetime import datetime
from typing import Any

SECONDS = 2  # of computing
MEMORY = 1 << 29  # bytes of address space
CHARACTERS = 1 << 24  # of a conversation


def limit() -> None:
    """Give this process little time and memory, where the system can do it."""
    import resource

    for kind, most in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):  # a system may not have it, or have given less already
            continue


def render(template: str, values: dict[str, Any]) -> dict[str, str]:
    """The text, why the template is refused, or what is missing to render it."""
    try:
        sandbox = environment()
    except ImportError as error:
        return {"missing": str(error)}
    try:
        text = sandbox.from_string(template).render(tools=None, documents=None, **values)
    except MemoryError:
        return {"refused": f"it takes more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a template can fail as any program can
        return {"refused": f"{type(error).__name__}: {str(error)[:1000]}"}
    if len(text) > CHARACTERS:
        return {"refused": f"it writes {len(text)} characters, more than {CHARACTERS}"}
    return {"text": text}


def environment() -> Any:
    """jinja2's sandbox with what transformers adds to it. ImportError without a jinja2 that is safe."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("chat templates need the jinja2 package: pip install tpformer[hf]") from error
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < (3, 1, 6):
        raise ImportError(
            f"the sandbox of jinja2 {jinja2.__version__} has known holes: pip install --upgrade 'jinja2>=3.1.6'"
        )

    class Generation(Extension):
        """{% generation %} marks answers for those who train on them. Here it is only a block."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja2's own escapes characters for HTML
        options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, **options)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


if __name__ == "__main__":
    given = json.load(sys.stdin.buffer)
    limit()
    json.dump(render(given["template"], given["values"]), sys.stdout)
