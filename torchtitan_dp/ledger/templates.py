"""The templates of what is written for people: a plan, an audit's result, a model card, a page.

Guarantee:
    No filter rounds a claim in its own favour: `up` is for epsilon, its consequences and q, `down`
    for sigma, and `exact` for delta and C.
"""

from pathlib import Path

import jinja2

from torchtitan_dp.privacy.accounting import rounded_down, rounded_up


def templates(*folders: Path, html: bool = False) -> jinja2.Environment:
    """Load the templates of these folders; HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )
    environment.filters |= {
        "up": rounded_up,
        "down": rounded_down,
        "exact": exact,
        "grouped": "{:,}".format,
        "percent": "{:.1%}".format,
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
    }
    return environment


def exact(value: float) -> str:
    """Write a number with as many digits as it has.

    >>> exact(1e-5), exact(1.2345649e-06), exact(1.0), exact(0.1)
    ('1e-05', '1.2345649e-06', '1', '0.1')
    """
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
