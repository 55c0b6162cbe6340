"""Finds unknown keys in a recipe, at any depth, before torch is imported.

The classes that a recipe describes are read from their source code, and nothing is imported. Where
that leaves a doubt (a class that passes settings on, a name that two classes have) no fault is
found here, and jsonargparse decides later.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from turnrl.errors import RecipeError, did_you_mean

SYNONYMS = {
    other: ours
    for ours, others in {
        "model.group_size": "num_generations n_agent n rollouts_per_example rollout_n",
        "model.optimizer.lr": "learning_rate lr",
        "model.optimizer.weight_decay": "weight_decay",
        "model.scheduler": "lr_scheduler_type lr_scheduler warmup_steps warmup_ratio",
        "model.objective.kl_coef": "beta kl_coef kl_loss_coef kl_ctrl",
        "model.objective.clip_low and clip_high": "epsilon clip_ratio cliprange clip_range",
        "model.objective.clip_low": "epsilon_low clip_ratio_low",
        "model.objective.clip_high": "epsilon_high clip_ratio_high",
        "model.objective.aggregation": "loss_type loss_agg_mode",
        "model.rollout.temperature": "temperature",
        "model.rollout.top_p": "top_p",
        "model.rollout.top_k": "top_k",
        "model.rollout.min_p": "min_p",
        "model.rollout.max_turn_tokens (of a turn) or max_tokens (of all turns)": (
            "max_completion_length max_response_length max_new_tokens"
        ),
        "model.rollout.max_tokens": "max_prompt_length max_seq_length max_model_len max_tokens",
        "model.rollout.max_result_tokens": "max_obs_length",
        "model.rollout.tools": "tools environment_factory",
        "max_turns of model.rollout.segmenter": "max_turns max_tool_calling_iterations",
        "model.updates_per_iteration": "num_iterations ppo_epochs",
        "model.steps_per_update": "ppo_mini_batch_size steps_per_generation",
        "model.minibatch_tokens": (
            "gradient_accumulation_steps ppo_micro_batch_size ppo_max_token_len_per_gpu"
        ),
        "model.rewards": "reward_funcs reward_function rubric",
        "model.policy.model": "model_name_or_path model_name",
        "model.policy.gradient_checkpointing": "gradient_checkpointing",
        "model.policy.dtype": "bf16 torch_dtype dtype",
        "model.policy.lora": "peft_config lora_r lora_rank lora_alpha use_peft",
        "data.questions_per_iteration": "train_batch_size per_device_train_batch_size batch_size",
        "data.train": "train_files train_dataset",
        "data.val": "val_files eval_dataset",
        "trainer.max_epochs (of iterations)": "total_epochs num_train_epochs epochs",
        "trainer.max_steps": "total_training_steps",
        "trainer.gradient_clip_val": "max_grad_norm grad_clip",
        "trainer.check_val_every_n_epoch": "test_freq eval_steps",
        "trainer.devices": "n_gpus_per_node",
        "trainer.num_nodes": "nnodes",
        "trainer.logger": "report_to project_name experiment_name run_name output_dir",
        "seed_everything": "seed",
    }.items()
    for other in others.split()
}
"""Settings of TRL, verl, Search-R1 and verifiers, and what to set here."""
_MOVED = {"minibatch_tokens": "model.minibatch_tokens", "trunk": "trains_policy"}
"""Keys of components in earlier recipes, and what to set in their place."""
_PARTS = {"class_path", "init_args", "dict_kwargs"}
_ROOTS = {
    "model": "turnrl.MTGRPO",
    "data": "turnrl.QuestionData",
    "trainer": "lightning.pytorch.trainer.trainer.Trainer",
}
"""Classes of a recipe that names none."""
_LIBRARIES = {"torch": ["optim"], "lightning": ["pytorch/callbacks", "pytorch/loggers"]}
"""Folders of others whose classes a recipe knows by short names."""
_SEVERAL = ("Adafactor",)
"""Short names that two libraries have."""
_EMPTY = ("ABC", "object", "Generic", "Protocol")
"""Bases whose instances are made without arguments."""
_OPEN = ("dict", "Mapping", "MutableMapping", "Any", "object")
"""Types whose values may be a mapping with any keys."""
_PLAIN = ("final", "dataclass", "contract")
"""Decorators of classes that leave the arguments as they are written."""


def unknown_key(key: str, known: Iterable[str], owner: str, component: bool = False) -> str:
    """The message about a key that a class does not have.

    Args:
        key: The key with those above it.
        known: The keys that there are.
        owner: Name of their class.
        component: Whether the class was named by the recipe. Other libraries' names are looked up
            for the recipe's own sections alone.
    """
    name = key.rpartition(".")[2]
    known, colon = list(known), " In YAML a space follows the colon." if ":" in name else ""
    has = f" {owner} has the keys {', '.join(known) or 'none'}."
    ours = (_MOVED if component else SYNONYMS).get(name)
    if ours is not None:
        return f"unknown key {key!r}. Set {ours} instead.{has if component else ''}"
    return f"unknown key {key!r}.{colon}{did_you_mean(name, known) or has}"


def named_elsewhere(key: str, value: Any) -> str:
    """` Set model.group_size instead.` for a key at the top that other libraries have, or that has
    such a one below it; else nothing."""
    for name in (key, *_below(value)):
        if name in SYNONYMS:
            of = "" if name == key else f" of {name}"
            return f" Set {SYNONYMS[name]} instead{of}."
    return ""


def _below(value: Any) -> Iterator[str]:
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield str(name)
        yield from _below(item)


def refuse_unknown_below(contents: Mapping[str, Any], recipes: Sequence[str]) -> None:
    """Refuse a key in a section, or in a component at any depth, that its class does not have.

    Args:
        contents: Recipes and options, put together.
        recipes: The files. Classes of one's own may lie beside them.
    Raises:
        RecipeError: Naming the key, and what would do.
    """
    places = (str(Path.cwd()), *(str(Path(file).absolute().parent) for file in recipes))
    source = _Source(places)
    for section, default in _ROOTS.items():
        value = contents.get(section) or {}
        described = {"class_path": default, "init_args": value}
        if "class_path" in value:
            described = value
        own = str(described["class_path"]).rpartition(".")[2] != default.rpartition(".")[2]
        source.refuse(described, section, component=own)


@dataclass(frozen=True)
class _Class:
    """A class in source code."""

    module: str
    node: ast.ClassDef


_Parameters = dict[str, ast.expr | None]
"""Parameters by name, with their types as they are written."""


class _Source:
    """Source code of the classes that recipes name.

    Args:
        places: Folders of modules that are not installed.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._statements = functools.cache(self._read)

    def refuse(
        self, described: Mapping[str, Any], key: str, component: bool = True, skip: int = 0
    ) -> None:
        """Refuse an unknown key in a class with its settings, or below it; see
        `refuse_unknown_below`.

        Args:
            described: `class_path` and perhaps `init_args`.
            key: Where it stands.
            component: Whether the recipe named the class.
            skip: How many of its first parameters are not the recipe's business.
        """
        name, settings = described["class_path"], described.get("init_args") or {}
        if isinstance(name, str) and isinstance(settings, Mapping) and {*described} <= _PARTS:
            found = self._at(name) if "." in name else self._short(name)
            if found is not None:
                self._refuse_in(settings, found, key, component, skip)

    def _refuse_in(
        self, settings: Mapping[str, Any], owner: _Class, key: str, component: bool, skip: int = 0
    ) -> None:
        found = self._parameters(owner)
        if found is None:
            return
        known = dict([*found.items()][skip:])
        for name, item in settings.items():
            if not isinstance(name, str) or "." in name:  # jsonargparse may take it
                continue
            if name not in known:
                told = unknown_key(f"{key}.{name}", known, owner.node.name, component)
                raise RecipeError(told)
            self._refuse_below(item, known[name], owner.module, f"{key}.{name}")

    def _refuse_below(self, item: Any, kind: ast.expr | None, module: str, key: str) -> None:
        if isinstance(item, list):
            for number, one in enumerate(item):
                self._refuse_below(one, kind, module, f"{key}[{number}]")
        if not isinstance(item, Mapping):
            return
        if "class_path" in item:
            # the first parameter of what is to be called is what it is called with
            called = kind is not None and ast.unparse(kind).startswith("Callable[")
            self.refuse(item, key, skip=int(called))
        elif not _PARTS & {*item} and kind is not None:
            members = [*_members(kind)]
            if any(isinstance(one, ast.Subscript) or _last(one) in _OPEN for one in members):
                return  # a dictionary may be meant
            named = (self._meant(module, one) for one in members)
            plain = {"final", "dataclass"}  # any other has a class_path
            sections = [one for one in named if one is not None and _decorators(one) & plain]
            if len(sections) == 1:
                self._refuse_in(item, sections[0], key, component=False)

    def _parameters(self, owner: _Class) -> _Parameters | None:
        """What a class is made with; None if its source does not tell."""
        made = {one.name: one for one in owner.node.body if isinstance(one, ast.FunctionDef)}
        if _decorators(owner) - {*_PLAIN} or "__new__" in made:
            return None
        if init := made.get("__init__"):
            args = init.args
            named = [*args.posonlyargs, *args.args][1:] + args.kwonlyargs
            passed = self._passed_on(owner, init) if args.kwarg else {}
            return None if passed is None else {one.arg: one.annotation for one in named} | passed
        inherited = self._inherited(owner)
        if inherited is None or "dataclass" not in _decorators(owner):
            return inherited
        return inherited | {
            one.target.id: one.annotation
            for one in owner.node.body
            if isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and "ClassVar" not in ast.unparse(one.annotation)
            and "init=False" not in ast.unparse(one)
        }

    def _inherited(self, owner: _Class) -> _Parameters | None:
        """What the bases of a class are made with."""
        inherited: _Parameters = {}
        for base in reversed(owner.node.bases):
            plain = base.value if isinstance(base, ast.Subscript) else base
            if _last(plain) not in _EMPTY:
                above = self._meant(owner.module, plain)
                if above is None or (known := self._parameters(above)) is None:
                    return None
                inherited = {**inherited, **known}
        return inherited

    def _passed_on(self, owner: _Class, init: ast.FunctionDef) -> _Parameters | None:
        """What a constructor takes by `**settings`, if it does nothing but pass that on to one
        other."""
        assert init.args.kwarg is not None
        rest = init.args.kwarg.arg
        if any(_takes_out(one, rest) for one in ast.walk(init)):
            return None
        passed = [
            call.func
            for call in ast.walk(init)
            if isinstance(call, ast.Call)
            for one in call.keywords
            if one.arg is None and _last(one.value) == rest
        ]
        if len(passed) != 1:
            return None
        if ast.unparse(passed[0]) == "super().__init__":
            return self._inherited(owner)
        to = self._meant(owner.module, passed[0])
        return None if to is None else self._parameters(to)

    def _meant(self, module: str, node: ast.AST) -> _Class | None:
        """The class that a name in a module means, or one like `types.Segmenter`."""
        if isinstance(node, ast.Name):
            return self._find(module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            for home, name, as_name in self._imports(module):
                if as_name == node.value.id:
                    return self._find(f"{home}.{name}" if name else home, node.attr)
        return None

    def _at(self, path: str) -> _Class | None:
        module, _, name = path.rpartition(".")
        return self._find(module, name)

    def _short(self, name: str) -> _Class | None:
        found = [] if name in _SEVERAL else _short_names().get(name, [])
        return self._find(found[0], name) if len(found) == 1 else None

    def _find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> _Class | None:
        """The class of a name in a module, followed through imports."""
        if module in seen:
            return None
        for one in self._statements(module):
            if isinstance(one, ast.ClassDef) and one.name == name:
                return _Class(module, one)
        for home, inner, as_name in self._imports(module):
            if inner and as_name in (name, "*"):
                wanted = name if inner == "*" else inner
                if (found := self._find(home, wanted, seen | {module})) is not None:
                    return found
        return None

    def _imports(self, module: str) -> Iterator[tuple[str, str, str]]:
        """What a module imports: from where, the name there (empty for the module itself), and the
        name here."""
        package = module if self._is_package(module) else module.rpartition(".")[0]
        for one in self._statements(module):
            if isinstance(one, ast.Import):
                yield from ((a.name, "", a.asname or a.name) for a in one.names)
            elif isinstance(one, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - max(one.level - 1, 0)]
                home = ".".join([*above, *filter(None, [one.module])]) if one.level else one.module
                yield from ((home or "", a.name, a.asname or a.name) for a in one.names)

    def _is_package(self, module: str) -> bool:
        file = self._file(module)
        return file is not None and file.name == "__init__.py"

    def _file(self, module: str) -> Path | None:
        top, *below = module.split(".")
        try:
            spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [*self._places])
        except (ValueError, ImportError):
            return None
        if spec is None or spec.origin is None:
            return None
        file = Path(spec.origin)
        for part in below:
            inside = file.parent / part
            file = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
        return file if file.suffix == ".py" and file.is_file() else None

    def _read(self, module: str) -> list[ast.stmt]:
        """The classes and imports of a module, those under conditions too; `turnrl` lists its names
        in a file of types beside it."""
        file = self._file(module)
        files = [] if file is None else [file, file.with_suffix(".pyi")]
        try:
            return [one for kept in files if kept.is_file() for one in _parsed(kept.read_bytes())]
        except (OSError, ValueError, SyntaxError):
            return []


@functools.lru_cache(maxsize=512)
def _parsed(source: bytes) -> Sequence[ast.stmt]:
    """The classes and imports of a source, and of its classes what says how they are made: a
    command that reads many recipes parses each file once, and holds little of it."""
    found = [one for statement in ast.parse(source).body for one in _flat(statement)]
    for one in found:
        if isinstance(one, ast.ClassDef):
            one.body = [inner for inner in one.body if _tells(inner)]
    return [one for one in found if isinstance(one, ast.ClassDef | ast.Import | ast.ImportFrom)]


def _tells(statement: ast.stmt) -> bool:
    """Whether a statement of a class says how it is made."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name in ("__init__", "__new__")
    return isinstance(statement, ast.AnnAssign)


def _flat(statement: ast.stmt) -> Iterator[ast.stmt]:
    yield statement
    if isinstance(statement, ast.If | ast.Try):
        for inner in (*statement.body, *statement.orelse):
            yield from _flat(inner)


def _last(node: ast.AST) -> str:
    """The last name of `final`, `typing.final` or `contract("...")`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _takes_out(node: ast.AST, rest: str) -> bool:
    """True if code takes a setting of its own out of others: `rest.pop(...)`, `rest["size"]`,
    `"size" in rest`."""
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
        return any(_last(one) == rest for one in node.comparators)
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        return False
    return isinstance(node, ast.Attribute | ast.Subscript) and _last(node.value) == rest


def _members(kind: ast.expr) -> Iterator[ast.expr]:
    """The types that a value may have: of a union each, of a list that of its items."""
    if isinstance(kind, ast.BinOp):
        yield from _members(kind.left)
        yield from _members(kind.right)
    elif isinstance(kind, ast.Subscript) and _last(kind.value) in ("Optional", "Union", "list"):
        inner = kind.slice
        for one in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
            yield from _members(one)
    else:
        yield kind


def _decorators(owner: _Class) -> set[str]:
    return {_last(one) for one in owner.node.decorator_list}


@functools.cache
def _short_names() -> Mapping[str, list[str]]:
    """The modules that define each class that a recipe may name shortly."""
    tops = {point.module.split(".")[0] for point in importlib.metadata.entry_points(group="turnrl")}
    found: dict[str, list[str]] = {}
    for top in ("turnrl", *sorted(tops), *_LIBRARIES):
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            continue
        home = Path(spec.origin).parent
        files = [
            file
            for folder in _LIBRARIES.get(top, [""])
            for file in sorted((home / folder).rglob("*.py"))
        ]
        for file in files if Path(spec.origin).name == "__init__.py" else [Path(spec.origin)]:
            parts = [top, *file.relative_to(home).with_suffix("").parts]
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = file.read_text(encoding="utf-8", errors="replace")
            for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
                found.setdefault(name, []).append(module)
    return found
