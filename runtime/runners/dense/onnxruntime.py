"""The execution of an artifact's ONNX model by onnxruntime: numpy arrays in and out, K and V updated in place."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.errors import ConfigError, InfercError
from inferc.kv_groups import CacheGroup
from inferc.manifest import ONNX_MODEL
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.dense.caches import HostCaches, cache_inputs
from inferc.runtime.runners.dense.runner import DenseRunner
from inferc.runtime.step.plan import F32
from inferc.system.cpu_features import cpu_features
from inferc.system.resources import available_cores

if TYPE_CHECKING:
    from inferc.runtime.runners.cuda.driver import Driver
    from inferc.runtime.runners.dense.cuda_caches import Rows

log = logging.getLogger(__name__)

# onnxruntime's names of the execution provider and of the memory device, for the CPU and for a GPU.
CPU, CUDA = ("CPUExecutionProvider", "cpu"), ("CUDAExecutionProvider", "cuda")
PACKAGES = ("onnxruntime", "onnxruntime-gpu")
Array = NDArray[Any]
INSTALL = {CPU[0]: "inferc[onnx]", CUDA[0]: "inferc[onnx-gpu]"}
SESSION = {
    "session.force_spinning_stop": "1",  # threads wait actively within a call, and sleep between calls
}
# Without these features, x86's products of unsigned activations and signed weights saturate when pairs are added.
# With EXACT, onnxruntime then makes the weights unsigned too. Its kernels for those are several times slower for many
# rows, so EXACT is set only where it is needed.
VNNI = frozenset({"avx512_vnni", "avx_vnni"})
EXACT = {"session.x64quantprecision": "1"}
OLDEST = (1, 25)  # the first onnxruntime with TensorScatter, and so with every op of opset 24 in use


class OnnxModel:
    """A session of the model.

    device: onnxruntime's name of the device that holds the caches; provider: its execution provider; driver: the driver
    of the GPU that holds the caches, which is closed with the session.
    """

    def __init__(
        self,
        artifact: Artifact,
        num_threads: int,
        provider: str = CPU[0],
        device: str = CPU[1],
        driver: Driver | None = None,
    ) -> None:
        """Open the session. Raises ConfigError if onnxruntime or the provider is missing."""
        ort = _onnxruntime(provider)
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 3
        # The model is passed as the verified bytes; the weights that it names lie in the artifact's folder.
        weights = {"session.model_external_initializers_file_folder_path": str(artifact.path)}
        for name, value in (SESSION | session_for(cpu_features()) | weights).items():
            options.add_session_config_entry(name, value)
        providers = list(dict.fromkeys((provider, CPU[0])))  # the CPU for ops without a GPU kernel, mostly on shapes
        try:
            self._session: Any = ort.InferenceSession(artifact.read(ONNX_MODEL), options, providers=providers)
        except Exception as error:  # noqa: BLE001  (onnxruntime's own kinds, which it does not export by name)
            raise InfercError(f"onnxruntime does not take {artifact.path / ONNX_MODEL}: {_first_line(error)}") from None
        if (found := self._session.get_providers()[0]) != provider:
            raise ConfigError(
                f"onnxruntime {ort.__version__} could not start {provider}, and would run on {found}: CUDA's libraries"
                " or cuDNN are missing; pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
        self.name = f"onnxruntime {ort.__version__} ({provider.removesuffix('ExecutionProvider')})"
        self._device, self._driver = device, driver
        hidden, logits = (self._session.get_outputs()[index] for index in (0, 1))
        self._hidden_size, self._hidden_dtype = int(hidden.shape[1]), _dtype_of(hidden.type)
        self._vocab_size = int(logits.shape[1])
        types = {each.name: _dtype_of(each.type) for each in self._session.get_inputs() if len(each.shape) == 4}
        self._cache_types = types
        # Kept between calls: binding all K and V anew took 0.2 ms per step of a model of six layers.
        self._binding = self._session.io_binding()
        self._bound: dict[str, tuple[Any, ...]] = {}  # the memory that each cache is bound to

    def __call__(self, inputs: Mapping[str, Array], caches: Mapping[str, Array | Rows]) -> tuple[Array, F32]:
        binding = self._binding
        rows = len(inputs["logits_rows"])
        hidden = np.empty((rows, self._hidden_size), self._hidden_dtype)
        logits = np.empty((rows, self._vocab_size), np.float32)
        kept = [np.ascontiguousarray(array) for array in inputs.values()]
        for name, array in zip(inputs, kept, strict=True):
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in (("hidden", hidden), ("logits", logits)):
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, cache in caches.items():  # input and output are the same memory, so the cache is written in place
            if isinstance(cache, np.ndarray):
                shape, address = cache.shape, cache.ctypes.data
            else:
                shape, address = (len(inputs["starts"]), *cache.shape), cache.address
            where = (self._device, 0, self._cache_types[name], shape, address)
            if self._bound.get(name) != where:
                binding.bind_input(name, *where)
                binding.bind_output(f"{name}.out", *where)
                self._bound[name] = where
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return hidden, logits

    def release(self) -> None:
        """Free everything except the driver."""
        self._session = self._binding = None

    def close(self) -> None:
        self.release()
        if self._driver is not None:
            self._driver.close()


def session_for(features: frozenset[str]) -> dict[str, str]:
    """Return the session options for a processor with these features, which make integer sums exact."""
    return EXACT if "avx2" in features and not features & VNNI else {}


def open_onnx(artifact: Artifact, config: ResolvedEngineConfig) -> DenseRunner:
    """Open a runner of an artifact for the `onnx` target on the CPU."""
    model = OnnxModel(artifact, config.num_threads)
    caches = HostCaches(cache_inputs(artifact))
    return DenseRunner(model, caches, config, artifact.max_model_len, artifact.vocab_size)


def open_onnx_cuda(
    artifact: Artifact, config: EngineConfig, groups: Sequence[CacheGroup], driver: Driver
) -> tuple[DenseRunner, ResolvedEngineConfig]:
    """Open a runner of an artifact for the `onnx` target on a GPU, whose memory holds K and V.

    The runner owns the driver once it is made.
    """
    from inferc.runtime.runners.dense.cuda_caches import device_caches

    threads = available_cores() if config.num_threads == "auto" else config.num_threads
    model = OnnxModel(artifact, threads, *CUDA, driver)  # first, so the caches get what the weights leave
    try:
        caches, resolved = device_caches(artifact, config, groups, driver, "onnx")
    except BaseException:
        model.release()  # the caller still owns the driver and closes it afterwards
        raise
    vocab_size = artifact.vocab_size
    return DenseRunner(model, caches, resolved, artifact.max_model_len, vocab_size), resolved


def _onnxruntime(provider: str) -> Any:
    both = [name for name in PACKAGES if _is_installed(name)]
    if len(both) == 2:
        raise ConfigError(
            "onnxruntime and onnxruntime-gpu are both installed, and overwrite one another's files: uninstall both,"
            " then install one (`pip install 'inferc[onnx]'` or `'inferc[onnx-gpu]'`)"
        )
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError(
            f"this artifact runs by onnxruntime, which is not installed: pip install '{INSTALL[provider]}'"
        ) from None
    version = onnxruntime.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"onnxruntime {version} does not run all of ONNX's opset 24, in which the model is; versions from"
            f" {OLDEST[0]}.{OLDEST[1]} on do: pip install -U '{INSTALL[provider]}'"
        )
    have = onnxruntime.get_available_providers()
    if provider not in have:
        raise ConfigError(
            f"onnxruntime {version} has no {provider}, only {', '.join(have)};"
            " for a GPU install 'inferc[onnx-gpu]' in place of 'inferc[onnx]'"
        )
    return onnxruntime


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _dtype_of(kind: str) -> type[np.generic]:
    return {"tensor(float)": np.float32, "tensor(float16)": np.float16}[kind]  # type: ignore[return-value]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
