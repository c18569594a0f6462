"""Run an artifact that was compiled for onnxruntime with onnxruntime alone, without inferc.

python examples/onnx_alone.py OUT [PROMPT]          # OUT: of `inferc compile MODEL -o OUT --target onnx`
"""

import sys

import numpy as np
import onnxruntime
import tokenizers

COUNT = 32


def main(out: str, prompt: str = "def add(a, b):") -> None:
    onnxruntime.set_default_logger_severity(3)  # hides the warning in each call that K and V are copied
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # needed for w8a8 on a processor without VNNI
    session = onnxruntime.InferenceSession(f"{out}/model.onnx", options)
    tokenizer = tokenizers.Tokenizer.from_file(f"{out}/tokenizer/tokenizer.json")
    ids = list(tokenizer.encode(prompt).ids)
    shapes = {each.name: each.shape for each in session.get_inputs() if len(each.shape) == 4}
    capacity = len(ids) + COUNT
    caches = {name: np.zeros((1, heads, capacity, size), np.float32) for name, (_, heads, _, size) in shapes.items()}
    outputs = [each.name for each in session.get_outputs()]
    new, start = ids, 0
    while len(ids) < capacity:
        end = start + len(new)
        step = {"token_ids": np.array(new, np.int32), "positions": np.arange(start, end), "starts": np.array([start])}
        step |= {"seq_lens": np.array([end]), "logits_rows": np.array([len(new) - 1], np.int32)}
        results = dict(zip(outputs, session.run(outputs, {**step, **caches}), strict=True))
        caches = {name: results[f"{name}.out"] for name in caches}
        new, start = [int(results["logits"][0].argmax())], end
        ids = [*ids, *new]
    print(tokenizer.decode(ids))


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv or len(sys.argv) < 2 else main(*sys.argv[1:])
