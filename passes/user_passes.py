"""Find, check and run passes that a user brings from outside the package.

A pass is an object with a `name` that is called with the program, edits it in place and returns how many rewrites it
made. It may have `after` (the built-in pass that it runs after), `kernels` (rows in front of KERNELS) and `headers`
(the folder of the .h files with the C++ of its kernels). All of it is checked before anything of the model is read.
docs/extending.md shows how to write one.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from inferc.codegen.cpp.table import KERNELS
from inferc.codegen.cpp.unit import HEADERS
from inferc.codegen.kernel import Kernel
from inferc.config import pass_spec
from inferc.errors import ConfigError, InfercError, VerifyError
from inferc.ir.program import Program
from inferc.passes.verify import interface, verify, verify_interface

NAME = re.compile(r"[A-Za-z]\w*")
# All fusions are done after this pass; what follows is quantization, if any, and the choice of kernels.
DEFAULT_AFTER = "split_head"


@dataclass(frozen=True)
class UserPass:
    """A user's pass as the pipeline runs it, whose errors are reported as errors of that pass.

    own_headers: file name to text of the C++ that its kernels call.
    """

    name: str
    spec: str
    run: Callable[[Program], Any]
    after: str = DEFAULT_AFTER
    kernels: tuple[Kernel, ...] = ()
    own_headers: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, program: Program) -> int:
        """Run the pass on `program` and return the number of its rewrites.

        Raises ConfigError if it fails or breaks the protocol, and VerifyError if it breaks the program.
        """
        before, text, weights = interface(program), program.to_text(), dict(program.weights)
        count = _guarded(self.run, f"pass {self.name} ({self.spec})")(program)
        if type(count) is not int or count < 0:
            raise ConfigError(f"pass {self.name} ({self.spec}) returned {count!r}, expected the number of its rewrites")
        try:
            verify(program)
            verify_interface(program, before)
        except VerifyError as error:
            raise VerifyError(f"after {self.name} ({self.spec}): {error}") from error
        if not count and (text != program.to_text() or weights != program.weights):
            raise ConfigError(
                f"pass {self.name} ({self.spec}) returned 0 and changed the program; return the number of rewrites,"
                " by which they are logged and certified"
            )
        return count


def load_passes(passes: Sequence[Any]) -> tuple[UserPass, ...]:
    """Load the passes that a config names ("module:name" or "file.py:name") or holds as objects.

    Raises ConfigError at the first fault.
    """
    loaded: list[UserPass] = []
    for each in passes:
        made = _checked(_find(each) if isinstance(each, str) else each, pass_spec(each))
        _refuse_twice("pass", made.spec, [made.name], [other.name for other in loaded])
        others = [kernel.name for other in loaded for kernel in other.kernels]
        names = [kernel.name for kernel in made.kernels]
        _refuse_twice("kernel", made.spec, names, [*(kernel.name for kernel in KERNELS), *others])
        _refuse_twice("header", made.spec, list(made.own_headers), _headers_taken(made, loaded))
        loaded.append(made)
    return tuple(loaded)


def _headers_taken(made: UserPass, loaded: list[UserPass]) -> list[str]:
    """Return the names of header files that exist already with another text; several passes may share one folder."""
    texts = [item for other in loaded for item in other.own_headers.items()]
    return [*HEADERS, *(name for name, text in texts if made.own_headers.get(name, text) != text)]


def _refuse_twice(what: str, spec: str, names: list[str], taken: list[str]) -> None:
    for index, name in enumerate(names):
        if name in taken or name in names[:index]:
            raise ConfigError(f"--pass {spec}: there is a {what} named {name} already; give it another name")


# ------------------------------------------------------------------------------------------------- finding


def _find(spec: str) -> Any:
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ConfigError(f"--pass {spec!r}: expected MODULE:NAME or FILE.py:NAME, for example own_pass:fuse_scale")
    module = _import(where, spec)
    if not hasattr(module, name):
        raise ConfigError(f"--pass {spec}: {where} has no {name!r}; give the name of the pass, an object in it")
    return getattr(module, name)


def _import(where: str, spec: str) -> ModuleType:
    try:
        return _import_file(Path(where), spec) if where.endswith(".py") else importlib.import_module(where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (where == missing or where.startswith(f"{missing}.")):
            raise ConfigError(
                f"--pass {spec}: there is no module {missing!r}; run from the folder it is in, or install it"
            ) from error
        raise ConfigError(f"--pass {spec}: importing it raised {_shown(error)}; INFERC_DEBUG=1 shows where") from error


def _import_file(path: Path, spec: str) -> ModuleType:
    """Import a file as a module, once per process, because it may define ops, which torch registers only once."""
    if not path.is_file():
        raise ConfigError(f"--pass {spec}: there is no file {path}; expected a Python module")
    path = path.resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    # Register the module under its path, which no import statement can name: the stem may be the name of another
    # module.
    sys.modules[str(path)] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
    return module


# ------------------------------------------------------------------------------------------------ checking


def _checked(found: Any, spec: str) -> UserPass:
    if isinstance(found, type):
        raise ConfigError(
            f"--pass {spec} is a class; name an object of it ({found.__name__.lower()} = {found.__name__}())"
        )
    if not callable(found):
        raise ConfigError(f"--pass {spec} is {found!r}, expected an object that is called with the program")
    name = getattr(found, "name", None)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"--pass {spec} has the name {name!r}, expected letters, digits and _: give it an attribute `name`"
        )
    after = getattr(found, "after", DEFAULT_AFTER)
    if not isinstance(after, str):
        raise ConfigError(f"--pass {spec}: its `after` is {after!r}, expected the name of a pass, as text")
    kernels = _kernels(getattr(found, "kernels", ()), spec)
    return UserPass(name, spec, found, after, kernels, _headers(getattr(found, "headers", None), spec))


def _kernels(found: Any, spec: str) -> tuple[Kernel, ...]:
    if not isinstance(found, tuple) or not all(isinstance(each, Kernel) for each in found):
        raise ConfigError(f"--pass {spec}: its `kernels` are {found!r}, expected a tuple of inferc.extend.Kernel")
    for each in found:
        if each.backend != "cpp" or not each.emit:
            raise ConfigError(
                f"--pass {spec}: kernel {each.name} has the backend {each.backend!r} and emit {each.emit!r},"
                " expected 'cpp' and a function: only the cpu target runs kernels of a pass"
            )
    return tuple(_own(each, spec) for each in found)


def _own(kernel: Kernel, spec: str) -> Kernel:
    """Wrap the functions of a kernel row so that their errors are reported as the user's."""
    told = f"kernel {kernel.name} of {spec}"

    def emit(*args: Any) -> Any:
        return _guarded(lambda *given: kernel.load_emit()(*given), f"{told}: emit")(*args)

    return replace(kernel, why_not=_guarded(kernel.why_not, f"{told}: why_not"), emit=emit)


def _headers(folder: Any, spec: str) -> dict[str, str]:
    if folder is None:
        return {}
    if not isinstance(folder, (str, Path)) or not Path(folder).is_dir():
        raise ConfigError(f"--pass {spec}: its `headers` are {str(folder)!r}, expected a folder with .h files")
    texts = {path.name: path.read_text() for path in sorted(Path(folder).glob("*.h"))}
    if not texts:
        raise ConfigError(f"--pass {spec}: its `headers` {folder} has no .h file; put the C++ of its kernels there")
    return texts


def _guarded(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Wrap `function` so that whatever it raises becomes a ConfigError that names `what`."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except InfercError as error:
            raise ConfigError(f"{what}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{what} raised {_shown(error)}; INFERC_DEBUG=1 shows where") from error

    return call


def _shown(error: BaseException) -> str:
    """Format an exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
