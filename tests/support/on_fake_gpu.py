"""Run the `inferc` command on a fake GPU: python on_fake_gpu.py ARTIFACT [FAKE_OPTIONS_AS_JSON] -- COMMAND …

With TRITON_INTERPRET=1. cuBLASLt is there too. Ends with code 3 and a line on standard error where the driver was used
wrongly.
"""

import json
import sys
from pathlib import Path

from fake_cublaslt import FakeCublasLt
from fake_cuda import FakeCuda, Misuse

from inferc.cli import main as cli
from inferc.runtime.runners.cuda import cublaslt, driver


def main() -> None:
    at = sys.argv.index("--")
    folder, *options = sys.argv[1:at]
    fake = FakeCuda(Path(folder), **(json.loads(options[0]) if options else {}))
    driver.open_library = lambda: fake
    cublaslt.open_library = lambda newest: FakeCublasLt(fake)
    sys.argv = ["inferc", *sys.argv[at + 1 :]]
    try:
        cli.main()
    finally:
        try:
            fake.check()
        except Misuse as error:
            print(f"fake GPU: {error}", file=sys.stderr)
            sys.exit(3)


if __name__ == "__main__":
    main()
