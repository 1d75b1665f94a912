"""Imports of transformers and vLLM without what only compilers, FSDP and tensor parallelism need: a third of their CPU
seconds.

    with lean_imports():
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(folder)

transformers imports torch's compiler for decorators, and DTensor and FSDP for checks of types. Within the block, these
modules have placeholders, whose names import the real module when they are used: when they are called, subclassed, or
asked for an attribute. `isinstance` does not import it: there are no instances of a class that was never imported.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER, INDUCTOR = "torch._dynamo", "torch._inductor"
DTENSOR = "torch.distributed.tensor"
DEFERRED = (
    "torch._dynamo._trace_wrapped_higher_order_op",
    "torch.distributed._composable.fsdp",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    DTENSOR,
    "transformers.distributed.pipeline_parallel",
    "transformers.distributed.sharding_utils",
    "transformers.distributed.tensor_parallel",
)
PATCHED = ("torch._inductor.graph", "torch._inductor.lowering")  # by vLLM, if they can be imported


class _Deferred:
    """A name of a module that is imported when the name is used."""

    def __init__(self, module: str, name: str, *, is_base: bool = True) -> None:
        self.__dict__.update(_module=module, _name=name, _is_base=is_base)

    def _real(self) -> Any:
        _remove(self._module)
        return getattr(importlib.import_module(self._module), self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._real(), name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),) if self._is_base else ()

    def __instancecheck__(self, instance: object) -> bool:
        return _is_imported(self._module) and isinstance(instance, self._real())

    def __subclasscheck__(self, kind: type) -> bool:
        return _is_imported(self._module) and issubclass(kind, self._real())

    def __or__(self, other: object) -> object:
        """In an annotation."""
        return Any

    __ror__ = __or__


class _Placeholder(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # as a package has: `_Submodules` is asked for what is in it

    def __getattr__(self, name: str) -> _Deferred:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Deferred(self.__name__, name)


class _Compiler(_Placeholder):
    """The part of torch._dynamo that torch, transformers and accelerate use without compiling: decorators and calls, which
    change nothing then, a class, which has no instances, and a cache, which is empty.
    """

    eval_frame = SimpleNamespace(OptimizedModule=_Deferred("torch._dynamo.eval_frame", "OptimizedModule"))
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def allow_in_graph(function: Any) -> Any:
        return function

    assume_constant_result = allow_in_graph

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        pass

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, recursive: bool = True, **more: Any) -> Any:
        if function is None:
            return functools.partial(_Compiler.disable, recursive=recursive, **more)

        disabled: list[Any] = []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _is_imported(COMPILER):
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(sys.modules[COMPILER].disable(function, recursive, **more))
            return disabled[0](*args, **kwargs)

        return call


class _LeftOut(_Placeholder):
    """A package of which nothing will be used. Its modules are placeholders, too, and a class derived from one of its
    classes does without that base.
    """

    def __getattr__(self, name: str) -> _Deferred:
        if name.startswith("__") or f"{self.__name__}.{name}" in PATCHED:
            raise AttributeError(name)
        return _Deferred(self.__name__, name, is_base=False)


class _CompilerLeftOut(_Compiler, _LeftOut):
    pass


class _Submodules(MetaPathFinder, Loader):
    """Imports the real package when a module in it is imported, which may import that module, too; unless it is left
    out.
    """

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        package = name.rpartition(".")[0]
        parent = sys.modules.get(package)
        if isinstance(parent, _LeftOut):
            if name in PATCHED:
                raise ImportError(f"{name} is left out", name=name)
            return ModuleSpec(name, self, is_package=True)
        if not isinstance(parent, _Placeholder):
            return None
        _remove(package)
        real = importlib.import_module(package)
        return ModuleSpec(name, self) if name in sys.modules else PathFinder.find_spec(name, real.__path__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or _LeftOut(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _is_imported(module: str) -> bool:
    return module in sys.modules and not isinstance(sys.modules[module], _Placeholder)


def _remove(module: str) -> None:
    """Remove a placeholder; that of a module that is left out with all others, which may import one another."""
    if isinstance(sys.modules.get(module), _LeftOut):
        for name in [name for name, each in sys.modules.items() if isinstance(each, _LeftOut)]:
            _remove_one(name)
    else:
        _remove_one(module)


def _remove_one(module: str) -> None:
    if isinstance(sys.modules.get(module), _Placeholder):
        del sys.modules[module]
    parent, _, name = module.rpartition(".")
    if isinstance(vars(sys.modules.get(parent, object)).get(name), _Placeholder):
        delattr(sys.modules[parent], name)


def defer_compiler() -> None:
    """From now on, torch's compiler is imported when it is used: `torch.optim` imports it at the first step. Not for a
    process that compiles.
    """
    _put_placeholder(COMPILER, _Compiler)


def leave_out_compiler() -> None:
    """From now on, `torch.compile` returns functions unchanged, and what imports torch's compiler gets placeholders. For a
    process that computes eagerly, such as vLLM on a CPU, most of whose modules name the compiler.

    Without effect if the compiler is imported already. It still is if something calls one of its functions.
    """
    torch, kernels = map(importlib.import_module, ("torch", "torch._library.triton"))
    if _is_imported(COMPILER) or _is_imported(INDUCTOR):
        return
    _put_placeholder(COMPILER, _CompilerLeftOut)
    _put_placeholder(INDUCTOR, _LeftOut)
    vars(torch)["compile"] = _uncompiled
    vars(kernels)["get_inner_triton_kernels"] = lambda fn: []  # for Inductor alone


def _uncompiled(model: Any = None, **options: object) -> Any:
    """torch.compile, as a function and as a decorator."""
    return _identity if model is None else model


def _identity(function: Any) -> Any:
    return function


def has_compiler() -> bool:
    """Whether torch's compiler is imported."""
    return _is_imported(COMPILER)


@contextmanager
def lean_imports() -> Iterator[None]:
    """For imports of transformers, and for loading a model that is not compiled. Modules that are there already stay."""
    is_deferred = COMPILER in sys.modules
    _put_placeholder(COMPILER, _Compiler)
    if not _is_imported(COMPILER):  # it imports the others
        for name in DEFERRED:
            _put_placeholder(name, _Placeholder)
    try:
        with quick_metadata():
            yield
    finally:
        for name in DEFERRED if is_deferred else (COMPILER, *DEFERRED):
            _remove(name)


def _put_placeholder(module: str, kind: type[_Placeholder]) -> None:
    if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Submodules())
    if module not in sys.modules:
        sys.modules[module] = kind(module)


def name_dtensor() -> None:
    """Set the attribute `torch.distributed.tensor`, which PEFT uses without importing that module."""
    module, parent = importlib.import_module(DTENSOR), importlib.import_module("torch.distributed")
    if not hasattr(parent, "tensor"):  # a placeholder is not imported, so nothing has set it
        parent.tensor = module  # type: ignore[attr-defined]


@contextmanager
def quick_metadata() -> Iterator[None]:
    """For the import of transformers, which asks for the distributions of all packages, and reads all its 1,600 modules
    for the names in them, twice.
    """
    original, names = metadata.packages_distributions, _ModuleNames()
    metadata.packages_distributions = packages_distributions
    sys.meta_path.insert(0, names)
    try:
        yield
    finally:
        metadata.packages_distributions = original
        sys.meta_path.remove(names)


class _ModuleNames(MetaPathFinder):
    """Has transformers read its modules once, and of each only the end, which has `__all__`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "transformers.utils.import_utils" else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                with suppress(AttributeError):  # of another version
                    fetch, read = module.fetch__all__, module.create_import_structure_from_path.__wrapped__
                    vars(module)["fetch__all__"] = lambda text: fetch(text[text.rfind("\n__all__") + 1 :])
                    vars(module)["create_import_structure_from_path"] = functools.cache(read)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def packages_distributions() -> dict[str, list[str]]:
    """As `importlib.metadata.packages_distributions`: the distributions of each package that can be imported."""
    distributions: defaultdict[str, list[str]] = defaultdict(list)
    for distribution in metadata.distributions():
        declared = distribution.read_text("top_level.txt")
        packages = set(declared.split()) if declared else _packages_of(distribution)
        if packages:
            name = _name(distribution)
            for package in packages:
                distributions[package].append(name)
    return dict(distributions)


def _packages_of(distribution: metadata.Distribution) -> set[str]:
    """The packages and modules of its Python files."""
    record = distribution.read_text("RECORD")
    if record is None:
        paths = [str(file) for file in distribution.files or ()]
    else:
        paths = [line.lstrip('"').rsplit(",", 2)[0] for line in record.splitlines()]
    return {path.partition("/")[0].removesuffix(".py") for path in paths if path.endswith(".py")}


def _name(distribution: metadata.Distribution) -> str:
    text = distribution.read_text("METADATA") or ""
    begin = text.find("Name:")
    if begin == 0 or text[begin - 1 : begin] == "\n":
        return text[begin + len("Name:") :].split("\n", 1)[0].strip()
    return distribution.metadata["Name"]
