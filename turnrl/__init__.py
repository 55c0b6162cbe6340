"""turnrl: train language-model agents that use tools over several turns,
with credit given turn by turn.

`__init__.pyi` lists the public interface. Each name is imported from its module on first use, so
that `import turnrl` finishes at once: nothing can handle a Ctrl-C before it has.
"""

# pathlib takes longer to import than all of this; each line is `from HOME import NAME as NAME`
with open(f"{__file__}i", encoding="utf-8") as _listed:  # noqa: PTH123
    _HOMES = {line.split()[3]: line.split()[1] for line in _listed if line.startswith("from ")}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("turnrl")
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'turnrl' has no attribute {name!r}")
    __import__("turnrl.types")  # each contract makes its hook known
    return getattr(__import__(home, fromlist=[name]), name)  # a name, or a module in a package


def __dir__() -> list[str]:
    return __all__
