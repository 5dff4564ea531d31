"""The optional C parts; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Without a compiler their Python twins do the work.
        Extension(
            f"tripwire.{name}",
            [f"src/tripwire/{name.replace('.', '/')}.c"],
            depends=["src/tripwire/native.h"],
            optional=True,
        )
        for name in (
            *("writes._watch", "reading._reader", "tracing._sieve", "tracing._casts"),
            "validity._table",
        )
    ]
)
