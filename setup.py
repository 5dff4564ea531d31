"""The optional C part; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tripwire.validity._watch",
            ["src/tripwire/validity/_watch.c"],
            optional=True,  # without a compiler the Python twin does its work
        )
    ]
)
