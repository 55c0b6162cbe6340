"""The recipes that come with turnrl, by name."""

from pathlib import Path

from turnrl.plugin.errors import suggest_name


def bundled_recipes() -> dict[str, Path]:
    """The recipes that come with turnrl, by name: `quickstart`, `variants/triviaqa_qwen2.5_3b`.

    They lie inside this folder in an installed turnrl, and at the top of a clone.
    """
    inside = Path(__file__).parent / "recipes"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"
    files = sorted(folder.rglob("*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def recipe_name(file: str) -> str:
    """The name of a bundled recipe, given its file; the command line takes that name too. Any other
    file is returned as it is."""
    names = {str(bundled): name for name, bundled in bundled_recipes().items()}
    return names.get(file, file)


def suggest_recipe(name: str) -> str:
    """` Did you mean variants/triviaqa_qwen2.5_3b?` if a bundled recipe has a similar name."""
    bare, names = name.removeprefix("recipes/").removesuffix(".yaml"), bundled_recipes()
    variant = next((full for full in names if full.endswith(f"/{bare}")), None)
    return f" Did you mean {variant}?" if variant else suggest_name(bare, names)


def find_recipe(name: str) -> str:
    """The file of a recipe, given its path or the name of a bundled recipe. A file of that name in
    the current folder, with or without `.yaml`, overrides the bundled recipe."""
    bundled = bundled_recipes().get(name)
    if bundled is None or Path(name).is_file():
        return name
    own = Path(f"{name}.yaml")
    return str(own if own.is_file() else bundled)
