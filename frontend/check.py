"""The checks that a captured graph computes what the model computes, made before anything is emitted.

A capture can be silently wrong, so: a module in memory must compute what its class makes of its config. Every layer
must hold one attention node. A small random copy of the model, with every distinct kind of layer, must give the logits
that transformers' own eager code gives; for a float32 model that is small itself, the captured program itself must give
them.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from inferc.errors import ExportError, InfercError, UnsupportedError
from inferc.frontend.checkpoint.load import Checkpoint, load_module
from inferc.frontend.checkpoint.safetensors import TensorDictReader
from inferc.frontend.export import DTYPES, context_length, export_model, sequence_length
from inferc.frontend.names import Names
from inferc.frontend.trace import torch_export as trace
from inferc.frontend.trace.positions import first_position, takes_positions
from inferc.frontend.trace.rope import fix_rope
from inferc.ir import weights as weight_lib
from inferc.ir.layer_kinds import distinct_prefix, layer_kinds, layer_nodes
from inferc.ir.program import Program, target_name

log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # largest difference of two logits, relative to the largest logit, both in float32
NUM_TOKENS = 24
# The same difference between a module and its rebuild, which run the same code; only threads may add in another order.
MODULE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_MODULE_TOKENS = 16
MAX_PARAMETERS, MAX_OWN_WINDOW = 1 << 24, 64  # limits of a float32 model that is checked without a copy
MAX_WINDOW = 7  # the attention windows of the copy: NUM_TOKENS reaches beyond three of them
# The copy is run up to this position, or to the end of the context, so that rope scaling is in force.
LAST_POSITION = 8192
# The sizes that a copy may reduce, and to what: they do not change which computations are applied to an element.
VOCABULARY = {"vocab_size": 512}
INNER = dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner"), 64
)
WINDOWS = dict.fromkeys(("sliding_window", "attention_chunk_size"), MAX_WINDOW)


def check_capture(program: Program, checkpoint: Checkpoint, max_model_len: int | None = None) -> None:
    """Raise ExportError, naming the difference, unless `program` computes what the checkpoint's model computes."""
    length = sequence_length(checkpoint.config, max_model_len)
    own = _other_weights(program, checkpoint) if _is_small(program) else None
    if own is not None:
        model, reader = own
        check_positions(model, checkpoint.name)
        fix_rope(model, length)
        _check_logits(program, reader, model, program.info.num_attention_layers, checkpoint.name)
        log.info("capture of %s checked on other weights", checkpoint.name)
        return
    num_layers = _num_distinct(program)
    model = _small_model(checkpoint, num_layers)
    check_positions(model, checkpoint.name)
    reader = checkpoint_form(model, program)
    twin = Checkpoint(model.config, checkpoint.model_class, reader.tensors, reader)
    small = export_model(twin, "float32", length)
    fix_rope(model, length)
    check_attention_count(small, checkpoint.name)
    _check_same_ops(program, small, num_layers, checkpoint.name)
    _check_logits(small, reader, model, num_layers, checkpoint.name)
    log.info("capture of %s checked on a random copy of its first %d layers", checkpoint.name, num_layers)


def check_module(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError unless a checkpoint's module computes what its class makes of its config.

    The compiler reads the class, its config and the module's tensors: another activation or scale that was put into the
    module after it was built would be lost.
    """
    if checkpoint.module is None:
        return
    module, name = checkpoint.module, checkpoint.name
    found = _run_module(module, name)
    expected = _run_module(_rebuild(checkpoint), name)
    if torch.equal(found.nan_to_num(), expected.nan_to_num()):
        return
    error = _relative(found, expected)
    if error > MODULE_TOLERANCE.get(next(module.parameters()).dtype, TOLERANCE):
        raise UnsupportedError(
            f"{name}: the module computes something else than its config's model: logits differ by {error:.1e} of the"
            " largest, so a submodule, an attribute or the config was changed after it was built; change the class or"
            " the config it is built from, or compile a folder"
        )


def random_copy(
    program: Program, checkpoint: Checkpoint, dtype: str, min_layers: int = 1, parts: int = 1
) -> Checkpoint:
    """Return a small random model in `dtype` with every distinct kind of layer of `program`, as a checkpoint.

    It has at least `min_layers` layers, and inner sizes that can be cut in `parts`.
    """
    model = _small_model(checkpoint, max(min_layers, _num_distinct(program)), parts)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    model.config.dtype = DTYPES[dtype]
    return load_module(model)


def check_attention_count(program: Program, where: str) -> None:
    """Raise ExportError unless every layer has exactly one attention node."""
    expected = program.info.num_attention_layers
    layers = Counter(node.meta["layer"] for node in program.graph.nodes if _is(node, "inferc.attention"))
    found = {layer: layers.get(layer, 0) for layer in range(expected) if layers.get(layer, 0) != 1}
    outside = sum(count for layer, count in layers.items() if layer not in range(expected))
    if not found and not outside:
        return
    said = [
        f"{_listed([layer for layer, count in found.items() if count == many])} {'none' if not many else many}"
        for many in sorted(set(found.values()))
    ]
    said += [f"{outside} in no layer"] if outside else []
    why = (
        "the model's code goes past transformers' attention interface, and its mask would be lost"
        if any(not many for many in found.values())
        else "the cache holds K and V of one attention for each layer"
    )
    raise ExportError(
        f"{where}: {layers.total()} attention nodes were captured in {expected} layers, expected one in each, and"
        f" {', '.join(said)}; {why}"
    )


def _num_distinct(program: Program) -> int:
    """Return how many layers, from the first on, hold every distinct layer, wherever a layer's input comes from."""
    return distinct_prefix(layer_kinds(program, ignore_inputs=True))


def _listed(layers: list[int]) -> str:
    """Return `layer 3 has` for one layer, or `layers 0, 2 and 4 have` for a few."""
    if len(layers) == 1:
        return f"layer {layers[0]} has"
    first = ", ".join(str(layer) for layer in layers[:3])
    return f"layers {first}{f' and {len(layers) - 3} more' if len(layers) > 3 else ''} have"


# --------------------------------------------------------------------------------------- a module in memory


def _rebuild(checkpoint: Checkpoint) -> Any:
    """Build the model of the class and config over the module's own tensors, so that nothing large is copied."""
    module: Any = checkpoint.module
    attention = getattr(module.config, "_attn_implementation", None)
    model = trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta", attention=attention)
    model.load_state_dict(module.state_dict(), strict=False, assign=True)
    owners = dict(module.named_modules())
    for path, part in model.named_modules():
        owner = owners.get(path)
        for name in part._buffers:
            if owner is not None and owner._buffers.get(name) is not None:
                part._buffers[name] = owner._buffers[name].clone()
        for name, value in vars(part).items():  # constants that are no buffers: their values come from the config too
            if isinstance(value, Tensor) and value.is_meta and isinstance(getattr(owner, name, None), Tensor):
                setattr(part, name, getattr(owner, name))
    return model


def _run_module(module: Any, name: str) -> Tensor:
    """Return float32 logits of a few fixed tokens, in eval mode, on the module's device."""
    num_tokens = min(NUM_MODULE_TOKENS, context_length(module.config).trained or NUM_MODULE_TOKENS)
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(0, int(module.config.vocab_size), (1, num_tokens), generator=generator)
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with trace.quiet(), torch.no_grad():
            logits: Tensor = module(input_ids=token_ids.to(module.device), use_cache=False).logits
    except Exception as error:  # the module's code may raise anything
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedError(
            f"{name}: the module does not run as its class does ({type(error).__name__}: {reason}); give one that is as"
            " its class makes it, or compile a folder"
        ) from error
    finally:
        for part in training:
            part.training = True
    return logits.float()


# ------------------------------------------------------------------------------------------- the small copy


def _small_model(checkpoint: Checkpoint, num_layers: int, parts: int = 1) -> Any:
    """Build the model with `num_layers` layers and reduced sizes, in float32 with random weights, on the CPU."""
    inner = {name: max(limit, weight_lib.PANEL * parts) for name, limit in INNER.items()}
    all_limits, outer = VOCABULARY | WINDOWS | inner, VOCABULARY | WINDOWS
    last: Exception | None = None
    for limits, narrow in ((all_limits, True), (all_limits, False), (outer, False)):
        config = shrink(checkpoint.config, num_layers, limits, narrow)
        try:
            return _random_model(checkpoint, config)
        except Exception as error:  # noqa: BLE001  if sizes of this model depend on each other, shrink it less
            log.debug("copy of %s with %s, narrow=%s: %s", checkpoint.name, limits, narrow, error)
            last = error
    if isinstance(last, InfercError):
        raise last
    raise ExportError(f"{checkpoint.name}: a copy of its first {num_layers} layers does not run ({last})") from last


def _is_small(program: Program) -> bool:
    """Tell whether running the whole model costs less than capturing a copy, which would be in float32 too."""
    few = program.info.num_parameters <= MAX_PARAMETERS and _widest_window(program) <= MAX_OWN_WINDOW
    return few and program.info.dtype == "float32"


def _other_weights(program: Program, checkpoint: Checkpoint) -> tuple[Any, TensorDictReader] | None:
    """Return the whole model with random weights, and its tensors.

    The result is None if these are not named and stored as the checkpoint's tensors.
    """
    if checkpoint.module is not None:
        return None
    try:
        model = _random_model(checkpoint, checkpoint.config)
    except Exception as error:  # noqa: BLE001  a small copy may still run, or will say why not
        log.debug("%s with other weights: %s", checkpoint.name, error)
        return None
    reader = checkpoint_form(model, program)
    return (model, reader) if checkpoint.tensors.items() <= reader.tensors.items() else None


def _random_model(checkpoint: Checkpoint, config: Any) -> Any:
    """Build the checkpoint's class for `config`, in float32 with random weights, on the CPU, and run it once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = trace.build(checkpoint.model_class, config, torch.float32, "cpu")
        run_eager(model, *example(model, 4, 4))
        _randomise(model)
    return model


def shrink(config: Any, num_layers: int, limits: dict[str, int], narrow: bool) -> Any:
    """Return a copy of `config` with the first `num_layers` layers and with sizes within `limits`.

    narrow: also reduce the hidden size.
    """
    small = copy.deepcopy(config)
    count = int(config.num_hidden_layers)
    for name, value in list(vars(small).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(small, name, type(value)(value[:num_layers]))
    small.num_hidden_layers = num_layers
    for name, limit in limits.items():
        value = getattr(small, name, None)
        if isinstance(value, int) and value > limit:
            setattr(small, name, limit)
    if narrow and getattr(small, "head_dim", None) and small.hidden_size > 256:
        small.hidden_size = 256
    # The embedding's padding row must exist; it is like any other row in inference.
    if (getattr(small, "pad_token_id", None) or 0) >= small.vocab_size:
        small.pad_token_id = None
    return small


def _randomise(model: Any) -> None:
    """Move every parameter off 0 and 1, which hide mistakes, and make signals large enough to be seen."""
    for parameter in model.parameters():
        scale = 0.2 if parameter.dim() < 2 else 0.7 * parameter.shape[-1] ** -0.5
        parameter.add_(torch.randn(parameter.shape), alpha=scale)


def checkpoint_form(model: Any, program: Program) -> TensorDictReader:
    """Return a model's tensors in the form of the checkpoint that `program` reads.

    They have the names of that one, and are one tensor per expert where it has one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if any(leaf.name not in state for weight in program.weights.values() for leaf in weight.sources() if leaf.name):
        state = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, state).items()}
    return TensorDictReader(state)


# ----------------------------------------------------------------------------------------------- comparing


def example(model: Any, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
    """Return token ids and positions, each [1, num_tokens].

    The positions are the last of the context or of `length`, whichever is longer, but below LAST_POSITION.
    """
    end = max(num_tokens, min(max(context_length(model.config).trained or 0, length), LAST_POSITION))
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, int(model.config.vocab_size), (1, num_tokens), generator=generator)
    return token_ids, torch.arange(end - num_tokens, end)[None]


def run_eager(model: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
    ids = positions + first_position(model.config)
    extra = {"position_ids": ids} if takes_positions(type(model)) else {}
    with trace.quiet(), torch.no_grad():
        logits: Tensor = model(input_ids=token_ids, use_cache=False, **extra).logits
    return logits


def check_positions(model: Any, where: str) -> None:
    """Raise ExportError unless a model without given positions counts them as a compiled model does."""
    if not takes_positions(type(model)):
        return
    size, padding = int(model.config.vocab_size), getattr(model.config, "pad_token_id", None) or 0
    token_ids = (padding + 1 + torch.arange(4)[None]) % size  # no padding tokens, which some models do not count
    with trace.quiet(), torch.no_grad():
        own: Tensor = model(input_ids=token_ids, use_cache=False).logits
    if _relative(run_eager(model, token_ids, torch.arange(4)[None]), own) > TOLERANCE:
        raise ExportError(
            f"{where}: with position_ids from {first_position(model.config)} on the model gives other logits than with"
            " none; expected a model whose positions count tokens"
        )


def _check_same_ops(program: Program, small: Program, num_layers: int, where: str) -> None:
    """Raise ExportError unless the copy's layers have the ops of the model's layers, apart from sizes and rounding."""
    real, copied = layer_nodes(program), layer_nodes(small)
    for layer in range(num_layers):
        for_real, for_copy = ([_op(node) for node in nodes if _op(node)] for nodes in (real[layer], copied[layer]))
        if for_real != for_copy:
            differ = next((pair for pair in zip(for_real, for_copy, strict=False) if pair[0] != pair[1]), None)
            raise ExportError(
                f"{where}: layer {layer} of its small copy is not the model's"
                f" ({differ[1] if differ else len(for_copy)} instead of {differ[0] if differ else len(for_real)}),"
                " so the capture cannot be checked"
            )


def _op(node: fx.Node) -> str:
    """Return the op and, for attention, its mask; return "" for ops that only a dtype or a size causes."""
    name = target_name(node.target)
    if name in ("aten._to_copy", "aten.alias", "aten.clone", "aten.slice.Tensor", "aten.sym_size.int"):
        return ""
    return f"{name} {node.args[5]}" if name == "inferc.attention" else name


def _check_logits(small: Program, reader: TensorDictReader, model: Any, num_layers: int, where: str) -> None:
    num_tokens = max(NUM_TOKENS, _widest_window(small) + 9)
    token_ids, positions = example(model, num_tokens, small.info.max_model_len)
    expected = run_eager(model, token_ids, positions)
    values = {name: weight_lib.read_whole(weight, reader) for name, weight in small.weights.items()}
    inputs = {"token_ids": token_ids, "positions": positions}
    (logits,) = small.run(inputs, values.__getitem__)
    error = _relative(logits, expected)
    if error <= TOLERANCE and torch.equal(logits.argmax(-1), expected.argmax(-1)):
        return
    place = _first_difference(small, model, values, inputs)
    raise ExportError(
        f"{where}: the captured graph is not the model: logits of a random copy of its first {num_layers} layers differ"
        f" from transformers' by {error:.1e} of the largest, expected {TOLERANCE:.0e} at most;"
        f" the first difference is in {place}"
    )


def _widest_window(program: Program) -> int:
    return max((int(node.args[6]) for node in program.graph.nodes if _is(node, "inferc.attention")), default=0)


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    error = float((found - expected).abs().max() / expected.abs().max())
    return float("inf") if math.isnan(error) else error


def _first_difference(small: Program, model: Any, values: dict[str, Tensor], inputs: dict[str, Tensor]) -> str:
    """Return a text that names the first layer whose output differs from the eager model's."""
    eager: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out: eager.append(out[0] if isinstance(out, tuple) else out))
        for layer in model.get_submodule(Names(model).layers)
    ]
    run_eager(model, inputs["token_ids"], inputs["positions"])
    for hook in hooks:
        hook.remove()
    output = small.output()
    wanted = [nodes[-1] for nodes in layer_nodes(small).values()]
    whole, output.args = output.args, (tuple(wanted),)
    captured = small.run(inputs, values.__getitem__)
    output.args = whole
    for layer, (found, expected) in enumerate(zip(captured, eager, strict=True)):
        if _relative(found.view(expected.shape) if found.numel() == expected.numel() else found, expected) > TOLERANCE:
            return f"layer {layer}"
    return "what follows the layers"


def _is(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and target_name(node.target) == name
