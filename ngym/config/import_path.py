"""Loads code that a config or recipe names: `my_package.my_module:NAME` or `my_file.py:NAME`.

Every extension point uses this one loader: algorithms, advantage estimators, push transports, metric sinks, sandbox
providers. Naming such an object runs its module.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ngym.did_you_mean import did_you_mean, near_file
from ngym.errors import ConfigError, NgymError, source_location
from ngym.extras import missing_extra

AUTHOR_ERRORS = (
    TypeError,
    ValueError,
    NameError,
    AttributeError,
    LookupError,
)  # mistakes of the code, not of the machine


@dataclass(frozen=True)
class Choice:
    """Marks a text option that is one of `names`, or an import path."""

    names: tuple[str, ...]
    example: str

    def check(self, value: str) -> bool:
        """Whether the value is an import path. Raises ValueError if it is not one of the names either."""
        if ":" not in value and value not in self.names:
            names = ", ".join(repr(name) for name in self.names)
            raise ValueError(f"Input should be {names} or an import path such as {self.example}")
        return ":" in value


def import_class(path: str, base: type[Any], root: Path = Path()) -> type[Any]:
    """The subclass of `base` at this import path. root: the folder of relative files.

    Raises:
        ValueError: there is no such class, with one line.
    """

    def fits(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, base) and value is not base

    value = cast("type[Any]", _import(path, root, fits, f"subclass of {base.__name__}"))
    if inspect.isabstract(value):
        missing = ", ".join(sorted(value.__abstractmethods__))
        raise ValueError(f"{path} does not define {missing}, which {base.__name__} requires")
    return value


def import_function(path: str, root: Path = Path()) -> Callable[..., Any]:
    """The function, or other callable, at this import path. root: the folder of relative files.

    Raises:
        ValueError: there is no such function, with one line.
    """
    return cast("Callable[..., Any]", _import(path, root, callable, "function"))


def check_arguments(path: str, function: Callable[..., Any], arguments: Iterable[str], own: Sequence[str] = ()) -> None:
    """Raise ValueError unless the callable at this import path takes these keyword arguments.

    own: names of the arguments that ngym passes itself, by position.
    """
    parameters = inspect.signature(function).parameters.values()
    accepted = [
        each for each in list(parameters)[len(own) :] if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    known = [each.name for each in accepted]
    arguments = list(arguments)
    unknown = next((name for name in arguments if name not in known), None)
    if unknown is not None and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise ValueError(f"{path} has no option {unknown!r}{did_you_mean(unknown, known)}")
    missing = next((each.name for each in accepted if each.default is each.empty and each.name not in arguments), None)
    if missing is not None:
        raise ValueError(f"{path} needs the option {missing!r}")
    try:
        inspect.signature(function).bind(*own, **dict.fromkeys(arguments))
    except TypeError as error:
        raise ValueError(f"{path} cannot be called with {', '.join([*own, *arguments])}: {error}") from None


def refusal(field: str, value: Any, error: ValueError) -> ValidationError:
    """The error as one about a field, with `value` as its value: the rest of the model may have secrets."""
    problem = InitErrorDetails(
        type=PydanticCustomError("import_path", "{text}", {"text": str(error)}), loc=(field,), input=value
    )
    return ValidationError.from_exception_data("options", [problem])


def _import(path: str, root: Path, fits: Callable[[Any], bool], kind: str) -> Any:
    module_path, _, name = path.rpartition(":")
    try:
        module = _module(module_path, root)
    except (ConfigError, ImportError, OSError) as error:
        raise ValueError(f"{module_path} cannot be imported: {error}") from None
    except Exception as error:
        # The module's own code failed: the line there is what its author needs.
        raise ValueError(
            f"{module_path} cannot be imported: {type(error).__name__}: {error}{source_location(error)}"
        ) from error
    target = getattr(module, name, None)
    if not fits(target):
        known = [each for each, value in vars(module).items() if fits(value) and not each.startswith("_")]
        raise ValueError(f"{module_path} has no {kind} called {name!r}{did_you_mean(name, known)}")
    return target


def _module(where: str, root: Path) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = root / where
    if not file.is_file():
        raise ConfigError(f"there is no file {file.absolute()}{near_file(file)}")
    return load_file(file)


def load_file(file: Path) -> ModuleType:
    """The module in this file, imported once under a private name, without changing sys.path.

    Relative imports of an `app.py` find the files next to it.

    Raises:
        ConfigError: the file cannot be imported.
    """
    file = file.resolve()
    name = f"_ngym_{file.parent.name if file.name == 'app.py' else file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = [str(file.parent)] if file.name == "app.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportError):
            message = missing_extra(error, _service(file)) or f"{error}; {_remedy(file)}"
            raise ConfigError(f"{file}: {message}") from error
        if isinstance(error, SyntaxError):
            raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
        if isinstance(error, AUTHOR_ERRORS) and not isinstance(error, NgymError):
            raise ConfigError(
                f"{_raised_at(error, file)}: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        if isinstance(error, ConfigError) and str(file) not in str(error):
            raise ConfigError(f"{_raised_at(error, file)}: {error}") from error
        raise
    return module


def _remedy(file: Path) -> str:
    """What to do about a missing package that belongs to no extra."""
    requirements = file.with_name("requirements.txt")
    if file.name == "app.py" and requirements.is_file():
        return f"its stanza needs `requirements: {'/'.join(requirements.parts[-3:])}`"
    return "install its dependencies (its README names the extra)"


def _raised_at(error: BaseException, file: Path) -> str:
    """The last line of the file that led to the error."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _service(file: Path) -> str:
    """`gym_servers/math` for gym_servers/math/app.py."""
    return "/".join(file.parts[-3:-1]) if file.name == "app.py" else file.name
